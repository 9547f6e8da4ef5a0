"""The sampler's settings: greedy as a one-hot law, laws worked by hand, one sampler per sequence, and error messages."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import NoRepeatNGramLogitsProcessor, RepetitionPenaltyLogitsProcessor

from draftsmith.drafters.tree import chain, fixed
from draftsmith.inference.sampling import Prefix, Sampler, log_probs


def keep(ids: Tensor, scores: Tensor) -> Tensor:
    """A processor that does nothing."""
    return scores


def everything(ids: list[int]) -> range:
    return range(6)


def prefix_of(batch: int) -> Prefix:
    ids_BR = torch.arange(3 * batch).view(batch, 3) % 6
    return Prefix([[1, 2]] * batch, [[3, 0]] * batch, ids_BR, fixed(chain(2).parents))


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


def test_min_p_and_typical_p_worked_by_hand() -> None:
    """1/2, 1/4, 1/8, 1/8: min-p 1/2 keeps what has 1/4. The entropy is 1.75 bits; 1/4 (2 bits) is nearest, then 1/2 (1 bit), then
    1/8 (3 bits), and typical-p 0.2 and 0.3 are reached by the first and the first two."""
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125], dtype=torch.float64).log()

    def law(**settings: Any) -> list[float]:
        probs: list[float] = Sampler(1.0, **settings).log_probs(logits).exp().tolist()
        return probs

    assert law(min_p=0.5) == pytest.approx([2 / 3, 1 / 3, 0, 0])
    assert law(min_p=0.51) == law(min_p=1.0) == [1, 0, 0, 0]
    assert law(min_p=0.0) == law(min_p=0.2) == pytest.approx([1 / 2, 1 / 4, 1 / 8, 1 / 8])
    assert law(typical_p=0.2) == [0, 1, 0, 0]
    assert law(typical_p=0.3) == pytest.approx([2 / 3, 1 / 3, 0, 0])
    assert law(typical_p=0.3, min_p=0.51) == [1, 0, 0, 0]  # min-p comes first


def test_biases_and_bans_of_single_tokens_worked_by_hand() -> None:
    """Equal logits, log 3 on one of four and one banned: 1, 3, 1 parts of 5. Greedy decoding obeys them as well."""
    logits = torch.zeros(4, dtype=torch.float64)
    settings: dict[str, Any] = {"bad_words": ((3,),), "logit_bias": (((1,), math.log(3)),)}
    assert Sampler(1.0, **settings).log_probs(logits).exp().tolist() == pytest.approx([1 / 5, 3 / 5, 1 / 5, 0])
    assert Sampler(0.0, **settings).log_probs(logits).exp().tolist() == [0, 1, 0, 0]
    assert logits.tolist() == [0] * 4 and not Sampler(1.0, **settings).needs_prefix


@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1e-6, 1.0, 1e4])
def test_a_token_that_alone_is_left_has_all_mass(temperature: float) -> None:
    settings: dict[str, Any] = {"bad_words": tuple((token,) for token in range(5)), "typical_p": 0.5, "min_p": 0.1}
    logits = torch.tensor([9.0, 8.0, 7.0, 6.0, 5.0, -80.0]).expand(2, 3, 6)
    assert Sampler(temperature, **settings).log_probs(logits).exp()[1, 2].tolist() == [0, 0, 0, 0, 0, 1]
    slow = Sampler(temperature, allowed=lambda ids: [5], repetition_penalty=1.2)
    assert slow.log_probs(logits, prefix_of(2)).exp()[1, 0].tolist() == [0, 0, 0, 0, 0, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-45, 1e-300])
def test_a_tiny_temperature_is_greedy_without_overflow(temperature: float, dtype: torch.dtype) -> None:
    logits = torch.tensor([80.0, 79.5, -80.0, 80.0], dtype=dtype).expand(2, 3, 4)
    settings: dict[str, Any] = {"min_p": 0.1, "typical_p": 0.9, "frequency_penalty": -0.5}
    assert Sampler(temperature).log_probs(logits).exp()[0, 0].tolist() == pytest.approx([0.5, 0, 0, 0.5])
    law = Sampler(temperature, **settings).log_probs(logits, prefix_of(2)).exp()
    assert law[0].tolist() == [
        pytest.approx(row) for row in ([1 / 2, 0, 0, 1 / 2], [1 / 2, 0, 0, 1 / 2], [1 / 2, 0, 0, 1 / 2])
    ]


def test_settings_that_change_nothing_give_the_fast_law_by_the_slow_way() -> None:
    """Processors and rules without effect send the logits row by row through the histories."""
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 6, dtype=torch.float64)
    settings: dict[str, Any] = {"bad_words": ((4,),), "logit_bias": (((1,), 0.75), ((2,), -1.5))}
    for temperature in (0.0, 0.8):
        fast = Sampler(temperature, 4, 0.9, 0.01, 0.95, **settings)
        silent: list[dict[str, Any]] = [
            {"processors": (keep,)},
            {"allowed": everything},
            {"no_repeat_ngram": 50},
            {"bad_words": ((4,), (5, 5, 5, 5))},
            {"logit_bias": (*fast.logit_bias, ((5, 5, 5, 5), 3.0))},
        ]
        for more in silent:
            slow = Sampler(temperature, 4, 0.9, 0.01, 0.95, **(settings | more))
            assert slow.needs_prefix and not fast.needs_prefix
            torch.testing.assert_close(slow.log_probs(logits, prefix_of(2)), fast.log_probs(logits))


def test_each_sequence_has_the_law_of_its_own_sampler() -> None:
    torch.manual_seed(0)
    logits, prefix = torch.randn(5, 3, 6), prefix_of(5)
    before = logits.clone()
    samplers = [
        Sampler(0.7, repetition_penalty=1.5),
        Sampler(),
        Sampler(0.7, repetition_penalty=1.5),
        Sampler(1.0, 3),
        Sampler(1.0, no_repeat_ngram=1, processors=(keep,)),
    ]
    law = log_probs(samplers, logits, prefix)
    for row, sampler in enumerate(samplers):
        assert torch.equal(law[row], sampler.log_probs(logits[row : row + 1], prefix.select([row]))[0])
    assert torch.equal(logits, before)
    same = log_probs([Sampler(0.7) for _ in range(5)], logits, None)
    assert torch.equal(same, Sampler(0.7).log_probs(logits))
    assert log_probs([Sampler(0.7), Sampler()], logits[:2].bfloat16(), None).dtype == torch.float32


def test_drafting_leaves_out_what_depends_on_token_ids() -> None:
    """A draft vocabulary may be reduced, with ids of its own."""
    sampler = Sampler(0.8, 40, 0.9, 0.05, 0.95, 1.2, 0.1, 0.2, 3, ((1,),), (((2,), 1.0),), everything, (keep,))
    assert sampler.drafting() == Sampler(0.8, 40, 0.9, 0.05, 0.95) and not sampler.drafting().needs_prefix
    plain = Sampler(0.8, 40, 0.9, 0.05, 0.95)
    assert plain.drafting() is plain
    assert Sampler(repetition_penalty=1.2).drafting().greedy
    assert hash(sampler) == hash(
        Sampler(0.8, 40, 0.9, 0.05, 0.95, 1.2, 0.1, 0.2, 3, ((1,),), (((2,), 1.0),), everything, (keep,))
    )


@pytest.mark.parametrize(
    "settings, needed",
    [
        ({"temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.5, "typical_p": 0.5}, False),
        ({"bad_words": ((1,),), "logit_bias": (((1,), 1.0),)}, False),
        ({"bad_words": ((1,), (1, 2))}, True),
        ({"logit_bias": (((1, 2), 1.0),)}, True),
        ({"repetition_penalty": 1.1}, True),
        ({"presence_penalty": 0.1}, True),
        ({"frequency_penalty": -0.1}, True),
        ({"no_repeat_ngram": 2}, True),
        ({"allowed": everything}, True),
        ({"processors": (keep,)}, True),
    ],
)
def test_a_prefix_is_asked_for_where_the_tokens_before_matter(settings: dict[str, Any], needed: bool) -> None:
    sampler = Sampler(**settings)
    assert sampler.needs_prefix == needed
    if needed:
        with pytest.raises(
            ValueError, match=r"look at the tokens before; give log_probs a prefix, or use drafting\(\)"
        ):
            sampler.log_probs(torch.zeros(2, 3, 6))
        with pytest.raises(ValueError, match=r"logits of shape \(6,\) for a prefix of \(2, 3\) rows; give \(B, R, V\)"):
            sampler.log_probs(torch.zeros(6), prefix_of(2))


@pytest.mark.parametrize(
    "settings", [{"bad_words": ((6,),)}, {"bad_words": ((6, 1),)}, {"logit_bias": (((1,), 1.0), ((6,), 1.0))}]
)
def test_token_ids_beyond_the_vocabulary_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"{next(iter(settings))} names token 6; the target has 0 to 5"):
        Sampler(**settings).log_probs(torch.zeros(2, 3, 6), prefix_of(2))


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"min_p": 1.5}, "min_p is 1.5; give a value from 0 to 1, or leave it out"),
        ({"min_p": math.nan}, "min_p is nan"),
        ({"typical_p": 0.0}, "typical_p is 0.0; give a value above 0, at most 1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0; give a value above 0, 1 being none"),
        ({"repetition_penalty": math.inf}, "repetition_penalty is inf"),
        ({"presence_penalty": math.nan}, "presence_penalty is nan; give a finite value, 0 being none"),
        ({"frequency_penalty": math.inf}, "frequency_penalty is inf; give a finite value, 0 being none"),
        ({"no_repeat_ngram": -1}, "no_repeat_ngram is -1; give a whole number, 0 being none"),
        ({"no_repeat_ngram": 2.0}, "no_repeat_ngram is 2.0; give a whole number"),
        ({"bad_words": [[1]]}, r"bad_words is \[\[1\]\]; give a tuple of tuples of token ids, like"),
        ({"bad_words": ((),)}, "bad_words is .*; give a tuple of tuples"),
        ({"bad_words": ((-1,),)}, "bad_words is .*; give a tuple of tuples"),
        ({"logit_bias": {(1,): 2.0}}, "logit_bias is .*; give a tuple of pairs of token ids and a number, like"),
        ({"logit_bias": ((1, 2.0),)}, "logit_bias is .*; give a tuple of pairs"),
        (
            {"logit_bias": (((1,), math.inf),)},
            r"the logit_bias of \(1,\) is inf; give a finite value, or -inf to ban it",
        ),
        ({"logit_bias": (((1,), math.nan),)}, r"the logit_bias of \(1,\) is nan"),
        ({"logit_bias": (((1,), 1.0), ((1,), 2.0))}, r"logit_bias names \(1,\) more than once; give one value"),
        ({"allowed": [1, 2]}, r"allowed is \[1, 2\]; give a function from token ids"),
        ({"processors": [keep]}, "processors is .*; give a tuple of Hugging Face LogitsProcessor objects"),
        ({"processors": (3,)}, "processors is .*; give a tuple of Hugging Face LogitsProcessor objects"),
        ({"processors": (keep, keep)}, "processors holds the same object twice"),
        (
            {"processors": (RepetitionPenaltyLogitsProcessor(1.2),), "repetition_penalty": 1.1},
            "processors holds a RepetitionPenaltyLogitsProcessor and repetition_penalty is set too; give one of them",
        ),
    ],
)
def test_an_impossible_setting_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampler(1.0, **settings)


def test_a_processor_of_a_setting_that_is_off_is_welcome() -> None:
    sampler = Sampler(1.0, repetition_penalty=1.1, processors=(NoRepeatNGramLogitsProcessor(2),))
    assert sampler.needs_prefix


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
