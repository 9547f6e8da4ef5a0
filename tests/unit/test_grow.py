"""Growing what a plan asks for: static plans against a recursion over nodes, dynamic ones against EAGLE-2 in plain Python.

The draft model here gives every path logits of its own, and it learns the path of a node from what the frontier says alone: by
its parents and, apart from that, by what it may see.

Letters: B sequences, M nodes expanded together, A rows expanded so far, N nodes, W draft vocabulary.
"""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from draftsmith.drafters.base import Picked, Proposal
from draftsmith.drafters.grow import Frontier, grow, seen_slots
from draftsmith.drafters.tree import Dynamic, Fixed, Plan, chain, depths
from draftsmith.inference.drafting import make_pick, without_replacement
from draftsmith.inference.sampling import Sampler

VOCAB = 7
Path = tuple[int, ...]
Model = Callable[[int, Path], Tensor]
"""(row, path of tokens from the root, without it) -> logits (W,) for the token behind."""


def random_model(seed: int, vocab: int = VOCAB) -> Model:
    """Logits that depend on the row and on every token of the path."""
    cache: dict[tuple[int, Path], Tensor] = {}

    def model(row: int, path: Path) -> Tensor:
        if (row, path) not in cache:
            generator = torch.Generator().manual_seed(hash((seed, row, *path)) & 0x7FFFFFFF)
            cache[row, path] = 1.5 * torch.randn(vocab, generator=generator)
        return cache[row, path]

    return model


class Expand:
    """Finds out the path of every node of a frontier, and gives the model's logits for it.

    Rows are numbered in the order of expansion, so that a node's path is that of its parent's row and its own token; what it sees
    must be exactly the rows on that path.
    """

    def __init__(self, model: Model, batch: int) -> None:
        self.model, self.paths = model, [[] for _ in range(batch)]  # type: list[list[Path]]
        self.depths: list[int] = []

    def __call__(self, frontier: Frontier) -> Tensor:
        self.depths.append(frontier.depth)
        batch, num_nodes = frontier.tokens_BM.shape
        logits = []
        parents_BM = frontier.parents_bM.expand(batch, -1)
        before = len(self.paths[0])
        for row in range(batch):
            for token, parent in zip(frontier.tokens_BM[row].tolist(), parents_BM[row].tolist(), strict=True):
                assert -1 <= parent < before
                self.paths[row].append((*(self.paths[row][parent] if parent >= 0 else ()), token))
            new = self.paths[row][before:]
            assert all(len(path) == frontier.depth for path in new)
            if frontier.visible_bMA is not None:
                visible_MA = frontier.visible_bMA.expand(batch, -1, -1)[row]
                assert visible_MA.shape == (num_nodes, before + num_nodes)
                for m, path in enumerate(new):
                    seen = [self.paths[row][a] for a in visible_MA[m].nonzero()[:, 0].tolist()]
                    assert sorted(seen, key=len) == [path[:length] for length in range(1, len(path) + 1)]
                    assert bool(visible_MA[m, before + m])
            else:
                assert num_nodes == 1 and before == frontier.depth - 1  # a chain: all rows so far are its path
            logits.append(torch.stack([self.model(row, path) for path in new]))
        return torch.stack(logits)


def likeliest(logits_BMW: Tensor, depth: int, token_ids_W: Tensor | None, count: int) -> Picked:
    """A plain pick: the most likely tokens and their log-probabilities."""
    top = logits_BMW.log_softmax(-1).topk(count)
    return Picked(top.indices if token_ids_W is None else token_ids_W[top.indices], top.values, None)


likeliest.drawn = "fixed"  # type: ignore[attr-defined]


def grown(plan: Plan, model: Model, batch: int, pick: object = likeliest) -> tuple[Proposal, Expand]:
    expand = Expand(model, batch)
    root_BW = torch.stack([model(row, ()) for row in range(batch)])
    return grow(plan, root_BW, expand, pick, None), expand  # type: ignore[arg-type]


