"""How draft tokens are chosen: what is handed over is what they were drawn from, for one child of a node and for several.

Letters: B sequences, M nodes, k children, W draft vocabulary, V target vocabulary.
"""

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from draftsmith.drafters.base import Drawn
from draftsmith.inference import noise
from draftsmith.inference.drafting import DRAWN, default_way, drawn_by, make_pick, without_replacement
from draftsmith.inference.sampling import Sampler
from draftsmith.inference.verify import RULES

LOGITS = torch.tensor([1.0, -0.5, 0.3, 2.0, 0.0], dtype=torch.float64)
TOKEN_IDS = torch.tensor([1, 2, 4, 5, 7])  # a reduced vocabulary of five among eight target tokens


def one_node(rows: int) -> Tensor:
    """The same logits for one node of every row, (B, 1, W)."""
    return LOGITS.expand(rows, 1, -1)


# ---- one child ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sampler", [Sampler(0.7), Sampler(1.5, 3), Sampler(1.0, None, 0.8)], ids=["cold", "top-k", "top-p"]
)
@pytest.mark.parametrize("way", ["sample", "coupled"])
def test_sampled_and_coupled_drafts_follow_the_draft_s_law(tools: SimpleNamespace, way: str, sampler: Sampler) -> None:
    """200,000 rows with the same logits; chance of a false alarm below 1e-8 each."""
    rows = 200_000
    pick = make_pick(way, sampler, torch.arange(rows), torch.full((rows,), 9), 8)
    picked = pick(one_node(rows), 2, TOKEN_IDS, 1)
    law = torch.zeros(8, dtype=torch.float64)
    law[TOKEN_IDS] = sampler.log_probs(LOGITS).exp()
    assert picked.tokens_BMk.shape == (rows, 1, 1)
    assert tools.chi_square_p_value(torch.bincount(picked.tokens_BMk.flatten(), minlength=8), law) > 1e-8
    if way == "coupled":
        assert picked.probs_BMkV is None
    else:
        assert picked.probs_BMkV is not None
        torch.testing.assert_close(picked.probs_BMkV[0, 0, 0].double(), law, atol=1e-6, rtol=0)
        assert torch.equal(picked.probs_BMkV[0], picked.probs_BMkV[-1])


@pytest.mark.parametrize("way", DRAWN)
@pytest.mark.parametrize("token_ids", [None, TOKEN_IDS])
def test_at_temperature_zero_every_way_takes_the_most_likely_tokens(way: str, token_ids: Tensor | None) -> None:
    pick = make_pick(way, Sampler(0.0), torch.tensor([1, 2]), torch.tensor([4, 5]), 8)
    one, three = (pick(one_node(2), 0, token_ids, count) for count in (1, 3))
    first, second, third = (3, 0, 2) if token_ids is None else (5, 1, 4)
    assert one.tokens_BMk.tolist() == [[[first]]] * 2
    assert three.tokens_BMk.tolist() == [[[first, second, third]]] * 2
    assert one.probs_BMkV is None and three.probs_BMkV is None


def test_an_argmax_draft_is_fixed_by_the_context_whatever_the_temperature() -> None:
    for temperature in (0.5, 1.0, 3.0):
        pick = make_pick("argmax", Sampler(temperature), torch.tensor([1]), torch.tensor([4]), 5)
        picked = pick(one_node(1), 0, None, 2)
        assert pick.drawn == "fixed" and picked.tokens_BMk.tolist() == [[[3, 0]]] and picked.probs_BMkV is None


def test_a_coupled_draft_uses_the_target_s_noise_at_the_drafted_position_and_target_ids() -> None:
    seeds, first = torch.tensor([11, 12, 13]), torch.tensor([4, 9, 30])
    picked = make_pick("coupled", Sampler(1.0), seeds, first, 8)(one_node(3), 2, TOKEN_IDS, 1)
    for row in range(3):
        g = noise.gumbel(seeds[row : row + 1], first[row : row + 1, None] + 2, torch.arange(8))[0, 0]
        scores = [float(LOGITS.log_softmax(-1)[i] + g[token]) for i, token in enumerate(TOKEN_IDS.tolist())]
        assert int(picked.tokens_BMk[row]) == int(TOKEN_IDS[scores.index(max(scores))])


