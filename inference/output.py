"""What a decoding hands back: each sequence's tokens, what happened in its rounds, and where the time went."""

import dataclasses
from typing import NamedTuple

from draftsmith.inference.stopping import Reason


class Round(NamedTuple):
    """Counts of one round.

    Attributes:
        proposed: k, depth of what was drafted; 0 if nothing was.
        accepted: a, drafted tokens that the rule accepted, before any truncation.
        committed: c, tokens that went into the output, after truncation at a stop or the budget.
        nodes: n, drafted tokens in all; k in a chain.
    """

    proposed: int
    accepted: int
    committed: int
    nodes: int


@dataclasses.dataclass(slots=True)
class Output:
    """One sequence's result.

    Attributes:
        ids: new tokens, the prompt excluded, an end-of-sequence token included.
        reason: why it ended.
        rounds: what happened in each round.
        ends: the row of the proposal at which each round's accepted path ended; 0 is the root.
        drafts: the tokens that were drafted in each round, in the proposal's order, if they were asked for.
        log_probs: of each token under the target's own law (before any sampling setting), if they were asked for.
        text: the new tokens as text, without special tokens and up to the first stop string; None without a tokenizer.
    """

    ids: list[int] = dataclasses.field(default_factory=list)
    reason: Reason | None = None
    rounds: list[Round] = dataclasses.field(default_factory=list)
    ends: list[int] = dataclasses.field(default_factory=list)
    drafts: list[list[int]] = dataclasses.field(default_factory=list)
    log_probs: list[float] = dataclasses.field(default_factory=list)
    text: str | None = None

    @property
    def finished(self) -> bool:
        """It ended by itself, with an end-of-sequence token."""
        return self.reason == "eos"


@dataclasses.dataclass(slots=True)
class Seconds:
    """Wall time by part, summed over rounds.

    Attributes:
        prefill: passes over prompts, the drafter's included.
        draft: the drafter: proposing, and reading what was committed.
        verify: the target's forwards.
        other: sampling settings, the rule, the read to the host, bookkeeping.
        rounds: how many.
    """

    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    other: float = 0.0
    rounds: int = 0

    @property
    def decode(self) -> float:
        return self.draft + self.verify + self.other
