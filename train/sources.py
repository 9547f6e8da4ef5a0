"""Conversations from several sources: what can be used of them, once each, and an account of the rest that adds up.

    gathered = gather(["a.jsonl", "HuggingFaceH4/ultrachat_200k?split=train_sft&weight=0.5"])

Rows are read one by one (`rows`) and become conversations or bad records (`inference.records`); only conversations are kept in
memory. Nothing is rendered here.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from draftsmith.inference.records import SHAPES, BadRecord, Conversation, parse
from draftsmith.train.json_rows import Cut, Row
from draftsmith.train.rows import Source, parse_source, record_of, rows
from draftsmith.train.splits import fingerprint

PROGRESS_EVERY = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is done about trouble.

    Attributes:
        max_bad_share: more bad rows than that, as a share of those read, are an error.
        salvage: of a file that is cut off, take the complete records before the cut instead of stopping.
        seed: which conversations a weight that is not whole takes.
        rejected: where to write the rows that cannot be used; None: nowhere.
    """

    max_bad_share: float = 0.05
    salvage: bool = False
    seed: int = 0
    rejected: Path | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.max_bad_share <= 1:
            raise ValueError(f"max_bad_share is {self.max_bad_share}; give a number from 0 to 1")


@dataclass(slots=True)
class Report:
    """read = used + duplicates + left_out + all that is `rejected`; `copies` come on top of those used."""

    read: int = 0
    used: int = 0
    copies: int = 0
    duplicates: int = 0
    left_out: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    cuts: list[str] = field(default_factory=list)

    def reject(self, reason: str, message: str) -> None:
        self.rejected[reason] += 1
        self.examples.setdefault(reason, message)

    def unused(self, reason: str, message: str, *, is_copy: bool) -> None:
        """One that was counted as used turns out to be bad later on, and so do its copies; it is one row."""
        if is_copy:
            self.copies -= 1
        else:
            self.used -= 1
            self.reject(reason, message)

    def check(self, max_bad_share: float) -> None:
        """Raises ValueError, with the counts and the first example of each reason, when too many rows cannot be used."""
        bad = self.rejected.total()
        if bad > max_bad_share * self.read:
            counts, examples = (
                self._reasons(),
                "; ".join(self.examples[reason] for reason, _ in self.rejected.most_common()),
            )
            raise ValueError(
                f"{bad:,} of {self.read:,} rows cannot be used ({counts}), more than the share {max_bad_share} that max_bad_share "
                f"allows. The first of each kind: {examples}"
            )

    def __str__(self) -> str:
        parts = [f"read {self.read:,} rows: {self.used:,} used"]
        if self.copies:
            parts.append(f"{self.copies:,} copies of these (weight)")
        parts.append(f"{self.duplicates:,} duplicates")
        parts += [f"{self.left_out:,} left out (weight)"] if self.left_out else []
        parts += [f"{self.rejected.total():,} rejected ({self._reasons()})"] if self.rejected else []
        return "; ".join([", ".join(parts), *self.cuts])

    def _reasons(self) -> str:
        return ", ".join(f"{reason} {count:,}" for reason, count in self.rejected.most_common())


@dataclass(frozen=True, slots=True)
class Gathered:
    """The conversations, no two with the same id; of each the place that it was read from; and the account."""

    conversations: list[Conversation]
    places: list[str]
    report: Report


