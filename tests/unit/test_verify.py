"""The verification rules: exact enumeration without randomness, known wrong rules that it must catch, and hand-worked trees.

The enumeration: for every drafted sequence (its probability from the draft's law) the functions that the decode loop calls say how
likely each token is accepted and what law the next token has; what comes after is the target's own by induction. Summed up, the
joint law of the first N + 1 tokens must be the target's. Laws depend on all tokens before.

Letters: V vocabulary, N drafted tokens, B = V**N drafted sequences.
"""

import itertools
import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from draftsmith.drafters import tree
from draftsmith.drafters.base import Proposal
from draftsmith.inference import noise, verify
from draftsmith.inference.verify import Keys

Laws = dict[tuple[int, ...], Tensor]
"""A context-dependent law: prefix -> probabilities of the next token."""
Accept = Callable[[Proposal, Tensor, Tensor], Tensor]
Residual = Callable[[Tensor, Tensor], Tensor]


def random_laws(vocab: int, depth: int, seed: int, *, spread: float = 1.5, support: int | None = None) -> Laws:
    """A law per prefix of up to `depth` tokens; `support` leaves the tokens from there on without mass."""
    generator = torch.Generator().manual_seed(seed)
    laws = {}
    for length in range(depth + 1):
        for prefix in itertools.product(range(vocab), repeat=length):
            logits = spread * torch.randn(vocab, generator=generator, dtype=torch.float64)
            if support is not None:
                logits[support:] = -math.inf
            laws[prefix] = logits.softmax(-1)
    return laws


def point_mass(laws: Laws) -> Laws:
    return {prefix: torch.nn.functional.one_hot(law.argmax(), len(law)).double() for prefix, law in laws.items()}


def output_law(
    target: Laws, drawn_from: Laws, handed_over: Laws, depth: int, accept: Accept, residual: Residual
) -> Tensor:
    """Joint law of the first `depth` + 1 tokens, as a tensor with that many dimensions of size V."""
    vocab = len(target[()])
    drafts = list(itertools.product(range(vocab), repeat=depth))
    proposal = Proposal(torch.tensor(drafts), tree.chain(depth))
    target_probs = torch.stack([torch.stack([target[d[:i]] for i in range(depth + 1)]) for d in drafts])
    draft_probs = torch.stack([torch.stack([handed_over[d[:i]] for i in range(depth)]) for d in drafts])
    accept_BN = accept(proposal, target_probs, draft_probs)
    residual_BRV = residual(target_probs, draft_probs)
    out = torch.zeros([vocab] * (depth + 1), dtype=torch.float64)
    for b, draft in enumerate(drafts):
        weight = math.prod(float(drawn_from[draft[:i]][draft[i]]) for i in range(depth))
        for accepted in range(depth + 1):
            chance = weight * math.prod(float(accept_BN[b, i]) for i in range(accepted))
            chance *= 1 - float(accept_BN[b, accepted]) if accepted < depth else 1
            if chance > 0:
                for token in range(vocab):
                    add_continuations(
                        out, (*draft[:accepted], token), chance * float(residual_BRV[b, accepted, token]), target
                    )
    return out


def add_continuations(out: Tensor, prefix: tuple[int, ...], chance: float, target: Laws) -> None:
    if len(prefix) == out.dim():
        out[prefix] += chance
        return
    for token, probability in enumerate(target[prefix].tolist()):
        add_continuations(out, (*prefix, token), chance * probability, target)


def target_law(target: Laws, depth: int) -> Tensor:
    out = torch.zeros([len(target[()])] * (depth + 1), dtype=torch.float64)
    add_continuations(out, (), 1.0, target)
    return out


def total_variation(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().sum() / 2)


SHAPES = [(2, 1), (3, 2), (4, 3)]


@pytest.mark.parametrize("vocab, depth", SHAPES)
@pytest.mark.parametrize("draft", ["sampled", "point mass", "reduced vocabulary", "equal to the target", "opposite"])
def test_the_ratio_rule_s_output_law_is_the_target_s(vocab: int, depth: int, draft: str) -> None:
    target = random_laws(vocab, depth, seed=1)
    other = random_laws(vocab, depth, seed=2)
    drafts = {
        "sampled": other,
        "point mass": point_mass(other),
        "reduced vocabulary": random_laws(vocab, depth, seed=2, support=vocab - 1),
        "equal to the target": target,
        "opposite": {prefix: (1 - law) / (vocab - 1) for prefix, law in target.items()},
    }[draft]
    law = output_law(target, drafts, drafts, depth, verify.accept_probability, verify.residual)
    torch.testing.assert_close(law, target_law(target, depth), atol=1e-12, rtol=0)


