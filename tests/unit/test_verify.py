"""The verification rules on hand-worked trees, against naive loops over their own noise, and what they refuse. That their law is
the target's is proved in test_enumeration.py, and through the decode loop in test_output_law.py.

Letters: B sequences, N drafted nodes, R = N + 1 rows, V vocabulary.
"""

import itertools
import math
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from torch import Tensor

from draftsmith.drafters.base import Drawn, Proposal
from draftsmith.drafters.tree import Dynamic, Fixed, Plan, Tree, chain, fixed
from draftsmith.inference import noise, verify
from draftsmith.inference.drafting import DRAWN, drawn_by, make_pick
from draftsmith.inference.sampling import Sampler
from draftsmith.inference.speculation import Speculation
from draftsmith.inference.verify import RULES, Keys, Verdict

PARENTS = (-1, -1, 0, 0, 1, 4)  # drawn in test_tree.py
TREE_TOKENS = [10, 11, 12, 13, 14, 15]
LOSSLESS = [name for name, rule in RULES.items() if rule.lossless]


def chance(rows: int, tree: Tree, root: int = 5, greedy: bool = False) -> Keys:
    """Seeds 0, 1, 2, …, the root's law about position `root`."""
    return Keys(torch.arange(rows), (root + tree.depth_bR).expand(rows, -1), greedy)


# ---- coupled --------------------------------------------------------------------------------------------------------


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
    proposal = Proposal(torch.tensor([TREE_TOKENS]), fixed(PARENTS), "fixed")
    verdict = verify.follow(proposal, torch.tensor([choice]))
    accepted = len(rows) - 1
    assert verdict.num_accepted_B.tolist() == [accepted]
    assert verdict.rows_BP.tolist() == [rows + rows[-1:] * (4 - len(rows))]
    assert verdict.emitted_BP[0, : accepted + 1].tolist() == emitted


def test_rows_of_a_batch_take_paths_of_their_own() -> None:
    proposal = Proposal(torch.tensor([TREE_TOKENS, TREE_TOKENS]), fixed(PARENTS), "fixed")
    choice = torch.tensor([[11, 12, 14, 0, 0, 15, 55], [99, 0, 0, 0, 0, 0, 0]])
    verdict = verify.follow(proposal, choice)
    assert verdict.num_accepted_B.tolist() == [3, 0]
    assert verdict.rows_BP.tolist() == [[0, 2, 5, 6], [0, 0, 0, 0]]


def test_what_coupled_emits_does_not_depend_on_the_draft() -> None:
    """The first token under 200 different drafts: one and the same draw."""
    torch.manual_seed(0)
    log_probs = torch.randn(1, 7, 20, dtype=torch.float64).log_softmax(-1)
    tree, firsts, lengths = fixed(PARENTS), set(), set()
    for _ in range(200):
        proposal = Proposal(torch.randint(0, 20, (1, 6)), tree, "fixed")
        verdict = verify.verify("coupled", proposal, log_probs, chance(1, tree))
        firsts.add(int(verdict.emitted_BP[0, 0]))
        lengths.add(int(verdict.num_accepted_B))
    assert len(firsts) == 1 and len(lengths) > 1


# ---- chance ---------------------------------------------------------------------------------------------------------


def test_emit_draws_from_the_target_s_law(tools: SimpleNamespace) -> None:
    """200,000 seeds at two positions: the joint law is the product; chance of a false alarm below 1e-8."""
    rows = 200_000
    law = torch.tensor([0.5, 0.2, 0.2, 0.1, 0.0], dtype=torch.float64)
    tokens = chance(rows, fixed((-1,))).emit(law.log().expand(rows, 2, 5))
    pairs = torch.bincount(tokens[:, 0] * 5 + tokens[:, 1], minlength=25)
    assert tools.chi_square_p_value(pairs, torch.outer(law, law)) > 1e-8


def test_emit_without_noise_is_the_argmax() -> None:
    keys = Keys(torch.tensor([0]), torch.tensor([[4, 5]]), True)
    assert keys.emit(torch.tensor([[[0.0, 2.0, 1.0], [3.0, 0.0, 3.0]]])).tolist() == [[1, 0]]


