"""The sampler against transformers' logits processors, in the order that `generate` applies them, on every row of a tree."""

import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from draftsmith.drafters.tree import Tree, depths
from draftsmith.inference.sampling import Prefix, Sampler

SETTINGS = list(
    itertools.product((1e-4, 0.1, 0.7, 1.0, 1.3, 50.0), (None, 1, 3, 4, 40, 2000), (1e-30, 0.05, 0.6, 0.9, 1.0))
)
CUTS = [
    (None, 1.0),
    (0.0, 1.0),
    (0.05, 1.0),
    (0.3, 1.0),
    (1.0, 1.0),
    (None, 0.2),
    (None, 0.95),
    (0.02, 0.8),
    (None, 1e-9),
]


def reference(
    logits: Tensor,
    temperature: float,
    top_k: int | None,
    top_p: float,
    min_p: float | None = None,
    typical_p: float = 1.0,
) -> Tensor:
    processors = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k is not None:
        processors.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        processors.append(TopPLogitsWarper(top_p))
    if min_p is not None:
        processors.append(MinPLogitsWarper(min_p))
    if typical_p < 1:
        processors.append(TypicalLogitsWarper(typical_p))
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


@pytest.mark.parametrize("top_k, top_p", [(None, 1.0), (7, 1.0), (None, 0.7), (30, 0.9)])
@pytest.mark.parametrize("kind", ["random", "tied", "masked"])
def test_min_p_and_typical_p_are_those_of_transformers(kind: str, top_k: int | None, top_p: float) -> None:
    """fp64, behind top-k and top-p; logits of three dimensions give what rows give."""
    torch.manual_seed(0)
    logits = 3 * torch.randn(6, 200, dtype=torch.float64)
    if kind == "tied":
        logits = logits.round()
    if kind == "masked":
        logits[:, ::2] = -torch.inf
    kept = set()
    for (min_p, typical_p), temperature in itertools.product(CUTS, (0.1, 1.0, 1.7)):
        sampler = Sampler(temperature, top_k, top_p, min_p, typical_p)
        law = sampler.log_probs(logits.view(2, 3, 200)).exp().view(6, 200)
        expected = reference(logits, temperature, top_k, top_p, min_p, typical_p)
        assert torch.equal(law > 0, expected > 0), sampler
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


# ---- settings that look at the tokens before --------------------------------------------------------------------------

VOCAB = 12
PROMPTS, OUTPUTS = [[1, 2, 3, 1, 2], [7], [4, 4, 9, 0, 11, 4]], [[3, 1, 2], [], [4]]
PARENTS = [(-1, -1, 0, 0, 2, 1, 3), (-1, 0, 1, 2, 3, 4, 5), (-1, 0, 0, -1, 3, 3, 5)]


