"""The file of finished rows: what a long run has done, so that a run that was killed takes it over instead of doing it again.

JSON lines. The first names what began the file (its identity: target, settings, versions); each other line is one entry of rows
that were finished together, written at once and synced, so that a kill loses an entry or none of it. A row is known by its id *and*
the hash of what was asked: a run resumed with changed rows takes over exactly the unchanged ones and never gives one row's answer
to another. Each process of a run writes a journal of its own, and every process reads all of them, whatever their number was.
This module does not know what a row is.
"""

import fcntl
import glob
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from draftsmith.drafters.checkpoint import write_text

Key = tuple[str, str]
"""A row's id and the hash of its content."""

Row = dict[str, Any]
"""A finished row: `id`, `hash`, and whatever came of it."""


class Journal:
    """The journal of one process at one stage of the work on a file, open for appending."""

    def __init__(self, out: str | Path, stage: str, identity: dict[str, Any], process: int = 0) -> None:
        """Opens the journals that lie beside `out`, or begins one.

        Args:
            out: the file that the work will end with.
            stage: of the work, part of the journal's name.
            identity: what every row depends on besides its own content; JSON.
            process: the number of this process.

        Raises:
            ValueError: a journal that is there was begun with another identity (says what differs), is damaged, or another run
                writes it.
        """
        self._out, self._stage, self._identity = Path(out), stage, json.loads(json.dumps(identity))
        self.path = self._out.with_name(f"{self._out.name}.{stage}.{process}.partial")
        for path in self._paths():
            list(self._rows(path))  # refuses a foreign one before anything is written
        if not (self.path.exists() and _complete(self.path)):
            write_text(self.path, json.dumps({"identity": self._identity}) + "\n")
        self._file = self.path.open("ab")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until it is closed, or the process ends
        except BlockingIOError:
            self._file.close()
            raise ValueError(
                f"{self.path} is being written by another run; wait for its end, or give another output file"
            ) from None
        self._file.truncate(len(_complete(self.path)))  # without a last line that a kill cut off

    def read(self) -> dict[Key, Row]:
        """The finished rows in the journals of all processes."""
        return {(row["id"], row["hash"]): row for path in self._paths() for row in self._rows(path)}

    def write(self, rows: Sequence[Row]) -> None:
        """Adds one entry; it is on the disk when this returns."""
        self._file.write((json.dumps({"rows": list(rows)}, ensure_ascii=False) + "\n").encode())
        self._file.flush()
        os.fsync(self._file.fileno())

    def __enter__(self) -> "Journal":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def _paths(self) -> list[Path]:
        return journals(self._out, self._stage)

    def _rows(self, path: Path) -> Iterator[Row]:
        for number, line in enumerate(_complete(path).split(b"\n")[:-1], start=1):
            try:
                entry = json.loads(line)
                found = entry["identity"] if number == 1 else entry["rows"]
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(f"{path}:{number} is damaged ({error!r}); delete the file to start anew") from error
            if number > 1:
                yield from found
            elif found != self._identity:
                raise ValueError(
                    f"{path} was begun with other settings or another target ({'; '.join(_differences(found, self._identity))}); "
                    "finish that run with its own command, or delete the file to start anew"
                )


def journals(out: Path, stage: str = "*") -> list[Path]:
    """Those that lie beside a file, of one stage or of all."""
    return sorted(out.parent.glob(f"{glob.escape(out.name)}.{stage}.*.partial"))


def content_hash(content: Any) -> str:
    """Of anything that is JSON, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _complete(path: Path) -> bytes:
    """The file without a last line that a kill cut off; as bytes, the cut may be inside a character."""
    content = path.read_bytes()
    return content[: content.rfind(b"\n") + 1]


def _differences(then: Any, now: Any, where: str = "") -> list[str]:
    """The leaves in which two JSON values differ."""
    if isinstance(then, dict) and isinstance(now, dict):
        keys = [*now, *(key for key in then if key not in now)]
        names = [(key, f"{where}.{key}" if where else key) for key in keys]
        return [found for key, name in names for found in _differences(then.get(key), now.get(key), name)]
    return [] if then == now else [f"{where} was {json.dumps(then)} and is {json.dumps(now)}"]
