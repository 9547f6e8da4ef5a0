"""How draft tokens are chosen: what is handed over is what they were drawn from."""

from types import SimpleNamespace

import pytest
import torch

from draftsmith.inference import noise
from draftsmith.inference.drafting import WAYS, default_way, make_pick
from draftsmith.inference.sampling import Sampler

LOGITS = torch.tensor([1.0, -0.5, 0.3, 2.0, 0.0], dtype=torch.float64)
TOKEN_IDS = torch.tensor([1, 2, 4, 5, 7])  # a reduced vocabulary of five among eight target tokens


@pytest.mark.parametrize("sampler", [Sampler(0.7), Sampler(1.5, 3), Sampler(1.0, None, 0.8)], ids=str)
@pytest.mark.parametrize("way", ["sample", "coupled"])
def test_sampled_and_coupled_drafts_follow_the_draft_s_law(tools: SimpleNamespace, way: str, sampler: Sampler) -> None:
    """200,000 rows with the same logits; chance of a false alarm below 1e-8 each."""
    rows = 200_000
    pick = make_pick(way, sampler, torch.arange(rows), torch.full((rows,), 9), 8)
    tokens, probs = pick(LOGITS.expand(rows, -1), 2, TOKEN_IDS)
    law = torch.zeros(8, dtype=torch.float64)
    law[TOKEN_IDS] = sampler.log_probs(LOGITS).exp()
    assert tools.chi_square_p_value(torch.bincount(tokens, minlength=8), law) > 1e-8
    if way == "coupled":
        assert probs is None
    else:
        torch.testing.assert_close(probs[0].double(), law, atol=1e-6, rtol=0)
        assert torch.equal(probs[0], probs[-1])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("token_ids", [None, TOKEN_IDS])
def test_at_temperature_zero_every_way_is_the_argmax(way: str, token_ids: torch.Tensor | None) -> None:
    pick = make_pick(way, Sampler(0.0), torch.tensor([1, 2]), torch.tensor([4, 5]), 8)
    tokens, probs = pick(LOGITS.expand(2, -1), 0, token_ids)
    assert tokens.tolist() == ([3, 3] if token_ids is None else [5, 5])
    assert probs is None


def test_an_argmax_draft_is_declared_as_a_point_mass() -> None:
    pick = make_pick("argmax", Sampler(1.0), torch.tensor([1]), torch.tensor([4]), 5)
    tokens, probs = pick(LOGITS[None], 0, None)
    assert tokens.tolist() == [3] and probs is None


def test_a_coupled_draft_uses_the_target_s_noise_at_the_drafted_position_and_target_ids() -> None:
    seeds, first = torch.tensor([11, 12, 13]), torch.tensor([4, 9, 30])
    pick = make_pick("coupled", Sampler(1.0), seeds, first, 8)
    tokens, _ = pick(LOGITS.expand(3, -1), 2, TOKEN_IDS)
    for row in range(3):
        g = noise.gumbel(seeds[row : row + 1], first[row : row + 1, None] + 2, torch.arange(8))[0, 0]
        scores = [float(LOGITS.log_softmax(-1)[i] + g[token]) for i, token in enumerate(TOKEN_IDS.tolist())]
        assert int(tokens[row]) == int(TOKEN_IDS[scores.index(max(scores))])


def test_a_sampled_draft_shares_no_noise_with_the_target() -> None:
    """With equal laws, coupled drafts always equal the target's token; sampled ones only as often as independent draws:
    sum of law² = 0.3819 here, and 100,000 rows are within 0.01 of it except with chance 1e-10."""
    rows = 100_000
    seeds, positions, ids = torch.arange(rows), torch.full((rows,), 3), torch.arange(5)
    target_tokens = (LOGITS.log_softmax(-1) + noise.gumbel(seeds, positions[:, None], ids)[:, 0]).argmax(-1)
    for way, lowest, highest in (("coupled", 1.0, 1.0), ("sample", 0.3719, 0.3919)):
        pick = make_pick(way, Sampler(1.0), seeds, positions, 5)
        tokens, _ = pick(LOGITS.expand(rows, -1), 0, None)
        assert lowest <= float((tokens == target_tokens).double().mean()) <= highest


def test_an_unknown_way_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ValueError, match="unknown way of drafting 'samples'; did you mean 'sample'"):
        make_pick("samples", Sampler(1.0), torch.tensor([0]), torch.tensor([0]), 8)


def test_each_rule_has_its_way() -> None:
    assert (default_way("coupled"), default_way("ratio")) == ("coupled", "sample")
