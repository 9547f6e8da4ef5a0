"""A decoding as a person reads it: what was drafted in each round, how much of it the target took, and what it said instead."""

from collections.abc import Sequence
from typing import Literal, TypedDict

from transformers import PreTrainedTokenizerBase

from draftsmith.inference.output import Output

CONTEXT = 16
"""Tokens in front of a round that are shown, and that its tokens are decoded behind."""

Kind = Literal["correction", "bonus", "end"]
"""Of a round's last token: the target's own choice in place of a drafted one, or behind all of them; or there is none, because
the answer ended inside of what was drafted."""


class Trace(TypedDict):
    """One round: the text before it, the drafted tokens, those of them that were committed, and the target's token."""

    round: int
    before: str
    drafted: list[str]
    accepted: list[str]
    next: str
    kind: Kind


def trace(tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], output: Output) -> list[Trace]:
    """The rounds of a decoding by chains whose `drafts` were recorded; each token as the text that it adds."""
    text, place = [*prompt, *output.ids], len(prompt) + 1
    traces: list[Trace] = []
    for number, (round_, drafted) in enumerate(zip(output.rounds, output.drafts, strict=True), start=1):
        before = text[max(0, place - CONTEXT) : place]
        ended = round_.committed <= round_.accepted
        accepted = drafted[: round_.committed] if ended else drafted[: round_.accepted]
        pieces = _pieces(tokenizer, before, drafted)
        own = [] if ended else _pieces(tokenizer, before, text[place : place + round_.committed])
        traces.append(
            {
                "round": number,
                "before": str(tokenizer.decode(before)),
                "drafted": pieces,
                "accepted": pieces[: len(accepted)],
                "next": own[-1] if own else "",
                "kind": "end" if ended else "bonus" if round_.accepted == round_.proposed else "correction",
            }
        )
        place += round_.committed
    return traces


def _pieces(tokenizer: PreTrainedTokenizerBase, before: Sequence[int], tokens: Sequence[int]) -> list[str]:
    """What each token adds to the text in front of it: SentencePiece drops a first space of what is decoded alone."""
    shown, pieces = str(tokenizer.decode([*before])), []
    for end in range(1, len(tokens) + 1):
        text = str(tokenizer.decode([*before, *tokens[:end]]))
        pieces.append(text[len(shown) :])
        shown = text
    return pieces