def paths(proposal: Proposal, row: int) -> list[Path]:
    """The path of each node."""
    parents = proposal.tree.parents_bN.expand(len(proposal.tokens_BN), -1)[row].tolist()
    found: list[Path] = []
    for parent, token in zip(parents, proposal.tokens_BN[row].tolist(), strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


# ---- plans with a known shape ---------------------------------------------------------------------------------------

PLANS = {
    "one node": (-1,),
    "chain": chain(4).parents,
    "width only": (-1,) * 5,
    "2 x 2": (-1, -1, 0, 0, 1, 1),
    "drawn in test_tree.py": (-1, -1, 0, 0, 1, 4),
    "not depth by depth": (-1, 0, 1, -1, 3, 0, 3, 1, 4, -1),
    "a leaf before its sibling's children": (-1, -1, 1, 1, 3, -1, 5),
    "three branches": (-1, -1, -1, 0, 1, 2, 3, 4, 5, 5),
    "all under the last": (-1, -1, -1, 2, 2, 4, 4),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_fixed_plan_is_a_recursion_over_its_nodes(name: str) -> None:
    """The i-th child of a node is the i-th most likely token behind the node's own path."""
    parents, batch, model = PLANS[name], 3, random_model(1)
    proposal, expand = grown(Fixed(parents), model, batch)
    for row in range(batch):
        expected: list[Path] = []
        for node, parent in enumerate(parents):
            above = expected[parent] if parent >= 0 else ()
            rank = [other for other in range(node + 1) if parents[other] == parent].index(node)
            expected.append((*above, int(model(row, above).argsort(descending=True)[rank])))
        assert paths(proposal, row) == expected
        inner = {parent for parent in parents if parent >= 0}
        assert sorted(expand.paths[row]) == sorted(expected[node] for node in inner)  # each once, leaves not at all
    assert proposal.tree.parents_bN.tolist() == [list(parents)] and proposal.tree.depth == max(depths(parents))
    assert expand.depths == list(range(1, max(depths(parents))))


@pytest.mark.parametrize("name", PLANS)
def test_sampled_nodes_carry_the_law_they_were_drawn_from(name: str) -> None:
    """The node's law, handed over: the draft's behind its parent's path, without the siblings before it."""
    parents, batch, model = PLANS[name], 4, random_model(2)
    pick = make_pick("sample", Sampler(1.0), torch.arange(batch), torch.arange(batch), VOCAB)
    proposal, _ = grown(Fixed(parents), model, batch, pick)
    assert proposal.drawn == "sampled" and proposal.probs_BNV is not None
    for row in range(batch):
        found = paths(proposal, row)
        for node, parent in enumerate(parents):
            siblings = [other for other in range(node + 1) if parents[other] == parent]
            law_W = model(row, found[parent] if parent >= 0 else ()).softmax(-1)
            drawn = torch.tensor([found[other][-1] for other in siblings])
            expected = without_replacement(law_W[None, None], drawn[None, None])[0, 0, -1]
            torch.testing.assert_close(proposal.probs_BNV[row, node], expected)
            assert len(set(drawn.tolist())) == len(siblings)


def test_an_empty_plan_drafts_nothing_and_expands_nothing() -> None:
    proposal, expand = grown(Fixed(()), random_model(1), 3)
    assert proposal.tokens_BN.shape == (3, 0) and proposal.tree.depth == 0 and expand.depths == []


def test_logits_that_are_the_same_for_all_nodes_serve_every_parent() -> None:
    """Medusa's heads look at the depth alone: one row of logits for all nodes of it."""
    torch.manual_seed(0)
    logits, parents = torch.randn(3, 2, 1, VOCAB), PLANS["not depth by depth"]
    proposal = grow(Fixed(parents), torch.randn(2, VOCAB), lambda frontier: logits[frontier.depth - 1], likeliest, None)  # type: ignore[arg-type]
    depth_R = depths(parents)
    for node, parent in enumerate(parents):
        if parent >= 0:
            rank = [other for other in range(node + 1) if parents[other] == parent].index(node)
            expected_B = logits[depth_R[node + 1] - 2, :, 0].argsort(dim=-1, descending=True)[:, rank]
            assert torch.equal(proposal.tokens_BN[:, node], expected_B)


def test_a_reduced_draft_vocabulary_proposes_target_ids() -> None:
    ids = torch.tensor([2, 3, 5, 7, 11, 13, 17])
    for plan in (Fixed((-1, -1, 0)), Dynamic(5, 2, 3)):
        expand = Expand(lambda row, path: random_model(1)(row, path), 1)
        proposal = grow(plan, random_model(1)(0, ())[None], expand, likeliest, ids)  # type: ignore[arg-type]
        assert set(proposal.tokens_BN[0].tolist()) <= set(ids.tolist())
        assert {path[0] for path in expand.paths[0]} <= set(ids.tolist())  # and so does the frontier


# ---- dynamic plans --------------------------------------------------------------------------------------------------


def eagle2(plan: Dynamic, logits: Callable[[Path], Tensor]) -> dict[Path, float]:
    """Paths and their confidence: expand the `width` best of each depth, then keep the `nodes` best of all; of equal ones the
    earlier."""

    def children(path: Path, score: float) -> list[tuple[Path, float]]:
        law = logits(path).log_softmax(-1)
        best = law.topk(min(plan.width, len(law))).indices.tolist()
        return [((*path, token), score + float(law[token])) for token in best]

    level = children((), 0.0)
    everything = list(level)
    for _ in range(plan.depth - 1):
        best = sorted(level, key=lambda item: -item[1])[: plan.width]  # sorted is stable
        level = [child for path, score in best for child in children(path, score)]
        everything += level
    return dict(sorted(everything, key=lambda item: -item[1])[: plan.nodes])


DYNAMIC = [
    Dynamic(1, 1, 1),
    Dynamic(3, 1, 5),  # width only
    Dynamic(4, 4, 1),  # depth only
    Dynamic(6, 3, 2),
    Dynamic(10, 4, 3),
    Dynamic(21, 3, 3),  # all there are
    Dynamic(30, 5, 4),
    Dynamic(12, 3, 9),  # wider than the vocabulary
]


@pytest.mark.parametrize("plan", DYNAMIC, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_a_dynamic_plan_is_eagle_2(plan: Dynamic, seed: int) -> None:
    batch, model = 4, random_model(seed)
    proposal, expand = grown(plan, model, batch)
    assert proposal.tree.num_nodes == plan.nodes and proposal.tree.depth == plan.depth
    for row in range(batch):
        expected = eagle2(plan, lambda path, row=row: model(row, path))
        assert set(paths(proposal, row)) == set(expected)
        check_order(proposal, row)
    assert expand.depths == list(range(1, plan.depth))
    assert max(len(rows) for rows in expand.paths) <= plan.width * (plan.depth - 1)


def check_order(proposal: Proposal, row: int) -> None:
    """Parents come before children, siblings are distinct, and the tree knows how deep every node is."""
    parents = proposal.tree.parents_bN[row].tolist()
    found = paths(proposal, row)
    assert all(-1 <= parent < node for node, parent in enumerate(parents))
    assert len(set(found)) == len(found)
    assert proposal.tree.depth_bR[row, 1:].tolist() == [len(path) for path in found]
    assert all(path[:-1] in found or len(path) == 1 for path in found)


def flat(row: int, path: Path) -> Tensor:
    """Every token is as likely as every other: ties everywhere."""
    return torch.zeros(VOCAB)


def two_tokens(row: int, path: Path) -> Tensor:
    """Only two tokens are possible, so that most of a wide tree has a score of minus infinity."""
    logits = torch.full((VOCAB,), -math.inf)
    logits[[row % VOCAB, (row + len(path)) % VOCAB]] = torch.tensor([0.5, 0.0])
    return logits


def certain(row: int, path: Path) -> Tensor:
    """One token has all the probability: scores of 0 all the way down, and -inf beside it."""
    logits = torch.full((VOCAB,), -math.inf)
    logits[len(path) % VOCAB] = 1.0
    return logits


@pytest.mark.parametrize("model", [flat, two_tokens, certain])
@pytest.mark.parametrize("plan", DYNAMIC, ids=str)
def test_a_dynamic_tree_holds_the_ancestors_of_all_its_nodes_with_ties_and_impossible_tokens(
    plan: Dynamic, model: Model
) -> None:
    proposal, _ = grown(plan, model, 3)
    for row in range(3):
        check_order(proposal, row)


@pytest.mark.parametrize("plan", [Dynamic(6, 3, 2), Dynamic(12, 5, 3)], ids=str)
@pytest.mark.parametrize("way", ["coupled", "argmax"])
def test_rows_of_a_batch_have_dynamic_trees_of_their_own(plan: Dynamic, way: str) -> None:
    batch, model, sampler = 6, random_model(5), Sampler(1.0)
    seeds, first = torch.arange(batch) + 40, torch.arange(batch) * 3
    proposal, _ = grown(plan, model, batch, make_pick(way, sampler, seeds, first, VOCAB))
    shapes = set()
    for row in range(batch):
        one = slice(row, row + 1)
        pick = make_pick(way, sampler, seeds[one], first[one], VOCAB)
        alone, _ = grown(plan, lambda _, path, row=row: model(row, path), 1, pick)
        assert alone.tokens_BN[0].tolist() == proposal.tokens_BN[row].tolist()
        assert alone.tree.parents_bN[0].tolist() == proposal.tree.parents_bN[row].tolist()
        shapes.add(tuple(proposal.tree.parents_bN[row].tolist()))
    assert len(shapes) > 1


@pytest.mark.parametrize("model", [random_model(3), two_tokens, certain], ids=["random", "two tokens", "certain"])
def test_a_coupled_dynamic_tree_is_closed_too(model: Model) -> None:
    """Its scores are a softmax over perturbed logits, so they fall along every path as well."""
    pick = make_pick("coupled", Sampler(1.0), torch.arange(20), torch.arange(20), VOCAB)
    proposal, _ = grown(Dynamic(14, 4, 3), model, 20, pick)
    for row in range(20):
        check_order(proposal, row)


def test_at_temperature_zero_a_dynamic_tree_still_has_siblings() -> None:
    pick = make_pick("coupled", Sampler(0.0), torch.arange(2), torch.arange(2), VOCAB)
    model = random_model(3)
    proposal, _ = grown(Dynamic(10, 3, 3), model, 2, pick)
    for row in range(2):
        expected = eagle2(Dynamic(10, 3, 3), lambda path, row=row: model(row, path))
        assert set(paths(proposal, row)) == set(expected)


def test_sampled_drafts_are_refused_for_dynamic_plans_with_a_way_to_go_on() -> None:
    pick = make_pick("sample", Sampler(1.0), torch.arange(2), torch.arange(2), VOCAB)
    with pytest.raises(
        ValueError, match="biases sampled drafts; draft it by way 'coupled' or 'argmax', or sample a static"
    ):
        grown(Dynamic(6, 3, 2), random_model(1), 2, pick)


# ---- what a frontier sees in a cache --------------------------------------------------------------------------------


def test_seen_slots_are_the_committed_ones_and_those_the_frontier_names() -> None:
    """Rows with 2 and 4 committed slots and three expanded rows behind them; the two new ones see the first and themselves."""
    visible = torch.tensor([[[True, True, False], [True, False, True]]])
    frontier = Frontier(2, torch.zeros(2, 2, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.int64), visible)
    seen = seen_slots(torch.tensor([2, 4]), 8, frontier).int().tolist()
    assert seen == [
        [[1, 1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 1, 0, 0, 0]],
        [[1, 1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0, 1, 0]],
    ]


def test_a_chain_sees_all_up_to_its_depth() -> None:
    frontier = Frontier(2, torch.zeros(2, 1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64), None)
    seen = seen_slots(torch.tensor([1, 3]), 6, frontier).int().tolist()
    assert seen == [[[1, 1, 1, 0, 0, 0]], [[1, 1, 1, 1, 1, 0]]]
