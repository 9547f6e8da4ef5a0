"""Rows that are to be answered, what becomes of each of them, and the file that it all ends in, with accounts that add up.

Shared by the ways of asking the target: in process (`regenerate`) and through a server (`endpoint`). This module asks nobody.
"""

import collections
import dataclasses
import hashlib
import json
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from draftsmith.drafters.checkpoint import write_text
from draftsmith.inference.records import Conversation, Message, prompt_messages, to_record
from draftsmith.inference.sampling import Sampler
from draftsmith.train import journal
from draftsmith.train.journal import Key, content_hash
from draftsmith.train.reasoning import Spoken

Record = dict[str, Any]
Kind = Literal["skipped", "failed"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How answers are made.

    Attributes:
        sampler: of the answers.
        temperatures: pairs of a temperature and its weight; each row draws one by its id, in place of the sampler's. Empty: none.
        max_new: token budget of an answer; one that reaches it is marked `truncated`.
        batch_size: prompts decoded together.
        samples: answers per prompt.
        seed: answers are a function of it, of the prompt's id and of the sample's number.
        all_turns: every answer of a conversation is made anew, each behind the new ones before it; else the last one only.
        reasoning: `keep` it as `reasoning_content` of the turn, or `drop` it. An answer whose reasoning was dropped stands where
            the target would not have written it, so its turn carries `"supervised": false`.
        max_bad_share: of all rows, skipped and failed ones may be so many; beyond that the run stops.
    """

    sampler: Sampler
    temperatures: tuple[tuple[float, float], ...] = ()
    max_new: int = 256
    batch_size: int = 32
    samples: int = 1
    seed: int = 0
    all_turns: bool = False
    reasoning: Literal["keep", "drop"] = "keep"
    max_bad_share: float = 0.1

    def __post_init__(self) -> None:
        for temperature, weight in self.temperatures:
            Sampler(temperature)  # refuses a negative one
            if not weight > 0:
                raise ValueError(f"temperature {temperature:g} has the weight {weight:g}; give a weight above 0")
        if not 0 <= self.max_bad_share <= 1:
            raise ValueError(f"max_bad_share is {self.max_bad_share}; give a share from 0 to 1")

    def identity(self) -> Record:
        """What an answer depends on."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "max_bad_share"}


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One row to be answered.

    Attributes:
        id: of its record.
        conversation: where it comes from.
        segments: the given turns before each answer that is to be made.
        sampler: its own.
        hash: of the given turns and the tools.
    """

    id: str
    conversation: Conversation
    segments: tuple[tuple[Message, ...], ...]
    sampler: Sampler
    hash: str

    @property
    def key(self) -> Key:
        return self.id, self.hash


@dataclasses.dataclass(frozen=True, slots=True)
class Rejected:
    """A row without an answer: `skipped` before anyone was asked, or `failed`. `reason` is short, for counting."""

    id: str
    kind: Kind
    reason: str
    detail: str


class Dialogue:
    """A row while it is being answered, turn by turn. `messages` is what to ask next, unless `over`."""

    def __init__(self, row: Row) -> None:
        self.row = row
        self.answers: list[Message] = []
        self.tokens = 0
        self.truncated = self.over = False
        self.failure: tuple[Kind, str, str] | None = None
        self.messages: tuple[Message, ...] = row.segments[0]

    @property
    def turn(self) -> int:
        return len(self.answers)

    def take(
        self, answer: Spoken, settings: Settings, *, tokens: int, finished: bool, tool_calls: Sequence[Any] = ()
    ) -> None:
        """The next answer. One that was cut is the last: the target never saw it ended."""
        self.tokens += tokens
        if not answer.ended:
            what = "raise the token budget" if not finished else "the target ended its turn"
            return self.stop(
                "failed", "reasoning without an end", f"no answer behind the reasoning of turn {self.turn + 1}; {what}"
            )
        # A budget may end within a character; the target never wrote the U+FFFD that stands for its first bytes.
        text = answer.answer if finished else answer.answer.rstrip("\ufffd")
        message: Message = {"role": "assistant", "content": text}
        if answer.reasoning is not None:
            message |= (
                {"reasoning_content": answer.reasoning} if settings.reasoning == "keep" else {"supervised": False}
            )
        if tool_calls:
            message["tool_calls"] = list(tool_calls)
        self.answers.append(message)
        self.truncated = not finished
        self.over = self.truncated or self.turn == len(self.row.segments)
        if not self.over:
            self.messages = (*self.messages, message, *self.row.segments[self.turn])

    def stop(self, kind: Kind, reason: str, detail: str) -> None:
        """No answer is to be had. A conversation that has some already ends before this turn, and counts as done."""
        self.over = True
        self.failure = None if self.answers else (kind, reason, detail)

    def rejected(self) -> Rejected:
        """Of one that stopped without any answer."""
        assert self.failure is not None
        return Rejected(self.row.id, *self.failure)

    def result(self) -> Record:
        """For the journal."""
        row = {"id": self.row.id, "hash": self.row.hash, "tokens": self.tokens}
        return row | (
            {"failure": self.failure} if self.failure else {"answers": self.answers, "truncated": self.truncated}
        )


def plan(conversations: Sequence[Conversation], out: Path, settings: Settings) -> tuple[list[Row], list[Rejected]]:
    """The rows in the order of the inputs, and those that ask nothing. ValueError: nothing to ask, or nowhere to write."""
    if not out.parent.is_dir():
        raise ValueError(f"the folder {out.parent} of the output file does not exist; create it first")
    if not conversations:
        raise ValueError("no prompts: give a file of prompts, or --self-prompt N to let the target invent N of them")
    twice = [name for name, count in collections.Counter(c.id for c in conversations).items() if count > 1]
    if twice:
        raise ValueError(f"{len(twice)} ids belong to several prompts, {twice[0]!r} for one; give each prompt its own")
    rows, rejected = [], []
    for conversation in conversations:
        names = [f"{conversation.id}/{i}" if settings.samples > 1 else conversation.id for i in range(settings.samples)]
        try:
            segments = _segments(conversation, settings)
        except ValueError as error:
            rejected += [Rejected(name, "skipped", "nothing to answer", str(error)) for name in names]
            continue
        digest = content_hash([segments, conversation.tools])
        rows += [Row(name, conversation, segments, _sampler(name, settings), digest) for name in names]
    return rows, rejected


def row_seed(settings: Settings, stage: str, name: str) -> int:
    """A row's own seed, so that its answer does not depend on which others are asked."""
    return int.from_bytes(hashlib.sha256(f"{settings.seed}/{stage}/{name}".encode()).digest()[:7], "big")


def check_share(bad: Sequence[Rejected], inputs: int, settings: Settings) -> None:
    """ValueError if too many rows are bad; what is done stays in the journal."""
    if len(bad) > settings.max_bad_share * inputs:
        counts = collections.Counter(f"{one.kind}, {one.reason}" for one in bad)
        raise ValueError(
            f"{len(bad)} of {inputs} rows have no answer ({_listed(counts)}; the last one, {bad[-1].id!r}: {bad[-1].detail}), "
            f"more than the share of {settings.max_bad_share:g} that max_bad_share allows; mend the inputs, or allow more"
        )


def conclude(
    out: Path,
    inputs: int,
    rows: Sequence[Row],
    results: Mapping[Key, Record],
    bad: Sequence[Rejected],
    provenance: Record,
    settings: Settings,
) -> list[Record]:
    """Writes `out`, `out`.unanswered.jsonl if there is anything to say in it, and `out`.meta.json, and returns the records.

    Args:
        out: the file; it is complete or absent.
        inputs: how many rows there were in all.
        rows: all that were to be answered.
        results: of the rows that were (and perhaps of others), by key.
        bad: what was skipped, or failed without an entry in the journal.
        provenance: what made the answers, for the meta file.
        settings: see there.
    """
    found = [(row, results[row.key]) for row in rows if row.key in results]
    done = [(row, result) for row, result in found if "answers" in result]
    bad = [*bad, *(Rejected(row.id, *result["failure"]) for row, result in found if "failure" in result)]
    kinds = collections.Counter(one.kind for one in bad)
    assert len(done) + kinds["failed"] + kinds["skipped"] == inputs, (len(done), kinds, inputs)
    check_share(bad, inputs, settings)
    answers = [answer for _, result in done for answer in result["answers"]]
    counts = {
        "inputs": inputs,
        "done": len(done),
        "failed": kinds["failed"],
        "skipped": kinds["skipped"],
        "reasons": dict(sorted(collections.Counter(f"{one.kind}: {one.reason}" for one in bad).items())),
        "tokens": sum(result["tokens"] for _, result in done),
        "truncated": sum(result["truncated"] for _, result in done),
        "empty": sum(not answer["content"] and "tool_calls" not in answer for answer in answers),
        "ended_early": sum(len(result["answers"]) < len(row.segments) for row, result in done),
        "reasoning_dropped": sum("supervised" in answer for answer in answers),
    }
    write_text(Path(f"{out}.meta.json"), json.dumps(provenance | counts, indent=2) + "\n")
    unanswered = Path(f"{out}.unanswered.jsonl")
    if bad:
        write_text(
            unanswered, _jsonl([dataclasses.asdict(one) for one in sorted(bad, key=lambda one: (one.kind, one.id))])
        )
    else:
        unanswered.unlink(missing_ok=True)
    records = [_record(row, result, settings) for row, result in done]
    write_text(out, _jsonl(records))
    print(_account(counts), file=sys.stderr)
    return records


def clear(out: Path) -> None:
    """Removes the journals of a file that is written."""
    for path in journal.journals(out):
        path.unlink()


def _segments(conversation: Conversation, settings: Settings) -> tuple[tuple[Message, ...], ...]:
    """The given turns before each answer. An assistant turn whose tool calls were answered stays: nobody can answer a new call."""
    if conversation.given is not None:
        raise ValueError("the record came tokenised, without turns; allowed: messages")
    if conversation.text is not None:
        raise ValueError("the record is raw text, without turns; allowed: messages")
    messages = conversation.messages
    if not settings.all_turns:
        return (prompt_messages(messages),)
    segments: list[tuple[Message, ...]] = []
    current: list[Message] = []
    for message, after in zip(messages, [*messages[1:], None], strict=True):
        if message["role"] == "assistant" and (after is None or after["role"] != "tool"):
            segments.append(prompt_messages(current) if not segments else tuple(current))
            current = []
        else:
            current.append(message)
    if not current:
        return tuple(segments)
    if segments and current[-1]["role"] not in ("user", "tool"):
        return tuple(segments)  # a system turn at the end asks nothing
    return (*segments, tuple(current) if segments else prompt_messages(current))


def _sampler(name: str, settings: Settings) -> Sampler:
    if not settings.temperatures:
        return settings.sampler
    temperatures, weights = zip(*settings.temperatures, strict=True)
    drawn = random.Random(f"{settings.seed}/temperature/{name}").choices(temperatures, weights)
    return dataclasses.replace(settings.sampler, temperature=drawn[0])


def _record(row: Row, result: Record, settings: Settings) -> Record:
    messages = [
        message
        for given, answer in zip(row.segments, result["answers"], strict=False)  # fewer answers if it ended early
        for message in (*map(_read_only, given), answer)
    ]
    answered = dataclasses.replace(row.conversation, id=row.id, messages=tuple(messages), truncated=result["truncated"])
    return to_record(answered) | ({"temperature": row.sampler.temperature} if settings.temperatures else {})


def _read_only(message: Message) -> Message:
    """A given turn; an answer among them is not the target's own, so it is not learned."""
    return {**message, "supervised": False} if message["role"] == "assistant" else message


def _account(counts: Record) -> str:
    line = "{inputs:,} inputs = {done:,} done + {failed:,} failed + {skipped:,} skipped".format(**counts)
    notes = dict(counts["reasons"])
    for name in ("truncated", "empty", "ended_early", "reasoning_dropped"):
        notes |= {name.replace("_", " "): counts[name]} if counts[name] else {}
    return f"{line} ({_listed(notes)})" if notes else line


def _listed(counts: dict[str, int]) -> str:
    return "; ".join(f"{count:,} {what}" for what, count in counts.items())


def _jsonl(records: Sequence[Record]) -> str:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
