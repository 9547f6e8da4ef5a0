"""From sources of conversations to training sequences, and which sequences make which batch.

The order of batches is a pure function of (seed, epoch), so a resumed run continues exactly where it was.
"""

import dataclasses
import hashlib
import json
import random
from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from draftsmith.inference.records import Conversation
from draftsmith.inference.rendering import Reasoning, render, render_all
from draftsmith.inference.turns import BadRecord
from draftsmith.train.sources import Settings, gather, say
from draftsmith.train.splits import fingerprint


@dataclasses.dataclass(frozen=True, slots=True)
class Sequence:
    """Token ids, and True where the target itself would have generated the token."""

    ids: list[int]
    loss_mask: list[bool]

    @property
    def num_answer_tokens(self) -> int:
        return sum(self.loss_mask)


def load_sequences(
    sources: SequenceOf[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    max_answer_tokens: int | None,
    seed: int,
    max_bad_share: float = 0.05,
    salvage: bool = False,
    reasoning: Reasoning = "rows",
) -> list[Sequence]:
    """Renders all conversations; cuts long ones, drops those left without a supervised token, and says so on stderr.

    Args:
        sources: see `train.rows`.
        tokenizer: the target's.
        max_length: in tokens.
        max_answer_tokens: take a random choice of sequences that just reaches so many supervised tokens.
        seed: of random choices.
        max_bad_share: more rows than this share that cannot be read or rendered are an error.
        salvage: take what is complete of files that are cut off.
        reasoning: of conversations that the template shows otherwise later on, see `render`.

    Raises:
        ValueError: too many bad rows (with file and line of the first ones), or nothing supervised at all.
    """
    gathered = gather(sources, Settings(max_bad_share=max_bad_share, salvage=salvage, seed=seed))
    report, sequences = gathered.report, list[Sequence]()
    num_cut = num_lost = num_dropped = 0
    bad = set[bytes]()
    rendered = render_all(tokenizer, gathered.conversations, reasoning=reasoning)
    for conversation, place, rows in zip(gathered.conversations, gathered.places, rendered, strict=True):
        if isinstance(rows, BadRecord):
            digest = fingerprint(conversation)
            report.unused(rows.reason, f"{place}: {rows}", is_copy=digest in bad)
            bad.add(digest)
            continue
        num_dropped += not rows
        for row in rows:
            sequence = Sequence(row.ids[:max_length], row.loss_mask[:max_length])
            num_cut += len(row.ids) > max_length
            num_lost += sum(row.loss_mask[max_length:])
            if any(sequence.loss_mask[2:]):
                sequences.append(sequence)
            else:
                num_dropped += 1
    report.check(max_bad_share)
    if not sequences:
        names = ", ".join(sources)
        raise ValueError(f"{names}: no supervised token within {max_length} tokens; raise data.max_length")
    say(f"data: {report}")
    total, answers = sum(len(s.ids) for s in sequences), sum(s.num_answer_tokens for s in sequences)
    say(
        f"data: {len(sequences):,} sequences of {total:,} tokens, {answers / total:.1%} of them supervised; {num_cut:,} cut at "
        f"{max_length} tokens, which loses {num_lost:,} supervised tokens; {num_dropped:,} dropped with none left"
    )
    return sequences if max_answer_tokens is None else _choice(sequences, max_answer_tokens, seed)


def _choice(sequences: list[Sequence], max_answer_tokens: int, seed: int) -> list[Sequence]:
    random.Random(seed).shuffle(sequences)
    total, kept = 0, []
    for sequence in sequences:
        if total >= max_answer_tokens:
            break
        kept.append(sequence)
        total += sequence.num_answer_tokens
    return kept


def sequences_of(
    tokenizer: PreTrainedTokenizerBase, conversation: Conversation, reasoning: Reasoning = "rows"
) -> list[Sequence]:
    """A conversation's training rows at full length; ValueError if it has none."""
    return [Sequence(row.ids, row.loss_mask) for row in render(tokenizer, conversation, reasoning=reasoning)]


def data_hash(sequences: SequenceOf[Sequence]) -> str:
    """Names training data, their order included: of token ids, so tokenizer and template are in it."""
    digest = hashlib.sha256()
    for sequence in sequences:  # one by one: as one text they would take several times the memory that they have
        digest.update(json.dumps([sequence.ids, sequence.loss_mask]).encode())
    return digest.hexdigest()[:16]


def count_answer_tokens(sequences: SequenceOf[Sequence], vocab_size: int) -> Tensor:
    """How often each target token occurs among the supervised ones, int64 (V); chooses the draft vocabulary."""
    ids = [token for s in sequences for token, supervised in zip(s.ids, s.loss_mask, strict=True) if supervised]
    return torch.bincount(torch.tensor(ids, dtype=torch.int64), minlength=vocab_size)


def plan_epoch(
    lengths: SequenceOf[int],
    batch_size: int | None,
    multiple: int,
    seed: int,
    epoch: int,
    batch_tokens: int | None = None,
) -> list[list[int]]:
    """The batches of one epoch: random, of so many sequences of similar length each, or packed to so many tokens.

    Args:
        lengths: of all sequences.
        batch_size: sequences per batch; None if `batch_tokens` is given.
        multiple: the number of batches is a multiple of it (processes x accumulation), so that all processes take equally
            many steps; the first batches are repeated to fill up.
        seed: of the run.
        epoch: 0, 1, …
        batch_tokens: tokens per batch, at most; a longer sequence is alone. All epochs have equally many batches.
    """
    assert (batch_size is None) != (batch_tokens is None)
    generator = random.Random(f"{seed}/{epoch}")
    if batch_tokens is not None:
        batches = _packed(lengths, batch_tokens, generator)
    else:
        assert batch_size is not None
        batches = _of_similar_length(lengths, batch_size, generator)
    generator.shuffle(batches)
    missing = -len(batches) % multiple
    return batches + [batches[i % len(batches)] for i in range(missing)]


def _of_similar_length(lengths: SequenceOf[int], batch_size: int, generator: random.Random) -> list[list[int]]:
    order = list(range(len(lengths)))
    generator.shuffle(order)
    window = batch_size * 16
    batches = []
    for begin in range(0, len(order), window):
        block = sorted(order[begin : begin + window], key=lambda index: lengths[index])
        batches += [block[i : i + batch_size] for i in range(0, len(block), batch_size)]
    return batches


WINDOW = 64
"""Batches that are packed from sequences drawn together: many enough to be full, few enough for the draw to decide the company."""
CARRIED = 8
"""Of these, the emptiest ones are taken apart again, for the next window to fill."""


def _packed(lengths: SequenceOf[int], budget: int, generator: random.Random) -> list[list[int]]:
    """Packs a random order, window by window; into as many batches in every epoch, 2 % more than packing it all at once takes."""
    order = list(range(len(lengths)))
    at_once = pack(order, lengths, budget)
    allowed = min(len(order), len(at_once) + -(-len(at_once) // 50))
    generator.shuffle(order)
    batches, window, tokens = list[list[int]](), list[int](), 0
    for index in order:
        window.append(index)
        tokens += lengths[index]
        if tokens >= WINDOW * budget:
            full = sorted(pack(window, lengths, budget), key=lambda batch: sum(lengths[i] for i in batch))
            batches += full[CARRIED:]
            window = [i for batch in full[:CARRIED] for i in batch]
            tokens = sum(lengths[i] for i in window)
    batches += pack(window, lengths, budget)
    if len(batches) > allowed:
        batches = at_once
    batches.sort(key=len)
    while len(batches) < allowed:
        largest = batches.pop()
        batches[:0] = [largest[: len(largest) // 2], largest[len(largest) // 2 :]]
        if len(batches[-1]) < 2:
            batches.sort(key=len)
    return batches


def pack(indices: SequenceOf[int], lengths: SequenceOf[int], budget: int) -> list[list[int]]:
    """Sequences in batches of at most so many tokens, or alone, by best fit, longest first: at most 11/9 of the fewest batches and
    one more (Johnson 1973), with many short sequences hardly more than the fewest."""
    by_room: dict[int, list[list[int]]] = {}
    rooms = _Rooms(budget)
    for index in sorted(indices, key=lambda index: -lengths[index]):
        length = min(lengths[index], budget)
        room = rooms.smallest(length)
        if room is None:
            room, batch = budget, list[int]()
        else:
            batch = by_room[room].pop()
            rooms.add(room, -1)
        batch.append(index)
        by_room.setdefault(room - length, []).append(batch)
        rooms.add(room - length, 1)
    return [batch for batches in by_room.values() for batch in batches]


class _Rooms:
    """How many open batches have so much room left; finds the smallest that is large enough in log(budget) steps."""

    def __init__(self, budget: int) -> None:
        self._size = 1 << budget.bit_length()
        self._counts = [0] * (2 * self._size)  # of a binary tree: node n has 2 n and 2 n + 1 below it

    def add(self, room: int, count: int) -> None:
        node = self._size + room
        while node:
            self._counts[node] += count
            node //= 2

    def smallest(self, least: int) -> int | None:
        node = self._size + least
        if self._counts[node]:
            return least
        while node > 1:  # up to the first node whose right neighbour holds something, then down again, to the left
            if node % 2 == 0 and self._counts[node + 1]:
                node += 1
                while node < self._size:
                    node = 2 * node if self._counts[2 * node] else 2 * node + 1
                return node - self._size
            node //= 2
        return None
