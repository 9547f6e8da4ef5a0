"""What the guard warns of, and what it lets pass; figures of log lines and evaluations as the loop makes them."""

import math
from typing import Any

import pytest

from draftsmith.train.guard import Guard, GuardConfig, Warned

UNIFORM = math.log(1000)


class Watched:
    """A guard and the warnings it gave."""

    def __init__(self, greedy: bool = True, **settings: float) -> None:
        self.given: list[tuple[int, Warned]] = []
        guard = Guard(
            GuardConfig(**settings), 0.1, UNIFORM, greedy, lambda step, warned: self.given.append((step, warned))
        )
        self.guard = guard

    def window(
        self,
        loss: float = 2.0,
        survived: tuple[float, ...] = (),
        supervised: tuple[int, ...] = (9,),
        share: float = 0.5,
    ) -> Any:
        values = {"loss/0": loss} | {f"survived/{j}": value for j, value in enumerate(survived)}
        self.guard.window(20, share, values, list(supervised))
        return self

    def evaluated(self, uncond: tuple[float, ...], ngram: float = 1.0, share: float = 0.5, width: float = 0.0) -> Any:
        tau = 1 + sum(uncond)
        report = {
            "tokens_per_round": {"value": tau, "low": tau - width, "high": tau + width},
            "uncond_accept": list(uncond),
            "ngram_tau": ngram,
        }
        self.guard.evaluated(20, share, report)
        return self

    @property
    def names(self) -> list[str]:
        assert all(step == 20 and len(warned.title) < 64 for step, warned in self.given)  # W&B takes no longer titles
        return [warned.name for _, warned in self.given]


def test_a_usual_run_is_not_warned_of() -> None:
    watched = Watched().window(loss=2.0, survived=(0.4, 0.2)).evaluated((0.35, 0.15, 0.05), ngram=1.2)
    assert watched.names == []


@pytest.mark.parametrize(
    "supervised, share, loss, names",
    [
        ((5, 0, 7), 0.5, 2.0, ["nothing_supervised"]),
        ((0, 0), 0.5, 0.0, ["nothing_supervised"]),
        ((5,), 0.5, 1.4 * UNIFORM, []),
        ((5,), 0.5, 1.6 * UNIFORM, ["above_uniform"]),
        ((5,), 0.1, 1.6 * UNIFORM, []),  # the warm-up is not over
    ],
)
def test_log_lines(supervised: tuple[int, ...], share: float, loss: float, names: list[str]) -> None:
    assert Watched().window(loss=loss, supervised=supervised, share=share).names == names


def test_steps_without_supervision_are_counted_and_the_first_is_named() -> None:
    _, warned = Watched().window(supervised=(5, 0, 7, 0)).given[0]
    assert "2 of the last 4 steps, the first of them step 18" in warned.text and "data.max_length" in warned.text


@pytest.mark.parametrize(
    "survived, uncond, names",
    [
        ((0.6, 0.4), (0.3, 0.1), ["real_below_predicted"]),  # 1.0 accepted tokens predicted, 0.4 real
        ((0.6, 0.4), (0.4, 0.2, 0.9), []),  # only positions that are trained count: 0.6 real
        ((0.2, 0.1), (0.5, 0.4), ["real_above_predicted"]),
        ((0.6, 0.4, 0.3, 0.2), (0.6,), []),  # a drafter that is measured less deep than it is trained
        ((), (0.6,), []),  # no log line yet
    ],
)
def test_predicted_and_real_acceptance_are_compared_over_the_positions_that_both_have(
    survived: tuple[float, ...], uncond: tuple[float, ...], names: list[str]
) -> None:
    assert Watched().window(survived=survived).evaluated(uncond).names == names


def test_a_gap_within_the_uncertainty_of_the_measurement_is_none() -> None:
    assert Watched().window(survived=(0.6,)).evaluated((0.2,), width=0.3).names == ["real_below_predicted"]
    assert Watched().window(survived=(0.6,)).evaluated((0.2,), width=0.5).names == []


def test_an_untrained_drafter_that_has_hardly_anything_accepted_is_not_warned_of() -> None:
    assert Watched().window(survived=(0.15, 0.03)).evaluated((0.0, 0.0)).names == []


def test_at_a_temperature_there_is_no_prediction_to_compare_with() -> None:
    assert Watched(greedy=False).window(survived=(0.9,)).evaluated((0.1,)).names == []


def test_the_text_says_how_far_and_what_to_check() -> None:
    _, below = Watched().window(survived=(0.6, 0.4)).evaluated((0.3, 0.1)).given[0]
    assert "first 2 draft positions training predicts tau 2.00" in below.text and "gives 1.40" in below.text
    assert "chat template" in below.text and "draftsmith doctor CONFIG" in below.text
    _, lookup = Watched().evaluated((0.2,), ngram=1.5).given[0]
    assert "50% of the run is done and tau is 1.20" in lookup.text and "reaches 1.50" in lookup.text


@pytest.mark.parametrize("share, ngram, names", [(0.5, 1.3, ["below_ngram"]), (0.4, 1.3, []), (0.5, 1.1, [])])
def test_prompt_lookup_is_compared_with_once_enough_of_the_run_is_done(
    share: float, ngram: float, names: list[str]
) -> None:
    assert Watched().evaluated((0.2,), ngram=ngram, share=share).names == names


def test_what_counts_as_far_is_a_setting() -> None:
    assert Watched(loss_above_uniform=1.1).window(loss=1.2 * UNIFORM).names == ["above_uniform"]
    assert Watched(tau_gap=0.1).window(survived=(0.9,)).evaluated((0.6,)).names == ["real_below_predicted"]
    assert Watched(ngram_after=0.0).evaluated((0.2,), ngram=1.3, share=0.01).names == ["below_ngram"]