@pytest.mark.parametrize("position", [0, 3])
def test_a_sampled_draft_shares_no_noise_with_the_target(position: int) -> None:
    """With equal laws, coupled drafts always equal the target's token; sampled ones only as often as independent draws:
    sum of law² = 0.3819 here, and 100,000 rows are within 0.01 of it except with chance 1e-10. At position 0 both look at the same
    place, so that only the stream sets them apart."""
    rows = 100_000
    seeds, positions, ids = torch.arange(rows), torch.full((rows,), position), torch.arange(5)
    target_tokens = (LOGITS.log_softmax(-1) + noise.gumbel(seeds, positions[:, None], ids)[:, 0]).argmax(-1)
    for way, lowest, highest in (("coupled", 1.0, 1.0), ("sample", 0.3719, 0.3919)):
        tokens_B = make_pick(way, Sampler(1.0), seeds, positions, 5)(one_node(rows), 0, None, 1).tokens_BMk[:, 0, 0]
        assert lowest <= float((tokens_B == target_tokens).double().mean()) <= highest


# ---- siblings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", DRAWN)
@pytest.mark.parametrize("token_ids", [None, TOKEN_IDS])
def test_siblings_are_distinct_and_their_first_is_what_a_single_child_would_be(
    way: str, token_ids: Tensor | None
) -> None:
    torch.manual_seed(0)
    logits = torch.randn(200, 3, 5)
    pick = make_pick(way, Sampler(1.0), torch.arange(200), torch.arange(200), 8)
    for count in (2, 3, 5):
        picked, single = (pick(logits, 1, token_ids, k).tokens_BMk for k in (count, 1))
        assert picked.shape == (200, 3, count)
        ascending = picked.sort(-1).values
        assert bool((ascending[..., 1:] > ascending[..., :-1]).all())
        assert torch.equal(picked[..., :1], single)


@pytest.mark.parametrize("sampler", [Sampler(1.0), Sampler(0.7, 4)], ids=["all", "top-k"])
@pytest.mark.parametrize("way", ["sample", "coupled"])
def test_pairs_of_siblings_are_drawn_without_replacement(tools: SimpleNamespace, way: str, sampler: Sampler) -> None:
    """Ordered pairs of 200,000 rows: law of the first times law of the second without the first; chance of a false alarm below 1e-8
    each."""
    rows = 200_000
    pick = make_pick(way, sampler, torch.arange(rows), torch.full((rows,), 9), 8)
    tokens_Bk = pick(one_node(rows), 2, TOKEN_IDS, 2).tokens_BMk[:, 0]
    law = torch.zeros(8, dtype=torch.float64)
    law[TOKEN_IDS] = sampler.log_probs(LOGITS).exp()
    expected = torch.zeros(8, 8, dtype=torch.float64)
    for first, second in itertools.permutations(range(8), 2):
        expected[first, second] = law[first] * law[second] / (1 - law[first])
    counts = torch.bincount(tokens_Bk[:, 0] * 8 + tokens_Bk[:, 1], minlength=64)
    assert tools.chi_square_p_value(counts, expected) > 1e-8


def test_the_laws_handed_over_are_those_of_the_draws() -> None:
    """Each sibling's: the draft's law without the siblings before it, renormalised, at their target ids."""
    sampler, rows = Sampler(0.8), 300
    pick = make_pick("sample", sampler, torch.arange(rows), torch.full((rows,), 9), 8)
    picked = pick(one_node(rows), 0, TOKEN_IDS, 3)
    assert picked.probs_BMkV is not None and picked.probs_BMkV.shape == (rows, 1, 3, 8)
    law = sampler.log_probs(LOGITS).exp()
    for row in range(rows):
        left = dict(zip(TOKEN_IDS.tolist(), law.tolist(), strict=True))
        for rank in range(3):
            mass = sum(left.values())
            expected = torch.tensor([left.get(token, 0.0) / mass for token in range(8)], dtype=torch.float64)
            torch.testing.assert_close(picked.probs_BMkV[row, 0, rank].double(), expected, atol=1e-6, rtol=0)
            del left[int(picked.tokens_BMk[row, 0, rank])]


def test_where_no_token_is_left_the_law_handed_over_has_no_mass() -> None:
    """Two tokens pass top-k, four siblings are asked for: the last two are never accepted (test_verify.py)."""
    pick = make_pick("sample", Sampler(1.0, 2), torch.arange(50), torch.arange(50), 5)
    picked = pick(one_node(50), 0, None, 4)
    assert picked.probs_BMkV is not None
    masses = picked.probs_BMkV.sum(-1)[:, 0]
    torch.testing.assert_close(masses, torch.tensor([1.0, 1, 0, 0], dtype=masses.dtype).expand(50, 4))
    assert all({0, 3} == set(tokens[:2]) and len(set(tokens)) == 4 for tokens in picked.tokens_BMk[:, 0].tolist())
    assert not bool(picked.probs_BMkV.isnan().any())


