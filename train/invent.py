"""Prompts that a chat target invents itself, by sampling behind its template's user header (MAGPIE, Xu et al. 2024, arXiv
2406.08464), so that no data set is needed; and the filter that keeps them different from each other.

Two prompts are near-duplicates if the sets of their word pairs have a Jaccard similarity (size of intersection / size of union)
of at least `diversity`. All pairs that reach it are found without comparing all pairs: ordered from rare to frequent, two such sets
must share one of their first few elements (prefix filtering: Bayardo, Ma, Srikant 2007, "Scaling Up All Pairs Similarity Search").
"""

import collections
import dataclasses
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftsmith.inference.decode import generate
from draftsmith.inference.output import Output
from draftsmith.inference.records import Conversation
from draftsmith.inference.sampling import Sampler
from draftsmith.inference.target import Target
from draftsmith.train.answers import Settings, row_seed
from draftsmith.train.chunks import work_off
from draftsmith.train.journal import Journal, Key, content_hash
from draftsmith.train.processes import Processes
from draftsmith.train.regenerate import ALONE, provenance

MARK = "\x02user turn\x02"
MIN_TOKENS = 5
MAX_TRIES = 3
"""Times the number of prompts that are wanted."""
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\u3040-\u30ff\u3400-\u9fff]+")
"""A word, or one character of a script that is written without spaces."""


@dataclasses.dataclass(frozen=True, slots=True)
class Idea:
    """A prompt to be invented."""

    id: str
    hash: str

    @property
    def key(self) -> Key:
        return self.id, self.hash


@dataclasses.dataclass(frozen=True, slots=True)
class Invented:
    """Prompts, and one line that says how many were tried and what became of them."""

    conversations: list[Conversation]
    account: str


def invent(
    target: Target,
    number: int,
    out: str | Path,
    settings: Settings,
    *,
    diversity: float = 0.7,
    processes: Processes = ALONE,
) -> Invented:
    """User turns at temperature 1; unfinished, very short, repeated and near-duplicate ones are dropped and counted.

    Args:
        target: a chat model with its tokenizer.
        number: how many to keep; fewer if three times as many tries do not bring them.
        out: the file that their answers will be written to; the journal beside it stays until then.
        settings: token budget, batch size and seed are used.
        diversity: similarity from which on a prompt is a near-duplicate of an earlier one, above 0, at most 1.
        processes: this one among those that share the work; all return the same prompts.

    Raises:
        ValueError: no chat template, a wrong number, nothing usable invented, or a journal that other settings began.
    """
    if not 0 < diversity <= 1:
        raise ValueError(f"the diversity is {diversity}; give a similarity above 0, at most 1")
    header = _header(target)
    fields = {"max_new": settings.max_new, "batch_size": settings.batch_size, "seed": settings.seed}
    identity = provenance(target) | {"settings": fields, "header": header}
    ideas: list[Idea] = []

    def work(chunk: list[Idea]) -> tuple[list[dict[str, Any]], int]:
        outputs = generate(
            target,
            [header] * len(chunk),
            max_new=settings.max_new,
            sampler=Sampler(temperature=1.0),
            seeds=[row_seed(settings, "prompts", idea.id) for idea in chunk],
            max_batch=settings.batch_size,
        )
        rows = [
            {
                "id": idea.id,
                "hash": idea.hash,
                "text": _text(target, output),
                "tokens": len(output.ids),
                "finished": output.finished,
            }
            for idea, output in zip(chunk, outputs, strict=True)
        ]
        return rows, sum(len(output.ids) for output in outputs)

    kept: list[Conversation] = []
    dropped: collections.Counter[str] = collections.Counter()
    with Journal(out, "prompts", identity, processes.index) as journal:
        while len(kept) < number and len(ideas) < MAX_TRIES * number:
            fresh = _more(len(ideas), len(kept), number, content_hash(header))
            rows = work_off(journal, fresh, [0] * len(fresh), settings.batch_size, work, processes, "prompts")
            ideas += fresh
            kept, dropped = _choose([rows[idea.key] for idea in ideas], diversity)
    account = _account(len(ideas), len(kept), number, dropped)
    if processes.main:
        print(account, file=sys.stderr)
    if not kept:
        raise ValueError(
            f"{target.name} invented no usable prompt in {len(ideas)} tries; raise the token budget, or give a file of prompts"
        )
    return Invented(kept[:number], account)