@pytest.mark.parametrize("vocab, depth", SHAPES)
def test_the_ratio_rule_is_exact_where_the_target_has_tokens_without_mass(vocab: int, depth: int) -> None:
    """As behind top-k or top-p: a drafted token that the target cannot emit is never accepted."""
    target = random_laws(vocab, depth, seed=3, support=max(1, vocab - 2))
    draft = random_laws(vocab, depth, seed=4)
    law = output_law(target, draft, draft, depth, verify.accept_probability, verify.residual)
    torch.testing.assert_close(law, target_law(target, depth), atol=1e-12, rtol=0)


def wrong_residual_target(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    return target_probs


def wrong_residual_reversed(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    difference = (draft_probs - target_probs[:, :-1]).clamp_min(0) + 1e-300
    return torch.cat([difference / difference.sum(-1, keepdim=True), target_probs[:, -1:]], 1)


def wrong_residual_not_normalised(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """What is missing to mass one goes to the last token, as a cumulative draw that walks off its end does."""
    difference = (target_probs[:, :-1] - draft_probs).clamp_min(0)
    difference[..., -1] += 1 - difference.sum(-1)
    return torch.cat([difference, target_probs[:, -1:]], 1)


def wrong_accept_lenient(proposal: Proposal, target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    return (1.5 * verify.accept_probability(proposal, target_probs, draft_probs)).clamp_max(1)


def wrong_accept_by_target_alone(proposal: Proposal, target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    return target_probs[:, :-1].gather(-1, proposal.tokens_BN[..., None])[..., 0]


def hotter(laws: Laws) -> Laws:
    return {prefix: (law.log() / 1.5).softmax(-1) for prefix, law in laws.items()}


WRONG_RULES: dict[str, tuple[Accept, Residual, Callable[[Laws], Laws], Callable[[Laws], Laws], float]] = {
    # name: accept, residual, law drawn from, law handed over, and a distance that it certainly has from the target's law
    "resample from the target": (verify.accept_probability, wrong_residual_target, dict, dict, 0.1),
    "residual reversed": (verify.accept_probability, wrong_residual_reversed, dict, dict, 0.3),
    "residual not normalised": (verify.accept_probability, wrong_residual_not_normalised, dict, dict, 0.05),
    "argmax draft, raw law": (verify.accept_probability, verify.residual, point_mass, dict, 0.2),
    "law of another temperature": (verify.accept_probability, verify.residual, dict, hotter, 0.02),
    "lenient acceptance": (wrong_accept_lenient, verify.residual, dict, dict, 0.05),
    "accepted by the target's probability alone": (wrong_accept_by_target_alone, verify.residual, dict, dict, 0.1),
}


@pytest.mark.parametrize("name", WRONG_RULES)
def test_the_enumeration_catches_a_known_wrong_rule(name: str) -> None:
    accept, residual, drawn, handed, distance = WRONG_RULES[name]
    target, draft = random_laws(4, 2, seed=1), random_laws(4, 2, seed=2)
    law = output_law(target, drawn(draft), handed(draft), 2, accept, residual)
    assert float(law.sum()) == pytest.approx(1)
    assert total_variation(law, target_law(target, 2)) > distance


@pytest.mark.parametrize("with_probs", [True, False])
def test_the_ratio_rule_is_a_naive_loop_over_its_functions_and_its_own_noise(with_probs: bool) -> None:
    """500 rows, context-dependent laws; every decision taken again in plain Python, with strict '<' on the coin."""
    torch.manual_seed(0)
    rows, depth, vocab = 500, 3, 5
    target = (2 * torch.randn(rows, depth + 1, vocab, dtype=torch.float64)).log_softmax(-1)
    draft_probs = (2 * torch.randn(rows, depth, vocab)).softmax(-1)
    tokens = torch.distributions.Categorical(draft_probs).sample()
    positions = torch.arange(10, 14) + torch.arange(rows)[:, None]
    proposal = Proposal(tokens, tree.chain(depth), draft_probs if with_probs else None)
    verdict = verify.ratio(proposal, target, Keys(torch.arange(rows), positions, False))
    seen = set()
    for row in range(rows):
        seed, accepted, next_law = torch.tensor([row]), 0, target[row, depth].exp()
        for i in range(depth):
            token, q = int(tokens[row, i]), draft_probs[row, i].double()
            q = q if with_probs else torch.nn.functional.one_hot(tokens[row, i], vocab).double()
            p = target[row, i].exp()
            coin = float(noise.coins(seed, positions[row : row + 1, i : i + 1], noise.ACCEPT))
            if not coin < float(p[token] / q[token]):
                positive = (p - q).clamp_min(0)
                next_law = positive / positive.sum()
                break
            accepted += 1
        g = noise.gumbel(seed, positions[row : row + 1, accepted : accepted + 1], torch.arange(vocab), noise.RESIDUAL)
        token = int((next_law.log() + g[0, 0]).argmax())
        assert int(verdict.num_accepted_B[row]) == accepted
        assert verdict.emitted_BP[row, : accepted + 1].tolist() == [*tokens[row, :accepted].tolist(), token]
        assert verdict.rows_BP[row].tolist() == [min(i, accepted) for i in range(depth + 1)]
        seen.add(accepted)
    assert seen == {0, 1, 2, 3}


def test_the_ratio_rule_at_temperature_zero_is_greedy() -> None:
    choice = torch.tensor([[3, 1, 2], [3, 1, 2], [3, 1, 2]])
    log_probs = torch.full((3, 3, 5), -math.inf).scatter(-1, choice[..., None], 0.0)
    proposal = Proposal(torch.tensor([[3, 1], [3, 0], [0, 1]]), tree.chain(2))
    verdict = verify.ratio(proposal, log_probs, Keys(torch.arange(3), torch.arange(3).expand(3, 3), True))
    assert verdict.num_accepted_B.tolist() == [2, 1, 0]
    assert [row[: a + 1] for row, a in zip(verdict.emitted_BP.tolist(), [2, 1, 0], strict=True)] == [
        [3, 1, 2],
        [3, 1],
        [3],
    ]


@pytest.mark.parametrize("with_probs", [True, False])
def test_the_ratio_rule_never_accepts_a_token_without_target_mass(with_probs: bool) -> None:
    rows = 20_000
    log_probs = torch.tensor([-math.inf, 0.0]).expand(rows, 2, 2)
    probs = torch.tensor([1.0, 0.0]).expand(rows, 1, 2) if with_probs else None
    proposal = Proposal(torch.zeros(rows, 1, dtype=torch.int64), (-1,), probs)
    verdict = verify.ratio(proposal, log_probs, Keys(torch.arange(rows), torch.tensor([[5, 6]]).expand(rows, 2), False))
    assert int(verdict.num_accepted_B.sum()) == 0
    assert bool((verdict.emitted_BP[:, 0] == 1).all())


def test_equal_laws_are_always_accepted() -> None:
    torch.manual_seed(0)
    log_probs = torch.randn(2000, 3, 50).log_softmax(-1)
    probs = log_probs[:, :2].exp()
    tokens = torch.distributions.Categorical(probs).sample()
    keys = Keys(torch.arange(2000), torch.arange(3).expand(2000, 3), False)
    verdict = verify.ratio(Proposal(tokens, tree.chain(2), probs), log_probs, keys)
    assert bool((verdict.num_accepted_B == 2).all())


def test_where_rounding_leaves_no_positive_part_the_target_s_law_is_used() -> None:
    target = torch.tensor([[[0.5, 0.5], [0.1, 0.9]]])
    law = verify.residual(target, torch.tensor([[[0.5, 0.5]]]))
    assert torch.equal(law, target)


def test_the_ratio_rule_refuses_a_tree() -> None:
    proposal = Proposal(torch.zeros(1, 2, dtype=torch.int64), (-1, -1))
    with pytest.raises(ValueError, match="verifies chains only; use the rule 'coupled' for a tree"):
        verify.ratio(proposal, torch.zeros(1, 3, 4), Keys(torch.zeros(1), torch.zeros(1, 3), False))


# ---- coupled ------------------------------------------------------------------------------------------------------

PARENTS = (-1, -1, 0, 0, 1, 4)  # drawn in test_tree.py
TREE_TOKENS = [10, 11, 12, 13, 14, 15]


@pytest.mark.parametrize(
    "choice, rows, emitted",
    [
        # target's token at the root and at nodes 0 to 5      accepted path as rows      tokens
        ([99, 0, 0, 0, 0, 0, 0], [0], [99]),  # no child of the root
        ([10, 99, 14, 0, 0, 0, 0], [0, 1], [10, 99]),  # node 0, none of its children
        ([10, 13, 14, 1, 77, 0, 0], [0, 1, 4], [10, 13, 77]),  # node 0, then its second child, node 3
        ([10, 12, 14, 66, 77, 0, 0], [0, 1, 3], [10, 12, 66]),  # node 0, then its first child, node 2
        ([11, 12, 14, 0, 0, 15, 55], [0, 2, 5, 6], [11, 14, 15, 55]),  # the whole branch of node 1
        ([11, 12, 10, 0, 0, 15, 55], [0, 2], [11, 10]),  # node 5 would match, but not its parent node 4
        ([99, 12, 14, 0, 0, 15, 55], [0], [99]),  # everything below matches, but not at the root
        ([10, 14, 0, 0, 0, 15, 55], [0, 1], [10, 14]),  # 14 is drafted, but under node 1
    ],
)
def test_coupled_follows_the_path_whose_nodes_equal_the_target_s_tokens(
    choice: list[int], rows: list[int], emitted: list[int]
) -> None:
    proposal = Proposal(torch.tensor([TREE_TOKENS]), PARENTS)
    verdict = verify.follow(proposal, torch.tensor([choice]))
    accepted = len(rows) - 1
    assert verdict.num_accepted_B.tolist() == [accepted]
    assert verdict.rows_BP.tolist() == [rows + rows[-1:] * (4 - len(rows))]
    assert verdict.emitted_BP[0, : accepted + 1].tolist() == emitted


def test_rows_of_a_batch_take_paths_of_their_own() -> None:
    proposal = Proposal(torch.tensor([TREE_TOKENS, TREE_TOKENS]), PARENTS)
    choice = torch.tensor([[11, 12, 14, 0, 0, 15, 55], [99, 0, 0, 0, 0, 0, 0]])
    verdict = verify.follow(proposal, choice)
    assert verdict.num_accepted_B.tolist() == [3, 0]
    assert verdict.rows_BP.tolist() == [[0, 2, 5, 6], [0, 0, 0, 0]]


def test_what_coupled_emits_does_not_depend_on_the_draft() -> None:
    """The first token under 200 different drafts: one and the same draw."""
    torch.manual_seed(0)
    log_probs = torch.randn(1, 7, 20, dtype=torch.float64).log_softmax(-1)
    keys = Keys(torch.tensor([5]), 8 + torch.tensor([tree.depths(PARENTS)]), False)
    firsts, lengths = set(), set()
    for _ in range(200):
        verdict = verify.coupled(Proposal(torch.randint(0, 20, (1, 6)), PARENTS), log_probs, keys)
        firsts.add(int(verdict.emitted_BP[0, 0]))
        lengths.add(int(verdict.num_accepted_B))
    assert len(firsts) == 1 and len(lengths) > 1


def test_emit_draws_from_the_target_s_law(tools: SimpleNamespace) -> None:
    """200,000 seeds at two positions: the joint law is the product; chance of a false alarm below 1e-8."""
    rows = 200_000
    law = torch.tensor([0.5, 0.2, 0.2, 0.1, 0.0], dtype=torch.float64)
    keys = Keys(torch.arange(rows), torch.tensor([[4, 5]]).expand(rows, 2), False)
    tokens = verify.emit(law.log().expand(rows, 2, 5), keys)
    pairs = torch.bincount(tokens[:, 0] * 5 + tokens[:, 1], minlength=25)
    assert tools.chi_square_p_value(pairs, torch.outer(law, law)) > 1e-8


def test_emit_without_noise_is_the_argmax() -> None:
    keys = Keys(torch.tensor([0]), torch.tensor([[4, 5]]), True)
    assert verify.emit(torch.tensor([[[0.0, 2.0, 1.0], [3.0, 0.0, 3.0]]]), keys).tolist() == [[1, 0]]


def test_every_rule_says_whether_it_is_lossless() -> None:
    assert set(verify.LOSSLESS) == set(verify.RULES)
