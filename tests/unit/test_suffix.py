"""Suffix decoding: proposals against a search through all texts, and the tokens of plain decoding whatever the corpus holds."""

import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftsmith.drafters.base import Proposal
from draftsmith.drafters.suffix import Suffix, Text
from draftsmith.drafters.texts import State
from draftsmith.drafters.tree import Dynamic, Fixed, Plan, branching, chain
from draftsmith.inference import metrics
from draftsmith.inference.decode import generate
from draftsmith.inference.evaluate import draft_and_verify
from draftsmith.inference.sampling import Sampler
from draftsmith.inference.speculation import Speculation

PROMPTS = [[5, 6, 7, 8, 5, 6], [9], [10, 11, 12, 13, 10, 15, 16, 10, 11, 19, 20], [21, 22], [30, 30, 30]]
SEEDS = [3, 141, 59, 26, 5]

Seen = tuple[int, int]
"""Which text, and the index in it of a token that follows others."""


class Searched:
    """The same by going through all that was ever observed, in the order in which it was."""

    def __init__(self, max_tokens: int, max_match: int) -> None:
        self.texts: list[list[int]] = []
        self.events: list[Seen] = []
        self.max_tokens, self.max_match = max_tokens, max_match

    def append(self, row: int, token: int) -> None:
        self.texts[row].append(token)
        if len(self.texts[row]) > 1:
            self.events.append((row, len(self.texts[row]) - 1))

    def matches(self, row: int, drafted: list[int]) -> list[Seen]:
        known = self.events[max(0, len(self.events) - self.max_tokens) :]
        known = [event for event in known if event[0] != row] + [event for event in self.events if event[0] == row]
        newest = self.texts[row] + drafted
        for length in range(min(len(newest), self.max_match), 0, -1):
            found = [(r, at) for r, at in known if self.texts[r][:at][-length:] == newest[-length:]]
            if found:
                return found
        return []

    def options(self, row: int, drafted: list[int], agreeing: list[Seen]) -> tuple[list[int], list[Seen]]:
        here = [(r, at) for r, at in agreeing if at < len(self.texts[r])] or self.matches(row, drafted)
        tokens = [self.texts[r][at] for r, at in here]
        counts = Counter(tokens)
        return sorted(counts, key=lambda t: (-counts[t], -max(i for i, x in enumerate(tokens) if x == t))), here

    def chain(self, row: int, count: int) -> list[int]:
        drafted: list[int] = []
        agreeing: list[Seen] = []
        for _ in range(count):
            options, here = self.options(row, drafted, agreeing)
            token = options[0] if options else (self.texts[row] + drafted)[-1]
            agreeing = [(r, at + 1) for r, at in here if self.texts[r][at] == token]
            drafted.append(token)
        return drafted


