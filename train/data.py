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


def plan_epoch(lengths: SequenceOf[int], batch_size: int, multiple: int, seed: int, epoch: int) -> list[list[int]]:
    """The batches of one epoch: random, but of similar length so that little is padded.

    Args:
        lengths: of all sequences.
        batch_size: sequences per batch.
        multiple: the number of batches is a multiple of it (processes x accumulation), so that all processes take equally
            many steps; the first batches are repeated to fill up.
        seed: of the run.
        epoch: 0, 1, …
    """
    generator = random.Random(f"{seed}/{epoch}")
    order = list(range(len(lengths)))
    generator.shuffle(order)
    window = batch_size * 16
    batches = []
    for begin in range(0, len(order), window):
        block = sorted(order[begin : begin + window], key=lambda index: lengths[index])
        batches += [block[i : i + batch_size] for i in range(0, len(block), batch_size)]
    generator.shuffle(batches)
    missing = -len(batches) % multiple
    return batches + [batches[i % len(batches)] for i in range(missing)]