def test_coins_and_the_drawn_token_are_independent_of_each_other_and_of_other_rounds(tools: SimpleNamespace) -> None:
    """Two coins and the token of a round, and the same of the next position's round: 400,000 seeds, 256 joint outcomes; chance of
    a false alarm below 1e-8."""
    rows, law = 200_000, torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    half = torch.full((rows,), 0.5, dtype=torch.float64)
    cell, expected = torch.zeros(rows, dtype=torch.int64), torch.ones(1, dtype=torch.float64)
    for root in (7, 8):
        keys = chance(rows, fixed((-1, 0)), root)
        for use in (0, 1):
            cell = cell * 2 + keys.accept(half, use)
            expected = torch.outer(expected, torch.tensor([0.5, 0.5], dtype=torch.float64)).flatten()
        cell = cell * 4 + keys.draw(law.expand(rows, 4))
        expected = torch.outer(expected, law).flatten()
    assert tools.chi_square_p_value(torch.bincount(cell, minlength=256), expected) > 1e-8


def test_a_coin_at_its_smallest_still_rejects_what_has_no_probability(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strict '<': in EAGLE and transformers a coin of 0 accepts a token of probability 0."""
    monkeypatch.setattr(noise, "coins", lambda seeds_B, positions_BR, stream: torch.zeros(positions_BR.shape))
    keys = chance(2, fixed((-1,)))
    assert keys.accept(torch.tensor([0.0, 1e-30]), 0).tolist() == [False, True]


@pytest.mark.parametrize(
    "rule, drawn",
    [(name, drawn) for name in LOSSLESS for drawn in ("sampled", "fixed") if drawn in RULES[name].drawn],
)
def test_a_token_without_target_mass_is_never_accepted(
    monkeypatch: pytest.MonkeyPatch, rule: str, drawn: Drawn
) -> None:
    monkeypatch.setattr(noise, "coins", lambda seeds_B, positions_BR, stream: torch.zeros(positions_BR.shape))
    tree, rows = fixed((-1,)), 2000
    log_probs = torch.tensor([-math.inf, 0.0]).expand(rows, 2, 2)
    probs = torch.tensor([1.0, 0.0]).expand(rows, 1, 2) if drawn == "sampled" else None
    proposal = Proposal(torch.zeros(rows, 1, dtype=torch.int64), tree, drawn, probs)
    verdict = verify.verify(rule, proposal, log_probs, chance(rows, tree))
    assert int(verdict.num_accepted_B.sum()) == 0
    assert bool((verdict.emitted_BP[:, 0] == 1).all())


# ---- the rules that try tokens in turn, and block -------------------------------------------------------------------


def laws_and_draft(
    rows: int, parents: tuple[int, ...], vocab: int, drawn: Drawn, seed: int = 0
) -> tuple[Tensor, Proposal]:
    """Random target laws as logs, fp64, and a proposal whose siblings are drawn one after the other or the first tokens."""
    torch.manual_seed(seed)
    target = (2 * torch.randn(rows, len(parents) + 1, vocab, dtype=torch.float64)).log_softmax(-1)
    law_BRV = (1.5 * torch.randn(rows, len(parents) + 1, vocab)).softmax(-1)
    tokens_BN = torch.zeros(rows, len(parents), dtype=torch.int64)
    probs_BNV = torch.zeros(rows, len(parents), vocab)
    for node, parent in enumerate(parents):
        siblings = [other for other in range(node) if parents[other] == parent]
        left_BV = law_BRV[:, parent + 1].scatter(1, tokens_BN[:, siblings], 0.0)
        probs_BNV[:, node] = left_BV / left_BV.sum(1, keepdim=True)
        tokens_BN[:, node] = torch.multinomial(left_BV, 1)[:, 0] if drawn == "sampled" else left_BV.argmax(1)
    return target, Proposal(tokens_BN, fixed(parents), drawn, probs_BNV if drawn == "sampled" else None)


def coin(row: int, root: int, use: int) -> float:
    return float(noise.coins(torch.tensor([row]), noise.private(torch.tensor([[root]]), use), noise.ACCEPT))


def drawn_token(row: int, root: int, law: list[float]) -> int:
    place = noise.private(torch.tensor([[root]]), 0)
    g = noise.gumbel(torch.tensor([row]), place, torch.arange(len(law)), noise.RESIDUAL)[0, 0].double().tolist()
    scores = [math.log(mass) + g[token] if mass > 0 else -math.inf for token, mass in enumerate(law)]
    return scores.index(max(scores))


def handed_law(proposal: Proposal, row: int, node: int, vocab: int) -> list[float]:
    if proposal.probs_BNV is not None:
        return proposal.probs_BNV[row, node].double().tolist()
    return [float(token == int(proposal.tokens_BN[row, node])) for token in range(vocab)]


def left_over(weight: float, p: list[float], q: list[float]) -> tuple[float, list[float]]:
    """Mass of the positive part of weight p - q, and the part itself, normalised."""
    positive = [max(weight * a - b, 0.0) for a, b in zip(p, q, strict=True)]
    total = sum(positive)
    return total, [a / total for a in positive] if total else p


@pytest.mark.parametrize(
    "rule, drawn, parents",
    [
        ("ratio", "sampled", chain(3).parents),
        ("ratio", "fixed", chain(3).parents),
        ("rrsw", "sampled", PARENTS),
        ("point_mass", "fixed", PARENTS),
        ("rrsw", "sampled", (-1, 0, -1, 1, 0, -1)),  # not depth by depth
    ],
)
def test_trying_in_turn_is_a_naive_recursion_over_its_own_coins(
    rule: str, drawn: Drawn, parents: tuple[int, ...]
) -> None:
    """400 rows, every decision taken again in plain Python from the same coins and the same residual noise."""
    rows, vocab, root = 400, 6, 10
    target, proposal = laws_and_draft(rows, parents, vocab, drawn)
    verdict = verify.verify(rule, proposal, target, chance(rows, proposal.tree, root))
    seen = set()
    for row in range(rows):
        here, path, law = -1, [0], target[row, 0].exp().tolist()
        while True:
            accepted = None
            for node in [node for node, parent in enumerate(parents) if parent == here]:
                token, q = int(proposal.tokens_BN[row, node]), handed_law(proposal, row, node, vocab)
                if coin(row, root, node) < law[token] / q[token]:
                    accepted = node
                    break
                law = left_over(1.0, law, q)[1]
            if accepted is None:
                break
            here, law = accepted, target[row, accepted + 1].exp().tolist()
            path.append(accepted + 1)
        tokens = [*(int(proposal.tokens_BN[row, r - 1]) for r in path[1:]), drawn_token(row, root, law)]
        assert int(verdict.num_accepted_B[row]) == len(path) - 1
        assert verdict.rows_BP[row].tolist() == path + path[-1:] * (proposal.tree.depth + 1 - len(path))
        assert verdict.emitted_BP[row, : len(path)].tolist() == tokens
        seen.add(tuple(path))
    assert len(seen) == len(parents) + 1  # every node was an end, and so was the root


@pytest.mark.parametrize("drawn", ["sampled", "fixed"])
def test_block_is_the_paper_s_formula_over_its_own_coins(drawn: Drawn) -> None:
    """Sun et al.: P_i = min(1, P_{i-1} p/q), h_i = S_i / (S_i + 1 - P_i), the longest prefix with a coin below h_i; in plain
    Python, 400 rows."""
    rows, depth, vocab, root = 400, 3, 5, 10
    target, proposal = laws_and_draft(rows, chain(depth).parents, vocab, drawn)
    verdict = verify.verify("block", proposal, target, chance(rows, proposal.tree, root))
    seen = set()
    for row in range(rows):
        weight, accepted = 1.0, 0
        q = [handed_law(proposal, row, i, vocab) for i in range(depth)]
        p = [target[row, i].exp().tolist() for i in range(depth + 1)]
        weights = [1.0]
        for i in range(1, depth + 1):
            token = int(proposal.tokens_BN[row, i - 1])
            weight = min(1.0, weight * p[i - 1][token] / q[i - 1][token])
            weights.append(weight)
            mass = left_over(weight, p[i], q[i])[0] if i < depth else 0.0
            h = weight if i == depth else mass / (mass + 1 - weight) if mass else 0.0
            if coin(row, root, i) < h:
                accepted = i
        law = p[depth] if accepted == depth else left_over(weights[accepted], p[accepted], q[accepted])[1]
        assert int(verdict.num_accepted_B[row]) == accepted
        tokens = [*proposal.tokens_BN[row, :accepted].tolist(), drawn_token(row, root, law)]
        assert verdict.emitted_BP[row, : accepted + 1].tolist() == tokens
        assert verdict.rows_BP[row].tolist() == [min(i, accepted) for i in range(depth + 1)]
        seen.add(accepted)
    assert seen == {0, 1, 2, 3}


@pytest.mark.parametrize("rule", LOSSLESS)
def test_at_temperature_zero_every_lossless_rule_is_greedy(rule: str) -> None:
    choice = torch.tensor([[3, 1, 2], [3, 1, 2], [3, 1, 2]])
    log_probs = torch.full((3, 3, 5), -math.inf).scatter(-1, choice[..., None], 0.0)
    proposal = Proposal(torch.tensor([[3, 1], [3, 0], [0, 1]]), fixed((-1, 0)), "fixed")
    verdict = verify.verify(rule, proposal, log_probs, chance(3, proposal.tree, greedy=True))
    assert verdict.num_accepted_B.tolist() == [2, 1, 0]
    emitted = [row[: a + 1] for row, a in zip(verdict.emitted_BP.tolist(), [2, 1, 0], strict=True)]
    assert emitted == [[3, 1, 2], [3, 1], [3]]


@pytest.mark.parametrize("rule", [name for name in LOSSLESS if RULES[name].trees])
def test_at_temperature_zero_a_tree_follows_its_greedy_path(rule: str) -> None:
    choice = torch.tensor([[11, 12, 14, 0, 0, 15, 5], [10, 13, 14, 1, 7, 0, 0]])
    log_probs = torch.full((2, 7, 16), -math.inf).scatter(-1, choice[..., None], 0.0)
    proposal = Proposal(torch.tensor([TREE_TOKENS, TREE_TOKENS]), fixed(PARENTS), "fixed")
    verdict = verify.verify(rule, proposal, log_probs, chance(2, proposal.tree, greedy=True))
    assert verdict.rows_BP.tolist() == [[0, 2, 5, 6], [0, 1, 4, 4]]
    assert verdict.emitted_BP[0].tolist() == [11, 14, 15, 5]
    assert verdict.emitted_BP[1, :3].tolist() == [10, 13, 7]


@pytest.mark.parametrize("rule", ["ratio", "block", "rrsw"])
def test_equal_laws_are_always_accepted(rule: str) -> None:
    torch.manual_seed(0)
    log_probs = torch.randn(2000, 3, 50).log_softmax(-1)
    probs = log_probs[:, :2].exp()
    tokens = torch.distributions.Categorical(probs).sample()
    proposal = Proposal(tokens, fixed((-1, 0)), "sampled", probs)
    verdict = verify.verify(rule, proposal, log_probs, chance(2000, proposal.tree))
    assert bool((verdict.num_accepted_B == 2).all())


def test_where_rounding_leaves_no_positive_part_the_target_s_law_is_used() -> None:
    target = torch.tensor([[0.5, 0.5], [0.1, 0.9]])
    assert torch.equal(verify.residual(target, target), target)
    chance_B, law_BV = verify.block_step(torch.ones(2), target, target)
    assert torch.equal(law_BV, target) and chance_B.tolist() == [0, 0]


def test_a_law_without_mass_is_never_accepted_and_leaves_the_target_s() -> None:
    """What a sibling has for which the draft had no token left."""
    target, none = torch.tensor([[0.25, 0.75]]), torch.zeros(1, 2)
    assert verify.accept_probability(torch.tensor([1]), target, none).tolist() == [0]
    assert torch.equal(verify.residual(target, none), target)


# ---- typical --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "law, token, accepted",
    [
        ([0.5, 0.3, 0.15, 0.05], 2, True),  # entropy 1.142: .3 exp(-1.142) = .0957, so the threshold is .09
        ([0.5, 0.3, 0.15, 0.05], 3, False),
        ([0.1] * 10, 7, True),  # flat: .3 / 10 = .03
        ([0.904, 0.096], 1, True),  # entropy .316: the threshold is .09 again
        ([0.92, 0.08], 1, False),
        ([0.0301] * 33 + [0.0067], 33, False),  # entropy about log 33: the threshold is about .009
    ],
)
def test_typical_accepts_what_is_above_the_threshold_for_its_entropy(
    law: list[float], token: int, accepted: bool
) -> None:
    log_probs = torch.tensor([law, law], dtype=torch.float64).log()[None]
    proposal = Proposal(torch.tensor([[token]]), fixed((-1,)), "fixed")
    verdict = verify.verify("typical", proposal, log_probs, chance(1, proposal.tree))
    assert bool(verdict.num_accepted_B[0]) == accepted


# ---- batches --------------------------------------------------------------------------------------------------------


def agree(row: int, batch: Verdict, alone: Verdict) -> bool:
    accepted = int(alone.num_accepted_B)
    return (
        int(batch.num_accepted_B[row]) == accepted
        and torch.equal(batch.rows_BP[row, : accepted + 1], alone.rows_BP[0, : accepted + 1])
        and torch.equal(batch.emitted_BP[row, : accepted + 1], alone.emitted_BP[0, : accepted + 1])
    )


@pytest.mark.parametrize(
    "rule, way, plan",
    [
        (rule, way, plan)
        for rule, way, plan in itertools.product(RULES, DRAWN, [chain(3), Fixed(PARENTS), Dynamic(6, 3, 3)])
        if DRAWN[way] in RULES[rule].drawn
        and (RULES[rule].trees or plan.is_chain)
        and not (way == "sample" and isinstance(plan, Dynamic))
    ],
)
def test_what_a_rule_decides_for_a_row_does_not_depend_on_the_batch(
    stubs: SimpleNamespace, rule: str, way: str, plan: Plan
) -> None:
    """Rows with places and seeds of their own; of dynamic trees each row has a shape of its own too."""
    torch.manual_seed(3)
    rows, vocab, sampler = 60, 8, Sampler(1.0)
    drafter, roots_B = stubs.Table(torch.randn(vocab, vocab)), torch.randint(0, vocab, (rows,))
    seeds_B, first_B = torch.randint(0, 1 << 40, (rows,)), torch.randint(1, 200, (rows,))
    pick = make_pick(way, sampler, seeds_B, first_B, vocab)
    proposal = drafter.propose(SimpleNamespace(root_B=roots_B), plan, pick)
    tree = proposal.tree
    logits = torch.randn(rows, tree.num_nodes + 1, vocab)
    for row, node in itertools.product(range(rows), range(tree.num_nodes)):  # some drafts should be accepted
        logits[row, tree.up_bR[row % len(tree.up_bR), node + 1], proposal.tokens_BN[row, node]] += 1
    log_probs = logits.log_softmax(-1)
    batch = verify.verify(rule, proposal, log_probs, Keys(seeds_B, first_B[:, None] + tree.depth_bR, False))
    assert len(set(batch.num_accepted_B.tolist())) > 1
    for row in range(rows):
        one = slice(row, row + 1)
        parents_bN = tree.parents_bN[one] if len(tree.parents_bN) > 1 else tree.parents_bN
        tree_alone = Tree(parents_bN, tree.depth, tree.is_chain)
        probs_BNV = None if proposal.probs_BNV is None else proposal.probs_BNV[one]
        proposal_alone = Proposal(proposal.tokens_BN[one], tree_alone, proposal.drawn, probs_BNV)
        keys = Keys(seeds_B[one], first_B[one, None] + tree_alone.depth_bR, False)
        assert agree(row, batch, verify.verify(rule, proposal_alone, log_probs[one], keys))


@pytest.mark.parametrize("rule", [name for name in RULES if RULES[name].trees])
def test_rows_with_shapes_of_their_own_are_decided_as_alone(rule: str) -> None:
    """Three shapes of six nodes side by side, one of them a chain."""
    shapes, rows, vocab = [PARENTS, (-1, 0, 1, 1, -1, 4), chain(6).parents], 300, 6
    torch.manual_seed(1)
    log_probs = (2 * torch.randn(rows, 7, vocab, dtype=torch.float64)).log_softmax(-1)
    tokens_BN = torch.zeros(rows, 6, dtype=torch.int64)
    for row in range(rows):
        for parent in range(-1, 6):
            children = [node for node, above in enumerate(shapes[row % 3]) if above == parent]
            best = log_probs[row, parent + 1].topk(len(children) + 1).indices[row % 2 :]
            tokens_BN[row, children] = best[: len(children)]  # every other row drafts its second choices
    mixed = Tree(torch.tensor([shapes[row % 3] for row in range(rows)]), 6)
    batch = verify.verify(rule, Proposal(tokens_BN, mixed, "fixed"), log_probs, chance(rows, mixed))
    assert set(batch.num_accepted_B.tolist()) >= {0, 1, 2, 3}
    for row in range(rows):
        alone = Proposal(tokens_BN[row : row + 1], fixed(shapes[row % 3]), "fixed")
        keys = Keys(torch.tensor([row]), 5 + alone.tree.depth_bR, False)
        assert agree(row, batch, verify.verify(rule, alone, log_probs[row : row + 1], keys))


# ---- refusals -------------------------------------------------------------------------------------------------------

EXACT = {
    # rule: (where the tokens come from, whether it is a chain) that it is exact for
    "coupled": {(drawn, is_chain) for drawn in get_args(Drawn) for is_chain in (True, False)},
    "ratio": {("sampled", True), ("fixed", True)},
    "block": {("sampled", True), ("fixed", True)},
    "rrsw": {("sampled", True), ("fixed", True), ("sampled", False), ("fixed", False)},
    "point_mass": {("fixed", True), ("fixed", False)},
}
PROPOSALS = list(itertools.product(get_args(Drawn), [True, False]))


def test_every_lossless_rule_is_in_the_table() -> None:
    assert EXACT.keys() == set(LOSSLESS)


@pytest.mark.parametrize("rule", EXACT)
@pytest.mark.parametrize("drawn, is_chain", PROPOSALS)
def test_a_rule_takes_what_it_is_exact_for_and_names_another_one_for_the_rest(
    rule: str, drawn: Drawn, is_chain: bool
) -> None:
    if (drawn, is_chain) in EXACT[rule]:
        return verify.check(rule, drawn, is_chain)
    shape = "chain" if is_chain else "tree"
    with pytest.raises(ValueError, match=f"'{rule}' cannot verify a {drawn} {shape}; use '") as refusal:
        verify.check(rule, drawn, is_chain)
    named = [part for part in str(refusal.value).split("; use ")[1].split("'") if part in RULES]
    assert named and all((drawn, is_chain) in EXACT[other] for other in named)  # lossless ones only


@pytest.mark.parametrize("drawn, is_chain", PROPOSALS)
def test_for_every_proposal_there_is_a_lossless_rule(drawn: Drawn, is_chain: bool) -> None:
    assert any((drawn, is_chain) in exact for exact in EXACT.values())


def test_verifying_checks_first() -> None:
    proposal = Proposal(torch.zeros(1, 2, dtype=torch.int64), fixed((-1, -1)), "sampled", torch.ones(1, 2, 4) / 4)
    for rule in ("ratio", "block", "point_mass"):
        with pytest.raises(
            ValueError, match=f"the rule '{rule}' cannot verify a sampled tree; use 'coupled' or 'rrsw'"
        ):
            verify.verify(rule, proposal, torch.zeros(1, 3, 4), chance(1, proposal.tree))


def test_a_speculation_is_refused_before_anything_is_decoded(stubs: SimpleNamespace) -> None:
    drafter = stubs.Table(torch.zeros(4, 4))
    for rule, (way, drawn), plan in itertools.product(RULES, DRAWN.items(), [chain(2), Fixed((-1, -1))]):
        assert drawn_by(way, greedy=False) == drawn
        if not RULES[rule].lossless or (drawn, plan.is_chain) in EXACT[rule]:
            Speculation(drafter, plan, rule, way)
        else:
            with pytest.raises(ValueError, match=f"the rule '{rule}' cannot verify a {drawn}"):
                Speculation(drafter, plan, rule, way)