class InPlace(LogitsProcessor):
    """Depends on the newest token and writes into what it is given."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores.mul_(1 + 0.1 * (input_ids[:, -1:] % 3))
        return scores.scatter_add_(1, input_ids[:, -1:], torch.ones_like(scores[:, :1]))


class OpenAIPenalties(LogitsProcessor):
    """Presence and frequency penalties as OpenAI documents them, counted in a loop."""

    def __init__(self, prompt_length: int, presence: float, frequency: float) -> None:
        self.prompt_length, self.presence, self.frequency = prompt_length, presence, frequency

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        for row, ids in enumerate(input_ids[:, self.prompt_length :].tolist()):
            for token in set(ids):
                scores[row, token] -= self.presence + self.frequency * ids.count(token)
        return scores


class Bare(GenerationMixin):
    """As much of a model as `_get_logits_processor` asks for."""

    config = SimpleNamespace(is_encoder_decoder=False)


def multiples(ids: list[int]) -> list[int]:
    return [token for token in range(VOCAB) if (token + sum(ids)) % 3]


HISTORY: dict[str, list[Any]] = {
    "repetition_penalty": [1.3, 0.6],
    "presence_penalty": [0.7, -0.4],
    "frequency_penalty": [0.3],
    "no_repeat_ngram": [1, 2, 3],
    "bad_words": [((3,),), ((2, 3), (4,)), ((1, 2, 7), (4, 4), (9, 0, 11, 4, 4, 5), (8,))],
    "logit_bias": [
        (((2,), 1.5), ((5,), -2.25)),
        (((1, 2), 4.0), ((3,), -0.5), ((4,), float("-inf")), ((1, 3, 5), 2.0)),
    ],
    "allowed": [multiples],
    "processors": [
        (InPlace(),),
        (SuppressTokensLogitsProcessor([6]), InPlace(), TopHLogitsWarper(0.8)),
    ],
}
BLIND: dict[str, list[Any]] = {
    "temperature": [0.0, 0.5, 1.7],
    "top_k": [3, 8],
    "top_p": [0.8],
    "min_p": [0.1],
    "typical_p": [0.7],
}


def hugging_face(sampler: Sampler, prompt_length: int, do_sample: bool) -> LogitsProcessorList:
    """The list that `generate` itself would build, with presence and frequency put behind the repetition penalty."""
    config = GenerationConfig(
        do_sample=do_sample,
        temperature=sampler.temperature or 1.0,
        top_k=sampler.top_k or 0,
        top_p=sampler.top_p,
        min_p=sampler.min_p,
        typical_p=sampler.typical_p,
        repetition_penalty=sampler.repetition_penalty,
        no_repeat_ngram_size=sampler.no_repeat_ngram,
        bad_words_ids=[list(ids) for ids in sampler.bad_words] or None,
        sequence_bias=[[list(ids), bias] for ids, bias in sampler.logit_bias] or None,
        num_beams=1,
        num_return_sequences=1,
    )
    config._eos_token_tensor = None

    def allowed(batch_id: int, ids: Tensor) -> list[int]:
        return [*sampler.allowed(ids.tolist())] if sampler.allowed else []

    processors = Bare()._get_logits_processor(
        config,
        input_ids_seq_length=prompt_length,
        prefix_allowed_tokens_fn=allowed if sampler.allowed else None,
        logits_processor=LogitsProcessorList(sampler.processors),
    )
    early = (SequenceBiasLogitsProcessor, RepetitionPenaltyLogitsProcessor)
    place = sum(type(each) in early for each in processors)
    processors.insert(place, OpenAIPenalties(prompt_length, sampler.presence_penalty, sampler.frequency_penalty))
    return processors


def compare(sampler: Sampler, seed: int, shared: bool) -> tuple[int, int]:
    """Every row that can be reached has the law of transformers' list on its own history; how many, and how many do not count."""
    draw = torch.Generator().manual_seed(seed)
    logits_BRV = 3 * torch.randn(3, 8, VOCAB, generator=draw, dtype=torch.float64)
    ids_BR = torch.randint(VOCAB, (3, 8), generator=draw)
    parents = PARENTS[:1] * 3 if shared else PARENTS
    tree = Tree(torch.tensor(parents[:1] if shared else parents), max(max(depths(each)) for each in parents))
    before_BRV = logits_BRV.clone()
    law_BRV = sampler.log_probs(logits_BRV, Prefix(PROMPTS, OUTPUTS, ids_BR, tree)).exp()
    assert torch.equal(logits_BRV, before_BRV)
    compared, unreachable = 0, 0
    for b in range(3):
        raw, full = (hugging_face(sampler, len(PROMPTS[b]), do_sample) for do_sample in (False, not sampler.greedy))
        histories: dict[int, list[int]] = {0: PROMPTS[b] + OUTPUTS[b]}
        for row in range(8):
            if row > 0:
                up, token = parents[b][row - 1] + 1, int(ids_BR[b, row])
                if (
                    up not in histories
                    or raw(torch.tensor([histories[up]]), logits_BRV[b, up][None].clone())[0, token].isneginf()
                ):
                    unreachable += 1
                    assert law_BRV[b, row].isfinite().all()
                    continue
                histories[row] = histories[up] + [token]
            scores_V = full(torch.tensor([histories[row]]), logits_BRV[b, row][None].clone())[0]
            expected_V = torch.zeros_like(scores_V)
            if sampler.greedy:
                expected_V[scores_V.argmax()] = 1
            else:
                expected_V = scores_V.softmax(-1)
            assert torch.equal(law_BRV[b, row] > 0, expected_V > 0), (sampler, b, row)
            torch.testing.assert_close(law_BRV[b, row], expected_V, atol=1e-12, rtol=1e-9)
            compared += 1
    return compared, unreachable


@pytest.mark.parametrize(
    "name, value",
    [(name, value) for name, values in HISTORY.items() for value in values],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_every_setting_alone_gives_each_drafted_row_the_law_of_its_own_history(name: str, value: Any) -> None:
    plain = Sampler(1.0)
    for seed, shared, temperature in itertools.product(range(3), (False, True), (0.0, 1.0)):
        sampler = Sampler(temperature, **{name: value})
        compared, _ = compare(sampler, seed, shared)
        assert compared >= 3
    assert sampler.drafting() == plain


def test_all_settings_together_have_the_order_of_generate() -> None:
    """150 random combinations; each setting is on in half of them."""
    chance = random.Random(0)
    totals = [0, 0]
    for seed in range(150):
        settings: dict[str, Any] = {"temperature": 1.0}
        for name, values in (BLIND | HISTORY).items():
            if chance.random() < 0.5:
                settings[name] = chance.choice(values)
        for at, number in enumerate(compare(Sampler(**settings), seed, shared=seed % 2 == 0)):
            totals[at] += number
    assert totals[0] > 1500 and totals[1] > 300  # 24 rows each: both kinds occurred often
