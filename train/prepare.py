"""Conversations made ready: sources in, one clean chat JSONL out, and where it is asked for a second one held out.

No target is needed and nothing is answered anew (that is `regenerate`).
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from draftsmith.configs import locate
from draftsmith.inference.records import Conversation, to_record
from draftsmith.train.rows import parse_source
from draftsmith.train.sources import Report, Settings, gather
from draftsmith.train.splits import split


def prepare(
    sources: list[str], out: Path, settings: Settings, held_out: Path | None = None, held_out_share: float = 0.0
) -> tuple[Report, int, int]:
    """Returns the account of the rows, and how many conversations `out` and `held_out` hold. Reading these gives the same again.

    Raises:
        ValueError: what `gather` and `split` refuse, files that cannot be written, a weight above 1.
    """
    check_outputs(sources, out, held_out)
    for source in sources:
        if parse_source(source).weight > 1:
            raise ValueError(
                f"{source!r}: copies in a file are read as duplicates; give a weight above 1 in data.train, not here"
            )
    gathered = gather(sources, settings)
    train = gathered.conversations if held_out is None else hold_out(gathered.conversations, held_out, held_out_share)
    for ending in (".meta.json", ".unanswered.jsonl"):
        Path(f"{out}{ending}").unlink(missing_ok=True)  # they would say of the kept answers that a target gave them
    write_conversations(out, train)
    return gathered.report, len(train), len(gathered.conversations) - len(train)


def check_outputs(sources: Sequence[str], out: Path, held_out: Path | None) -> None:
    """Raises ValueError for a file in no folder, one that is both outputs, or one that is read as a source, now or next time."""
    if held_out is not None and held_out.resolve() == out.resolve():
        raise ValueError(f"{out} is to be both the output and what is held out; give two files")
    for path in (out, *([] if held_out is None else [held_out])):
        if not path.parent.is_dir():
            raise ValueError(f"the folder {path.parent} of the output file does not exist; create it first")
        for source in sources:
            place = locate(parse_source(source).path).resolve()
            if place in (path.resolve(), *path.resolve().parents) and place.exists():
                raise ValueError(f"{path} is to be written, but {source!r} is read from there; give another file")


def hold_out(conversations: list[Conversation], path: Path, share: float, *, write: bool = True) -> list[Conversation]:
    """Those to train on; the others (`splits`) are written to `path`, unless another process does that."""
    train, held = split(conversations, share)
    if write:
        write_conversations(path, held)
    return train


def write_conversations(path: Path, conversations: Iterable[Conversation]) -> None:
    """Chat JSONL, one line each, never all in memory; the file is complete or absent."""
    temporary = path.with_name(f"{path.name}.writing")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            for conversation in conversations:
                file.write(json.dumps(to_record(conversation), ensure_ascii=False) + "\n")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
