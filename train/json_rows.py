"""The records of a JSON file one after the other, never the whole file in memory: JSON lines, or one list of records.

These files are read here and not by the `datasets` library: an error needs its line, a file that is cut off its position, and Arrow
gives every record the keys of all the others, filled with nulls. What a record holds is not looked at (`inference.records`).
"""

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path
from typing import Any

from draftsmith.inference.conversations import BOM, json_lines

CHUNK = 1 << 20
TOKEN = re.compile(
    rb'"[^"\\]*+(?:\\.[^"\\]*+)*+("?)|[\[\]{},]', re.DOTALL
)  # a string, open if group 1 is empty, or a mark
DEPTH = {b"[": 1, b"{": 1, b"]": -1, b"}": -1}


@dataclass(frozen=True, slots=True)
class Row:
    """One record: its place (FILE:LINE), the id it gets if it has none, and its JSON text or, from a table, its columns."""

    at: str
    default_id: str
    content: bytes | dict[str, Any]


@dataclass(frozen=True, slots=True)
class Cut:
    """Stands where the file ends too early: what is wrong and where, behind so many complete records."""

    message: str
    complete: int


@dataclass(frozen=True, slots=True)
class Position:
    """Of the next byte: line and column from 1, a column being a character; `byte` from 0, in the unpacked file."""

    line: int = 1
    column: int = 1
    byte: int = 0

    def after(self, text: bytes) -> "Position":
        last = text[text.rfind(b"\n") + 1 :]
        column = len(last.decode("utf-8", "ignore")) + (1 if b"\n" in text else self.column)
        return Position(self.line + text.count(b"\n"), column, self.byte + len(text))

    def __str__(self) -> str:
        return f"line {self.line}, column {self.column}, byte {self.byte}"


def json_rows(path: Path, *, lines: bool) -> Iterator[Row | Cut]:
    """Rows of a JSON file, packed or not; with `lines` a file that begins with a bracket is not taken for a list.

    Raises ValueError for a file that cannot be opened or unpacked, or goes on behind the end of its list.
    """
    done = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            is_list = not lines and file.peek(CHUNK).removeprefix(BOM).lstrip()[:1] == b"["
            for row in (_of_list if is_list else _of_lines)(file, path):
                yield row
                done += 1
    except EOFError:  # gzip's own word for a packed file that is cut off
        yield Cut(f"{path}: the packed file is cut off", done)
    except (OSError, zlib.error) as error:
        detail = isinstance(error, OSError) and error.strerror
        raise ValueError(
            f"{path}: {detail or error}; give a file that can be read, of JSON lines or a JSON list"
        ) from error


def _of_lines(file: BufferedIOBase, path: Path) -> Iterator[Row | Cut]:
    count = 0
    for number, line in json_lines(file):
        if not line.endswith(b"\n") and _is_incomplete(line):
            end = Position(number, len(line.decode("utf-8", "ignore")) + 1, file.tell())
            yield Cut(f"{path}: cut off at {end}, inside the record that begins with the line", count)
        else:
            yield Row(f"{path}:{number}", f"line-{number}", line)
            count += 1


def _is_incomplete(line: bytes) -> bool:
    """A string or a bracket is open at the end: the beginning of a record, not a broken one."""
    depth = 0
    for token in TOKEN.finditer(line):
        if token[1] == b"":
            return True
        depth += DEPTH.get(token[0], 0)
    return depth > 0


def _of_list(file: BufferedIOBase, path: Path) -> Iterator[Row | Cut]:
    """Only brackets, commas and strings are looked at, so a broken element does not take the next ones with it."""
    buffer = file.read(CHUNK)
    start = len(BOM) if buffer.startswith(BOM) else 0
    here = Position(byte=start)  # of buffer[start], where the next element begins
    scanned, depth, count = start, 0, 0
    while True:
        token = TOKEN.search(buffer, scanned)
        if token is None or token[1] == b"":  # no further mark, or a string that is still open
            more = file.read(max(CHUNK, len(buffer) - start))
            if not more:
                break
            scanned = (token.start() if token else len(buffer)) - start
            buffer, start = buffer[start:] + more, 0
            continue
        scanned = token.end()
        depth += DEPTH.get(token[0], 0)
        if token[0] == b"[" and depth == 1:
            here, start = here.after(buffer[start:scanned]), scanned
        elif depth == 0 or (token[0] == b"," and depth == 1):
            element = buffer[start : token.start()]
            if element.strip():
                count += 1
                yield _element(element, here, path, count)
            here, start = here.after(buffer[start:scanned]), scanned
            if depth == 0:
                _refuse_rest(file, buffer[start:], here, path)
                return
    rest = buffer[start:]
    whole = depth == 1 and _parses(rest)
    if whole:
        count += 1
        yield _element(rest, here, path, count)
    begun = rest.strip() and not whole
    where = f"inside record {count + 1}, which begins at {_first(rest, here)}" if begun else f"after record {count}"
    yield Cut(f"{path}: cut off at {here.after(rest)}, {where}", count)


def _element(text: bytes, here: Position, path: Path, number: int) -> Row:
    return Row(f"{path}:{_first(text, here).line}: record {number}", f"record-{number}", text.strip())


def _first(text: bytes, here: Position) -> Position:
    """Of the first character that is not blank, in a text that begins `here`."""
    return here.after(text[: len(text) - len(text.lstrip())])


def _parses(text: bytes) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse_rest(file: BufferedIOBase, rest: bytes, here: Position, path: Path) -> None:
    while rest := rest or file.read(CHUNK):
        if rest.strip():
            where = _first(rest, here)
            raise ValueError(
                f"{path}: text behind the end of the list, at {where}; allowed: one list, or one record a line"
            )
        here, rest = here.after(rest), b""