def gather(sources: Sequence[str], settings: Settings | None = None) -> Gathered:
    """Reads the sources (see `rows`) one after the other.

    Of conversations with the same content the first is kept, under the weight of its own source. A weight takes each conversation
    of its source as often as it says, and of the fraction that is left a random choice that depends on what they say and on the
    seed, not on their order. A conversation whose id is taken, a copy or another one, gets `#2`, `#3`, ... behind it.

    Raises:
        ValueError: a source that cannot be read, a file that is cut off, too many bad rows, or no conversation at all.
    """
    settings = settings or Settings()
    gathered = Gathered([], [], Report())
    report, seen, taken = gathered.report, set[bytes](), Counter[str]()
    with _aside(settings.rejected) as aside:
        for text, source in [(text, parse_source(text)) for text in sources]:
            own: list[tuple[bytes, Conversation, str]] = []
            for row in rows(source):
                if isinstance(row, Cut):
                    report.cuts.append(_salvaged(row, settings))
                    continue
                report.read += 1
                if report.read % PROGRESS_EVERY == 0:
                    say(f"{text}: {report}")
                try:
                    conversation = parse(record_of(row, source), row.at, default_id=row.default_id)
                except BadRecord as error:
                    report.reject(error.reason, str(error))
                    _write_aside(aside, text, row, error)
                    continue
                digest = fingerprint(conversation)
                if digest in seen:
                    report.duplicates += 1
                else:
                    seen.add(digest)
                    own.append((digest, conversation, row.at))
            _take(own, source, settings.seed, gathered, taken)
    report.check(settings.max_bad_share)
    if not gathered.conversations:
        raise ValueError(f"{', '.join(sources)}: no conversation in it; {SHAPES}")
    return gathered


def with_free_ids(conversations: Iterable[Conversation]) -> list[Conversation]:
    """The same, where an id is taken with another one, as `gather` gives it."""
    taken = Counter[str]()
    return [_with_free_id(conversation, taken) for conversation in conversations]


def say(line: str) -> None:
    """On stderr, once where several processes read the same data (launchers set RANK)."""
    if os.environ.get("RANK", "0") == "0":
        print(line, file=sys.stderr, flush=True)


def _take(
    own: list[tuple[bytes, Conversation, str]], source: Source, seed: int, gathered: Gathered, taken: Counter[str]
) -> None:
    """The conversations of one source as often as its weight says: whole passes in their order, then the drawn ones."""
    whole = int(source.weight)
    number = round((source.weight - whole) * len(own))
    drawn = sorted(range(len(own)), key=lambda i: hashlib.sha256(f"{seed}/".encode() + own[i][0]).digest())[:number]
    for i in itertools.chain(*[range(len(own))] * whole, sorted(drawn)):
        _, conversation, place = own[i]
        gathered.conversations.append(_with_free_id(conversation, taken))
        gathered.places.append(place)
    used = len(own) if whole else number
    gathered.report.used += used
    gathered.report.left_out += len(own) - used
    gathered.report.copies += (whole - 1) * len(own) + number if whole else 0


def _with_free_id(conversation: Conversation, taken: Counter[str]) -> Conversation:
    name = conversation.id
    while name in taken:
        taken[conversation.id] += 1
        name = f"{conversation.id}#{taken[conversation.id]}"
    taken[name] = 1
    return conversation if name == conversation.id else dataclasses.replace(conversation, id=name)


def _salvaged(cut: Cut, settings: Settings) -> str:
    """What is said of a cut when the rest is kept. Raises ValueError when that is not wanted."""
    if settings.salvage:
        return f"{cut.message}: the {cut.complete:,} complete records before it are kept, the rest is lost"
    raise ValueError(
        f"{cut.message}; {cut.complete:,} complete records come before. Get the complete file, or keep these: --salvage, in a "
        "config data.salvage: true"
    )


@contextlib.contextmanager
def _aside(path: Path | None) -> Iterator[TextIO | None]:
    """The file of rows that cannot be used; there is none, not even an old one, when all can be."""
    if path is None:
        yield None
        return
    temporary = path.with_name(f"{path.name}.writing")
    try:
        with temporary.open("w", encoding="utf-8", errors="backslashreplace") as file:
            yield file
        if temporary.stat().st_size:
            temporary.replace(path)
        else:
            path.unlink(missing_ok=True)
    finally:
        temporary.unlink(missing_ok=True)


def _write_aside(file: TextIO | None, source: str, row: Row, error: BadRecord) -> None:
    if file is not None:
        content = row.content.decode("utf-8", "replace") if isinstance(row.content, bytes) else row.content
        entry = {"source": source, "place": row.at, "reason": error.reason, "message": str(error), "row": content}
        file.write(json.dumps(entry, ensure_ascii=False, default=str) + "\n")
