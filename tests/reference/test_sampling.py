"""The sampler against transformers' logits processors, in the order that `generate` applies them."""

import itertools

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from draftsmith.inference.sampling import Sampler

SETTINGS = list(
    itertools.product((1e-4, 0.1, 0.7, 1.0, 1.3, 50.0), (None, 1, 3, 4, 40, 2000), (1e-30, 0.05, 0.6, 0.9, 1.0))
)


def reference(logits: Tensor, temperature: float, top_k: int | None, top_p: float) -> Tensor:
    processors = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k is not None:
        processors.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        processors.append(TopPLogitsWarper(top_p))
    return processors(torch.zeros(len(logits), 1, dtype=torch.int64), logits.clone()).softmax(-1)


@pytest.mark.parametrize("vocab_size", [5, 1000])
@pytest.mark.parametrize("kind", ["random", "tied", "all equal", "masked"])
def test_the_law_is_that_of_transformers_processors(vocab_size: int, kind: str) -> None:
    """fp64, all combinations of temperature, top-k and top-p; top-k beyond the vocabulary and 1-row batches included."""
    torch.manual_seed(vocab_size)
    logits = 4 * torch.randn(6, vocab_size, dtype=torch.float64)
    if kind == "tied":
        logits = (logits / 4).round()
    if kind == "all equal":
        logits = torch.ones_like(logits)
    if kind == "masked":
        logits[:, ::2] = -torch.inf
    kept = set()
    for temperature, top_k, top_p in SETTINGS:
        law = Sampler(temperature, top_k, top_p).log_probs(logits).exp()
        expected = reference(logits, temperature, top_k, top_p)
        assert torch.equal(law > 0, expected > 0), (temperature, top_k, top_p)
        torch.testing.assert_close(law, expected, atol=1e-12, rtol=1e-9)
        kept.add(int((law > 0).sum()))
    assert len(kept) > 2  # the settings did cut


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_logits_get_an_fp32_law(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = 4 * torch.randn(4, 1000).to(dtype)
    law = Sampler(0.7, 50).log_probs(logits)
    assert law.dtype == torch.float32
    torch.testing.assert_close(law.exp(), reference(logits.float(), 0.7, 50, 1.0), atol=1e-6, rtol=1e-4)


def test_a_temperature_that_overflows_the_naive_division_is_finite() -> None:
    law = Sampler(1e-38).log_probs(torch.tensor([[80.0, 79.0, -80.0]])).exp()
    assert law.tolist() == [[1.0, 0.0, 0.0]]


def test_any_leading_shape_is_taken() -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 4, 9, dtype=torch.float64)
    sampler = Sampler(0.8, 5, 0.7)
    flat = sampler.log_probs(logits.view(-1, 9)).view_as(logits)
    assert torch.equal(sampler.log_probs(logits), flat)
    assert sampler.log_probs(logits[0, 0, 0]).shape == (9,)
