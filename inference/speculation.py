"""How to speculate: which drafter, in which shape, by which rule. Combinations that would not be exact are refused here, before
anything is decoded."""

import dataclasses

from draftsmith.drafters.base import Drafter
from draftsmith.drafters.grow import check_drawn
from draftsmith.drafters.settings import nearest
from draftsmith.drafters.tree import Plan
from draftsmith.inference.drafting import default_way, drawn_by
from draftsmith.inference.sampling import Sampler
from draftsmith.inference.verify import RULES, check


@dataclasses.dataclass(frozen=True, slots=True)
class Speculation:
    """How to speculate.

    Attributes:
        drafter: proposes tokens.
        plan: the shape of what is drafted per round (`drafters.tree`).
        rule: name of the verification rule (`verify.RULES`).
        way: how draft tokens are chosen (`drafting.DRAWN`); None takes the one that belongs to the rule.
        sampler: the draft's own sampling settings; None takes each row's, as far as they do not look at the tokens before. Other
            settings than the target's only cost acceptance.
    """

    drafter: Drafter
    plan: Plan
    rule: str = "coupled"
    way: str | None = None
    sampler: Sampler | None = None

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise ValueError(f"unknown verification rule {self.rule!r}; {nearest(self.rule, RULES)}")
        drawn = drawn_by(self.drafting_way, greedy=False)
        depth, most = self.plan.depth, self.drafter.max_depth
        if depth < 1:
            raise ValueError(
                "the plan drafts nothing; give a draft depth K of 1 or more, or no drafter for plain decoding"
            )
        if most is not None and depth > most:
            raise ValueError(f"draft depth K is {depth}; this drafter proposes at most {most}")
        if not self.plan.is_chain and not self.drafter.grows_trees:
            raise ValueError("this drafter proposes chains only; give a draft depth K instead of a tree")
        check(self.rule, drawn, self.plan.is_chain)
        check_drawn(self.plan, drawn)

    @property
    def drafting_way(self) -> str:
        return self.way or default_way(self.rule)

    @property
    def lossless(self) -> bool:
        return RULES[self.rule].lossless
