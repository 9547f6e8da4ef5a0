"""How much of the answers a draft vocabulary covers: on the training data that chose it, and on others.

The second figure is the one that counts when decoding. It is taken from answers in the held-out prompt file if it has any; else the
map is chosen again without a tenth of the conversations, by content hash, and measured on that tenth.

Letters: V target vocabulary, W draft vocabulary.
"""

import dataclasses
import hashlib
from collections.abc import Sequence as SequenceOf

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from draftsmith.drafters.vocabulary import choose_draft_vocabulary, coverage, filled_up
from draftsmith.inference.records import Conversation
from draftsmith.train.data import Sequence, count_answer_tokens, sequences_of

FEWEST = 20
"""Conversations below which no tenth is split off."""


@dataclasses.dataclass(frozen=True, slots=True)
class Coverage:
    """What a draft vocabulary covers.

    Attributes:
        size: W.
        vocab_size: V.
        training: share of the supervised training tokens, 0 to 1.
        held_out: share of answer tokens that did not choose it; None if not measured.
        held_out_on: which these are.
        filled: ids that no supervised training token has.
    """

    size: int
    vocab_size: int
    training: float
    held_out: float | None
    held_out_on: str
    filled: int

    def __str__(self) -> str:
        other = "not measured on others" if self.held_out is None else f"{self.held_out:.1%} of others"
        fill = f"; {self.filled:,} of its ids never occur there and are filled up by rank" if self.filled else ""
        return (
            f"draft vocabulary of {self.size:,} of {self.vocab_size:,} tokens covers {self.training:.1%} of the answer tokens, "
            f"{other} ({self.held_out_on}){fill}"
        )


def measure(
    kept_W: Tensor,
    vocab_size: int,
    sequences: SequenceOf[Sequence],
    answers: SequenceOf[Sequence],
    given: bool = False,
) -> Coverage:
    """The coverage of the kept ids.

    Args:
        kept_W: int64, on the CPU.
        vocab_size: V.
        sequences: the training data.
        answers: held-out rows with answers; may be empty.
        given: the ids were not chosen from these data.
    """
    counts_V = count_answer_tokens(sequences, vocab_size)
    held_out, on = None, f"no answers in eval.prompts, and fewer than {FEWEST} conversations to split"
    if answers:
        held_out, on = coverage(count_answer_tokens(answers, vocab_size), kept_W), "the answers in eval.prompts"
    elif given:
        held_out, on = coverage(counts_V, kept_W), "the same ones: others chose the map"
    elif len(sequences) >= FEWEST:
        rest, tenth = _split(sequences)
        if rest and tenth:
            again_W = choose_draft_vocabulary(count_answer_tokens(rest, vocab_size), len(kept_W))
            held_out = coverage(count_answer_tokens(tenth, vocab_size), again_W)
            on = "a tenth of the conversations, by a map chosen from the rest"
    filled = 0 if given else filled_up(counts_V, kept_W)
    return Coverage(len(kept_W), vocab_size, coverage(counts_V, kept_W), held_out, on, filled)


def held_out_answers(tokenizer: PreTrainedTokenizerBase, conversations: SequenceOf[Conversation]) -> list[Sequence]:
    """Training rows of the held-out conversations that end with an answer."""
    answered = [c for c in conversations if c.messages and c.messages[-1]["role"] == "assistant"]
    return [row for conversation in answered for row in sequences_of(tokenizer, conversation)]


def _split(sequences: SequenceOf[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
    """Nine tenths and one, by content: the same conversation is always on the same side."""
    sides: tuple[list[Sequence], list[Sequence]] = ([], [])
    for sequence in sequences:
        first = hashlib.sha256(repr(sequence.ids).encode()).digest()[0]
        sides[first < 26].append(sequence)  # 26 of 256
    return sides
