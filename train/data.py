"""From conversation files to training sequences, and which sequences make which batch.

The order of batches is a pure function of (seed, epoch), so a resumed run continues exactly where it was.
"""

import dataclasses
import random
from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from draftsmith.inference.conversations import read_conversations, render


@dataclasses.dataclass(frozen=True, slots=True)
class Sequence:
    """Token ids, and True where the target itself would have generated the token."""

    ids: list[int]
    loss_mask: list[bool]

    @property
    def num_answer_tokens(self) -> int:
        return sum(self.loss_mask)


def load_sequences(
    files: SequenceOf[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    max_answer_tokens: int | None,
    seed: int,
) -> list[Sequence]:
    """Renders all conversations; cuts long ones, drops those left without a supervised token.

    Raises:
        ValueError: a broken file or conversation (with file and line or id), or nothing supervised at all.
    """
    sequences = []
    for file in files:
        for conversation in read_conversations(file):
            where = f"{file}: conversation {conversation.id}"
            rendered = render(tokenizer, conversation.messages, where=where, truncated=conversation.truncated)
            ids, mask = rendered.ids[:max_length], rendered.loss_mask[:max_length]
            if any(mask[2:]):
                sequences.append(Sequence(ids, mask))
    if not sequences:
        raise ValueError(f"{', '.join(files)}: no supervised token within {max_length} tokens; raise data.max_length")
    if max_answer_tokens is not None:
        random.Random(seed).shuffle(sequences)
        total, kept = 0, []
        for sequence in sequences:
            if total >= max_answer_tokens:
                break
            kept.append(sequence)
            total += sequence.num_answer_tokens
        sequences = kept
    return sequences


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
