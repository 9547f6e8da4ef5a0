"""Acceptance metrics on rounds counted by hand.

Three prompts with K = 3; a round is (proposed, accepted, committed):
    A: (3, 3, 4) (3, 0, 1) (3, 1, 2)
    B: (3, 2, 3) (3, 3, 2)                the last round is cut by the budget: four tokens verified, two kept
    C: no round, the first token was the end
"""

import math

import pytest

from draftsmith.inference import metrics
from draftsmith.inference.output import Output, Round


def chain(proposed: int, accepted: int, committed: int) -> Round:
    """A round of a chain, which has as many nodes as it is deep."""
    return Round(proposed, accepted, committed, proposed)


A = Output([1] * 8, "eos", [chain(3, 3, 4), chain(3, 0, 1), chain(3, 1, 2)])
B = Output([1] * 6, "budget", [chain(3, 2, 3), chain(3, 3, 2)])
C = Output([2], "eos", [])


def test_acceptance_on_rounds_counted_by_hand() -> None:
    result = metrics.acceptance([A, B, C])
    assert result["rounds"] == 5
    assert result["tokens"] == 15
    assert result["tokens_per_round"]["value"] == pytest.approx(12 / 5)  # type: ignore[index]
    assert result["acceptance_length_raw"] == pytest.approx((4 + 1 + 2 + 3 + 4) / 5)
    assert result["draft_acceptance_rate"] == pytest.approx(9 / 15)
    assert result["uncond_accept"] == pytest.approx([4 / 5, 3 / 5, 2 / 5])
    assert result["cond_accept"] == pytest.approx([4 / 5, 3 / 4, 2 / 3])


def test_the_raw_length_is_one_plus_the_sum_of_the_unconditional_rates() -> None:
    result = metrics.acceptance([A, B, C])
    assert result["acceptance_length_raw"] == pytest.approx(1 + sum(result["uncond_accept"]))  # type: ignore[arg-type]


def test_a_round_that_proposed_less_is_not_counted_against_deeper_places() -> None:
    """(1, 1, 2) never had a second place; of the two rounds that reached it one accepted it."""
    result = metrics.acceptance([Output([1] * 8, "budget", [chain(1, 1, 2), chain(2, 2, 3), chain(2, 1, 2)])])
    assert result["cond_accept"] == pytest.approx([1, 1 / 2])


def test_pooling_is_over_rounds_not_over_prompts() -> None:
    """vLLM #42508: 50 rounds of 1 token and 2 rounds of 4 are 58/52 tokens a round, not (1 + 4) / 2."""
    long, short = Output([1] * 51, "budget", [chain(3, 0, 1)] * 50), Output([1] * 9, "budget", [chain(3, 3, 4)] * 2)
    assert metrics.acceptance([long, short])["tokens_per_round"]["value"] == pytest.approx(58 / 52)  # type: ignore[index]


def test_the_interval_holds_the_value_and_widens_with_the_prompts_differences() -> None:
    outputs = [Output([1], "budget", [chain(3, i % 4, i % 4 + 1)] * 5) for i in range(40)]
    even = [Output([1], "budget", [chain(3, i % 4, i % 4 + 1) for i in range(8)]) for _ in range(40)]
    interval, narrow = (metrics.acceptance(o)["tokens_per_round"] for o in (outputs, even))
    assert interval["low"] < interval["value"] == 2.5 < interval["high"]  # type: ignore[index]
    # Standard error of the mean of 40 prompts, each 1, 2, 3 or 4 alike: sqrt(1.25 / 40); two-sided 95 % is 2 * 1.96 of it.
    width = interval["high"] - interval["low"]  # type: ignore[index]
    assert width == pytest.approx(2 * 1.96 * math.sqrt(1.25 / 40), rel=0.1)
    assert narrow == {"value": 2.5, "low": 2.5, "high": 2.5}


def test_the_interval_is_the_same_each_time() -> None:
    assert metrics.acceptance([A, B, C]) == metrics.acceptance([A, B, C])


@pytest.mark.parametrize("outputs", [[], [C], [C, C]], ids=["no prompt", "one token", "one token each"])
def test_without_rounds_there_is_no_rate_and_no_error(outputs: list[Output]) -> None:
    """JSON has no NaN: what is undefined is None, and tokens per round are 1, as in plain decoding."""
    result = metrics.acceptance(outputs)
    assert result["rounds"] == 0 and result["cond_accept"] == []
    assert result["acceptance_length_raw"] is None and result["draft_acceptance_rate"] is None
    assert result["tokens_per_round"] == {"value": 1.0, "low": 1.0, "high": 1.0}


def test_a_depth_that_was_never_reached_has_no_conditional_rate() -> None:
    result = metrics.acceptance([Output([1] * 3, "budget", [chain(2, 0, 1), chain(2, 0, 1)])])
    assert result["cond_accept"] == [0.0, None] and result["uncond_accept"] == [0.0, 0.0]


def test_plain_decoding_has_one_token_a_round_and_no_acceptance() -> None:
    result = metrics.acceptance([Output([1] * 4, "budget", [chain(0, 0, 1)] * 3)])
    assert result["tokens_per_round"]["value"] == 1  # type: ignore[index]
    assert result["cond_accept"] == [] and result["draft_acceptance_rate"] is None


# A tree of 3 + 2 nodes, 2 deep: both nodes of a path accepted, none, and one, with the last token cut by the budget.
TREE = Output([1] * 6, "budget", [Round(2, 2, 3, 5), Round(2, 0, 1, 5), Round(2, 1, 1, 5)])


def test_a_tree_says_how_much_of_its_depth_and_how_many_of_its_nodes_were_accepted() -> None:
    result = metrics.acceptance([TREE])
    assert result["path_acceptance"] == pytest.approx(3 / 6) and result["node_utilisation"] == pytest.approx(3 / 15)
    assert "draft_acceptance_rate" not in result  # which would be neither of the two
    assert result["tokens_per_round"]["value"] == pytest.approx(5 / 3)  # type: ignore[index]
    assert result["acceptance_length_raw"] == pytest.approx((3 + 1 + 2) / 3)
    assert result["uncond_accept"] == pytest.approx([2 / 3, 1 / 3])
    assert result["cond_accept"] == pytest.approx([2 / 3, 1 / 2])


def test_a_chain_has_one_rate_only() -> None:
    assert not {"path_acceptance", "node_utilisation"} & metrics.acceptance([A]).keys()


def test_the_raw_length_of_a_tree_is_one_plus_the_sum_of_the_unconditional_rates_too() -> None:
    result = metrics.acceptance([TREE])
    assert result["acceptance_length_raw"] == pytest.approx(1 + sum(result["uncond_accept"]))  # type: ignore[arg-type]


def test_every_number_has_its_definition() -> None:
    for outputs in ([A], [TREE]):
        reported = metrics.acceptance(outputs).keys() - {"rounds", "tokens"}
        assert reported <= metrics.DEFINITIONS.keys()


def test_rounds_are_sorted_by_the_text_before_them() -> None:
    result = metrics.by_context([60, 100, 5], [A, B, C])  # A's rounds begin at 61, 65 and 66 tokens; B's at 101 and 104
    assert list(result) == ["<64", "64-127"]
    assert result["<64"]["value"] == 4
    assert result["64-127"]["value"] == (1 + 2 + 3 + 2) / 4