def different(texts: Sequence[str], similarity: float) -> list[bool]:
    """Whether each text is no near-duplicate of an earlier one that is kept."""
    sets = [_pairs(text) for text in texts]
    frequency = collections.Counter(pair for pairs in sets for pair in pairs)
    keep: list[bool] = []
    holders: dict[tuple[str, ...], list[int]] = collections.defaultdict(
        list
    )  # of an element among a kept text's first few
    for index, pairs in enumerate(sets):
        # To reach the similarity, at least this many elements are shared, so not all of them lie behind the first few.
        shared = math.ceil(similarity * len(pairs) - 1e-9)
        first = sorted(pairs, key=lambda pair: (frequency[pair], pair))[: len(pairs) - shared + 1]
        candidates = {other for pair in first for other in holders[pair]}
        keep.append(not any(_similar(pairs, sets[other], similarity) for other in candidates))
        if keep[-1]:
            for pair in first:
                holders[pair].append(index)
    return keep


def _similar(a: frozenset[tuple[str, ...]], b: frozenset[tuple[str, ...]], similarity: float) -> bool:
    if min(len(a), len(b)) < similarity * max(len(a), len(b)) - 1e-9:
        return False  # even if one holds the other
    shared = len(a & b)
    return shared >= similarity * (len(a) + len(b) - shared) - 1e-9


def _pairs(text: str) -> frozenset[tuple[str, ...]]:
    """Pairs of neighbouring words; of a text with fewer words, these or the text itself."""
    words = WORD.findall(text.lower())
    return frozenset(zip(words, words[1:], strict=False)) if len(words) > 1 else frozenset([tuple(words or [text])])


def _header(target: Target) -> list[int]:
    """Ids of the template up to where a user's text begins."""
    tokenizer = target.tokenizer
    if tokenizer is None or not tokenizer.chat_template:
        raise ValueError(f"{target.name} has no chat template, so it cannot invent user turns; give a file of prompts")
    header = tokenizer.apply_chat_template([{"role": "user", "content": MARK}], tokenize=False).split(MARK)[0]
    ids: list[int] = tokenizer(header, add_special_tokens=False)["input_ids"]
    return ids


def _text(target: Target, output: Output) -> str:
    assert target.tokenizer is not None
    ids = output.ids[:-1] if output.finished else output.ids
    return str(target.tokenizer.decode(ids, skip_special_tokens=True))


def _more(tried: int, kept: int, number: int, digest: str) -> list[Idea]:
    """The next ideas: all at first, then as many as are likely to bring what is missing."""
    likely = number if not tried else math.ceil((number - kept) * tried / max(kept, 1))
    count = min(likely, MAX_TRIES * number - tried)
    return [Idea(f"self-{index:05d}", digest) for index in range(tried, tried + count)]


def _choose(rows: Sequence[dict[str, Any]], diversity: float) -> tuple[list[Conversation], collections.Counter[str]]:
    """What is kept of the tries so far, and how many were dropped, by reason."""
    dropped: collections.Counter[str] = collections.Counter()
    usable: dict[str, str] = {}
    for row in rows:
        if not row["finished"]:
            dropped["unfinished"] += 1
        elif row["tokens"] <= MIN_TOKENS or not row["text"].strip():
            dropped["too short"] += 1
        elif usable.setdefault(row["text"], row["id"]) != row["id"]:
            dropped["repeated"] += 1
    keep = different(list(usable), diversity)
    dropped["near-duplicates"] += keep.count(False)
    chosen = [pair for pair, kept in zip(usable.items(), keep, strict=True) if kept]
    return [Conversation(name, ({"role": "user", "content": text},), "self-prompt") for text, name in chosen], dropped


def _account(tried: int, kept: int, number: int, dropped: collections.Counter[str]) -> str:
    counts = {"kept": min(kept, number), **dropped, "more than asked for": max(kept - number, 0)}
    return f"{tried:,} prompts invented = " + " + ".join(f"{count:,} {what}" for what, count in counts.items() if count)