def proposed(drafter: Suffix, texts: list[Text], plan: Plan) -> Proposal:
    return drafter.propose(State(texts, torch.device("cpu")), plan, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("max_tokens, max_match", [(1000, 64), (1000, 3), (25, 64), (0, 64)])
def test_proposals_are_those_of_a_search_through_all_texts(max_tokens: int, max_match: int) -> None:
    """Three texts at a time grow in turns; the index of the first ones is dropped while they still grow."""
    for seed in range(20):
        draw = random.Random(seed)
        drafter, searched = Suffix(max_tokens, max_match, max_matches=1000), Searched(max_tokens, max_match)
        for _ in range(2):
            texts = [drafter.new_text() for _ in range(3)]
            searched.texts += [[] for _ in texts]
            for _ in range(45):
                number, token = draw.randrange(3), draw.randrange(2 + seed % 5)
                row = len(searched.texts) - 3 + number
                texts[number].append(token)
                searched.append(row, token)
                assert proposed(drafter, [texts[number]], chain(5)).tokens_BN.tolist() == [searched.chain(row, 5)]
        assert len(drafter.corpus) == min(max_tokens, len(searched.events))


def grown(drafter: Suffix, ids: list[int]) -> Text:
    text = drafter.new_text()
    for token in ids:
        text.append(token)
    return text


@pytest.mark.parametrize(
    "earlier, ids, expected",
    [
        ([], [1, 2, 3, 9, 1, 2, 3], [9, 1, 2, 3]),
        ([], [1, 2, 8, 2, 9, 1, 2], [8, 2, 9, 1]),  # the longer match wins over the later one
        ([], [4, 4, 4], [4, 4, 4, 4]),
        ([], [1, 2, 3], [3, 3, 3, 3]),  # no match
        ([], [7], [7, 7, 7, 7]),
        ([], [1, 5, 1, 6, 1, 5, 2, 1], [5, 2, 1, 5]),  # 5 twice, 6 once; the later of the two goes on further
        ([[1, 2, 3, 4, 5, 6]], [8, 2, 3], [4, 5, 6, 6]),  # from another text, to its end
        ([[1, 2, 3], [1, 2, 4], [1, 2, 3]], [1, 2], [3, 3, 3, 3]),
        ([[1, 2, 3], [1, 2, 3]], [1, 2, 4, 1, 2], [3, 3, 3, 3]),  # other texts are right more often
        ([[1, 2, 3]], [1, 2, 4, 1, 2], [4, 1, 2, 4]),  # a draw: the own text
    ],
)
def test_worked_examples(earlier: list[list[int]], ids: list[int], expected: list[int]) -> None:
    drafter = Suffix()
    for other in earlier:
        grown(drafter, other)
    proposal = proposed(drafter, [grown(drafter, ids)], chain(4))
    assert proposal.tokens_BN.tolist() == [expected] and proposal.drawn == "fixed" and proposal.tree.is_chain


def test_trees_hold_the_most_frequent_continuations() -> None:
    drafter = Suffix()
    for other in ([1, 2, 5], [1, 2, 5], [1, 2, 6], [1, 3, 7], [1, 3, 8], [1, 4, 9]):
        grown(drafter, other)
    text = grown(drafter, [1])  # behind it 2 in three texts, 3 in two (8 after 7), 4 in one; behind 2 5, 5 and 6
    static = proposed(drafter, [text], branching([2, 2]))
    assert static.tokens_BN.tolist() == [[2, 3, 5, 6, 8, 7]]
    assert static.tree.parents_bN.tolist() == [[-1, -1, 0, 0, 1, 1]]
    # Shares: 2 is 1/2, 3 and 5 behind 2 are 1/3 each (3 was offered first), then 4, 6, 8 and 7 have 1/6.
    dynamic = proposed(drafter, [text, grown(drafter, [50])], Dynamic(4, 2, 3))
    # No match for the second: guesses, all different; behind the guess 1 there is a match.
    assert dynamic.tokens_BN.tolist() == [[2, 3, 5, 4], [50, 0, 1, 2]]
    assert dynamic.tree.parents_bN.tolist() == [[-1, -1, 0, -1], [-1, -1, -1, 2]]
    for plan in (branching([3, 3]), Dynamic(9, 3, 3)):
        wide = proposed(drafter, [text, grown(drafter, [50])], plan)
        parents_BN = wide.tree.parents_bN.expand(2, -1)
        for parents, tokens in zip(parents_BN.tolist(), wide.tokens_BN.tolist(), strict=True):
            assert len(set(zip(parents, tokens, strict=True))) == len(tokens)  # siblings are distinct


@pytest.mark.parametrize("sampler", [Sampler(), Sampler(0.7)], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "plan", [chain(4), Fixed((-1, -1, 0, 0, 1)), Dynamic(6, 3, 3)], ids=["chain", "static", "dynamic"]
)
def test_tokens_are_those_of_plain_decoding_whatever_the_corpus_holds(
    toy: SimpleNamespace, sampler: Sampler, plan: Plan
) -> None:
    target = toy.make_target("llama", num_hidden_layers=2)
    drafter, rates = Suffix(), []
    options: dict[str, Any] = {"max_new": 25, "sampler": sampler, "seeds": SEEDS, "stop_at_eos": False}
    plain = generate(target, PROMPTS, **options)
    for corpus in ("none", "misleading", "the answers themselves"):
        if corpus == "misleading":
            drafter.forget()
            for prompt, output in zip(PROMPTS, plain, strict=True):
                grown(drafter, [token for id_ in prompt + output.ids for token in (id_, 63 - id_)])
        outputs = generate(target, PROMPTS, speculation=Speculation(drafter, plan), **options)
        assert [output.ids for output in outputs] == [output.ids for output in plain]
        rates.append(sum(r.accepted for output in outputs for r in output.rounds))
    assert rates[2] > 2 * max(rates[:2], default=0)  # the second time the corpus holds the answers


def test_forgetting_leaves_a_drafter_as_it_was_made(toy: SimpleNamespace) -> None:
    target, drafter = toy.make_target("llama", num_hidden_layers=2), Suffix()
    options: dict[str, Any] = {"max_new": 20, "sampler": Sampler(0.7), "seeds": SEEDS, "stop_at_eos": False}
    speculation = Speculation(drafter, chain(3))
    rounds = []
    for _ in range(2):
        outputs = generate(target, PROMPTS, speculation=speculation, **options)
        rounds.append([output.rounds for output in outputs])
        assert len(drafter.corpus) > 0
        drafter.forget()
        assert len(drafter.corpus) == 0 and not drafter.corpus._places
    assert rounds[0] == rounds[1]


def test_a_measurement_does_not_profit_from_the_one_before(toy: SimpleNamespace) -> None:
    target, drafter = toy.make_target("llama", num_hidden_layers=2), Suffix()
    options: dict[str, Any] = {"depth": 3, "temperature": 0.0, "max_new": 15, "batch_size": 2}
    first, second = (metrics.acceptance(draft_and_verify(target, drafter, PROMPTS, **options)) for _ in range(2))
    assert first == second and len(drafter.corpus) > 0


@pytest.mark.parametrize("rule, way", [("ratio", "argmax"), ("point_mass", None)])
def test_other_rules_that_take_fixed_drafts_verify_it(toy: SimpleNamespace, rule: str, way: str | None) -> None:
    target = toy.make_target("llama", num_hidden_layers=2)
    speculation = Speculation(Suffix(), chain(3), rule, way)
    outputs = generate(target, PROMPTS, max_new=20, sampler=Sampler(0.7), speculation=speculation, stop_at_eos=False)
    assert all(len(output.ids) == 20 for output in outputs)


def test_rows_that_leave_and_join_keep_their_own_texts(toy: SimpleNamespace) -> None:
    target = toy.make_target("llama", num_hidden_layers=2)
    seen: list[State[Text]] = []

    class Spy(Suffix):
        def observe(self, state: Any, *args: Any) -> State[Text]:
            seen.append(super().observe(state, *args))
            return seen[-1]

    options: dict[str, Any] = {"max_new": [12, 3, 9, 4, 12], "sampler": Sampler(0.7), "seeds": SEEDS}
    plain = generate(target, PROMPTS, stop_at_eos=False, **options)
    texts = [prompt + output.ids for prompt, output in zip(PROMPTS, plain, strict=True)]
    for max_batch in (None, 2):
        speculation = Speculation(Spy(), chain(3))
        outputs = generate(target, PROMPTS, stop_at_eos=False, speculation=speculation, max_batch=max_batch, **options)
        assert [output.ids for output in outputs] == [output.ids for output in plain]
        for state in seen:  # a text may go on where the answer was cut, never differ from it
            for text in state.texts:
                assert any(text.ids[: len(whole)] == whole[: len(text.ids)] for whole in texts)
        seen.clear()


def test_memory_is_bounded_and_old_text_is_gone() -> None:
    drafter = Suffix(max_tokens=100, max_matches=4)
    draw = random.Random(0)
    grown(drafter, [90, 91, 92, 93])
    for _ in range(30):
        grown(drafter, [draw.randrange(8) for _ in range(40)])
        places = drafter.corpus._places
        assert len(drafter.corpus) <= 100 and len(places) <= 5 * 100
        assert all(1 <= len(each) <= 4 for each in places.values())
    assert proposed(drafter, [grown(drafter, [90, 91])], chain(2)).tokens_BN.tolist() == [[91, 91]]


def test_impossible_settings_are_refused() -> None:
    for bounds in ((-1, 1, 1), (1, 0, 1), (1, 1, 0)):
        with pytest.raises(
            ValueError, match=f"max_tokens is {bounds[0]}, max_match {bounds[1]} and max_matches {bounds[2]}"
        ):
            Suffix(*bounds)
