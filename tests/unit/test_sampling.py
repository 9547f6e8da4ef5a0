"""The sampler's settings: greedy as a one-hot law, a law worked by hand, and error messages."""

import math

import pytest
import torch

from draftsmith.inference.sampling import Sampler


def test_temperature_zero_is_a_one_hot_law_on_the_first_of_the_most_likely_tokens() -> None:
    law = Sampler(0.0).log_probs(torch.tensor([[1.0, 3.0, 2.0], [5.0, 0.0, 5.0]]))
    assert law.exp().tolist() == [[0, 1, 0], [1, 0, 0]]
    assert Sampler(0.0).greedy and not Sampler(0.1).greedy


def test_a_law_worked_by_hand() -> None:
    """Probabilities 1/2, 1/4, 1/8, 1/8. At temperature 1/2 they are squared: 16, 4, 1, 1 parts of 22; top-k 2 keeps 16 and 4."""
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125], dtype=torch.float64).log()

    def law(*settings: float | None) -> list[float]:
        probs: list[float] = Sampler(*settings).log_probs(logits).exp().tolist()  # type: ignore[arg-type]
        return probs

    assert law(1.0) == pytest.approx([1 / 2, 1 / 4, 1 / 8, 1 / 8])
    assert law(0.5) == pytest.approx([16 / 22, 4 / 22, 1 / 22, 1 / 22])
    assert law(0.5, 2) == pytest.approx([16 / 20, 4 / 20, 0, 0])
    assert law(1.0, None, 0.6) == pytest.approx([2 / 3, 1 / 3, 0, 0])  # 1/2 is not enough, 3/4 is
    assert law(1.0, None, 0.01) == pytest.approx([1, 0, 0, 0])
    assert law(1.0, 3, 0.99) == pytest.approx([1 / 2, 1 / 4, 1 / 8, 1 / 8])  # a tie at the k-th place keeps both


def test_top_k_comes_before_top_p() -> None:
    """5/10, 3/10, 2/10 with top-k 2: 5/8, 3/8; then top-p 0.6 keeps the first alone. The other order would keep both."""
    logits = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
    assert Sampler(1.0, 2, 0.6).log_probs(logits).exp().tolist() == [1, 0, 0]


@pytest.mark.parametrize("temperature", [-0.1, math.nan, math.inf])
def test_an_impossible_temperature_is_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match=r"temperature is .*; give 0 \(greedy\) or more"):
        Sampler(temperature)


@pytest.mark.parametrize("top_k", [0, -3])
def test_an_impossible_top_k_is_refused(top_k: int) -> None:
    with pytest.raises(ValueError, match=f"top_k is {top_k}; give 1 or more, or leave it out"):
        Sampler(1.0, top_k)


@pytest.mark.parametrize("top_p", [0.0, 1.1, -1.0, math.nan])
def test_an_impossible_top_p_is_refused(top_p: float) -> None:
    with pytest.raises(ValueError, match=r"top_p is .*; give a value above 0, at most 1"):
        Sampler(1.0, None, top_p)