def test_draws_without_replacement_on_a_law_worked_by_hand() -> None:
    laws = without_replacement(torch.tensor([[[0.5, 0.3, 0.2, 0.0]]]), torch.tensor([[[1, 0, 2, 3]]]))[0, 0]
    expected = torch.tensor([[0.5, 0.3, 0.2, 0], [5 / 7, 0, 2 / 7, 0], [0, 0, 1, 0], [0, 0, 0, 0]])
    torch.testing.assert_close(laws, expected)


def test_coupled_siblings_are_the_largest_perturbed_scores() -> None:
    """Two nodes of a depth share the noise of their children's position."""
    torch.manual_seed(0)
    seeds, first, logits = torch.tensor([11, 12, 13]), torch.tensor([4, 9, 30]), torch.randn(3, 2, 5)
    picked = make_pick("coupled", Sampler(0.9), seeds, first, 8)(logits, 2, TOKEN_IDS, 3)
    for row, node in itertools.product(range(3), range(2)):
        g = noise.gumbel(seeds[row : row + 1], first[row : row + 1, None] + 2, TOKEN_IDS)[0, 0].tolist()
        law = (logits[row, node] / 0.9).log_softmax(-1).tolist()
        order = sorted(range(5), key=lambda i: -(law[i] + g[i]))
        assert picked.tokens_BMk[row, node].tolist() == TOKEN_IDS[order[:3]].tolist()


@pytest.mark.parametrize("way", DRAWN)
@pytest.mark.parametrize("sampler", [Sampler(0.0), Sampler(1.0), Sampler(0.7, 2)], ids=["greedy", "all", "top-k"])
def test_scores_are_logs_of_chances_and_fall_from_sibling_to_sibling(way: str, sampler: Sampler) -> None:
    torch.manual_seed(0)
    pick = make_pick(way, sampler, torch.arange(40), torch.arange(40), 6)
    for count in (1, 4):
        scores = pick(torch.randn(40, 2, 6), 1, None, count).scores_BMk
        assert scores.shape == (40, 2, count) and not bool(scores.isnan().any())
        assert bool((scores <= 1e-6).all()) and bool((scores[..., 1:] <= scores[..., :-1]).all())
        assert float(scores.exp().sum(-1).max()) <= 1 + 1e-5


def test_the_score_of_an_argmax_draft_is_its_log_probability() -> None:
    picked = make_pick("argmax", Sampler(1.0), torch.tensor([1]), torch.tensor([4]), 5)(one_node(1), 0, None, 2)
    torch.testing.assert_close(picked.scores_BMk[0, 0], LOGITS.log_softmax(-1)[[3, 0]])


@pytest.mark.parametrize("way", DRAWN)
def test_what_a_row_gets_does_not_depend_on_the_batch(way: str) -> None:
    torch.manual_seed(0)
    logits, seeds, first = torch.randn(20, 2, 5), torch.randint(0, 1 << 40, (20,)), torch.arange(20)
    batch = make_pick(way, Sampler(1.0), seeds, first, 8)(logits, 1, TOKEN_IDS, 3)
    for row in range(20):
        one = slice(row, row + 1)
        alone = make_pick(way, Sampler(1.0), seeds[one], first[one], 8)(logits[one], 1, TOKEN_IDS, 3)
        assert torch.equal(alone.tokens_BMk[0], batch.tokens_BMk[row])
        torch.testing.assert_close(alone.scores_BMk[0], batch.scores_BMk[row])
        if batch.probs_BMkV is not None and alone.probs_BMkV is not None:
            torch.testing.assert_close(alone.probs_BMkV[0], batch.probs_BMkV[row])


# ---- names ----------------------------------------------------------------------------------------------------------


def test_an_unknown_way_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ValueError, match="unknown way of drafting 'samples'; did you mean 'sample'"):
        make_pick("samples", Sampler(1.0), torch.tensor([0]), torch.tensor([0]), 8)


@pytest.mark.parametrize(
    "rule, way, drawn",
    [
        ("coupled", "coupled", "coupled"), ("ratio", "sample", "sampled"), ("block", "sample", "sampled"),
        ("rrsw", "sample", "sampled"), ("point_mass", "argmax", "fixed"), ("typical", "argmax", "fixed"),
    ],
)  # fmt: skip
def test_each_rule_has_a_way_that_it_takes(rule: str, way: str, drawn: Drawn) -> None:
    assert default_way(rule) == way and drawn_by(way, greedy=False) == drawn and drawn in RULES[rule].drawn


def test_no_rule_is_left_out_above() -> None:
    assert all(drawn_by(default_way(name), greedy=False) in rule.drawn for name, rule in RULES.items())


def test_at_temperature_zero_a_sampled_draft_is_called_fixed() -> None:
    """It hands over no laws, and needs none."""
    assert {way: drawn_by(way, greedy=True) for way in DRAWN} == {
        "coupled": "coupled",
        "sample": "fixed",
        "argmax": "fixed",
    }
