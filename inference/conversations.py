"""Files of conversations and prompts, strictly: JSONL in, `Conversation`s out, and the first broken line is an error.

For what is not a prompt file (other formats, several sources, bad rows that are counted) there is `train.sources`.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

from draftsmith.configs import locate
from draftsmith.inference.records import SHAPES, Conversation, decode, parse

BOM = b"\xef\xbb\xbf"


def read_conversations(path: str | Path) -> list[Conversation]:
    """Reads JSONL of any shape in `records`: UTF-8, with or without BOM and CRLF, blank lines skipped.

    An assistant turn must answer something: it cannot come first (system turns aside) nor follow another one. User
    turns in a row are fine in every shape, people do send two messages; a template that demands alternation refuses
    them in `render`. A record without an assistant turn is a prompt. Raises ValueError, one line:
    `FILE:LINE: what is wrong; what is allowed`.
    """
    path = locate(path)
    try:
        file = path.open("rb")
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; {SHAPES}") from error
    line_of: dict[str, int] = {}
    conversations = []
    with file:
        for number, line in json_lines(file):
            at = f"{path}:{number}"
            conversation = parse(decode(line, at), at, default_id=f"line-{number}")
            first = line_of.setdefault(conversation.id, number)
            if first != number:
                what = f"id {conversation.id!r} is already that of line {first}"
                raise ValueError(f"{at}: {what}; allowed: a different id in each record, or none")
            conversations.append(conversation)
    if not conversations:
        raise ValueError(f"{path}: no conversation in it; {SHAPES}")
    return conversations


def json_lines(file: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, with their numbers from 1; a line ends at \\n and nowhere else (U+2028 is text)."""
    for number, line in enumerate(file, start=1):
        line = line.removeprefix(BOM) if number == 1 else line
        if line.strip():
            yield number, line
