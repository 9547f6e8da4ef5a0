"""The search for the best static tree, against trying all trees; the measurement it rests on, against what a drafter was told."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from draftsmith.drafters.tree import Fixed
from draftsmith.inference.decode import generate
from draftsmith.inference.sampling import Sampler
from draftsmith.inference.static_trees import best_tree, comb, expected_accepted, measure_ranks


def all_trees(nodes: int, depth: int, width: int) -> list[Fixed]:
    """Every list of parents with at most so many children each, and so deep."""
    trees = []
    for parents in itertools.product(*(range(-1, node) for node in range(nodes))):
        plan = Fixed(tuple(parents))
        if plan.depth <= depth and all(parents.count(p) <= width for p in parents):
            trees.append(plan)
    return trees


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("nodes", [1, 3, 5, 6])
def test_no_tree_of_so_many_nodes_is_expected_to_accept_more(nodes: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    ranks = torch.rand(3, 3, generator=generator).sort(dim=1, descending=True).values
    ranks = (ranks / ranks.sum(1, keepdim=True) * torch.rand(3, 1, generator=generator)).tolist()
    found = best_tree(ranks, nodes)
    assert found.nodes == nodes
    best = max(expected_accepted(ranks, plan) for plan in all_trees(nodes, 3, 3))
    assert expected_accepted(ranks, found) == pytest.approx(best, abs=1e-12)


def test_a_tree_worked_by_hand() -> None:
    """Chances .5 and .4 at the first depth, .9 and .05 below: node 0 (.5), its child (.45), node 1 (.4), its child (.36)."""
    assert best_tree([[0.5, 0.4], [0.9, 0.05]], 4).parents == (-1, 0, -1, 2)
    assert best_tree([[0.5, 0.4], [0.9, 0.05]], 99).nodes == 6  # there are no more


def test_a_comb_branches_at_its_first_nodes_only() -> None:
    assert comb(3, 2).parents == (-1, -1, 0, 0, 2, 2)


def test_the_measured_ranks_are_those_the_drafter_was_told(toy: SimpleNamespace, stubs: SimpleNamespace) -> None:
    """The true token has rank 0 at even positions, 1 at every fourth odd one, and is missing at the others."""
    target = toy.make_target("llama", num_hidden_layers=1)
    prompts = [[5, 6, 7, 8], [9, 10]]
    plain = generate(target, prompts, max_new=80, sampler=Sampler(), stop_at_eos=False)
    texts = [prompt + output.ids for prompt, output in zip(prompts, plain, strict=True)]
    target.eos_ids = ()

    def place(row: int, position: int, siblings: int) -> int:
        return 0 if position % 2 == 0 else 1 if position % 8 == 1 else siblings

    drafter = stubs.Scripted(texts, place)
    ranks = measure_ranks(target, drafter, prompts, depth=2, width=3, sampler=Sampler(), max_new=70)
    tried, hits = [0, 0], [[0, 0, 0], [0, 0, 0]]  # the same rounds, walked by hand
    for row, prompt in enumerate(prompts):
        root, end = len(prompt), len(prompt) + 70
        while root < end - 1:
            first, second = place(row, root + 1, 3), place(row, root + 2, 3)
            tried[0] += 1
            if first < 3:
                hits[0][first] += 1
            if first == 0:
                tried[1] += 1
                if second < 3:
                    hits[1][second] += 1
            root += 1 + (first < 3) + (first == 0 and second < 3)
    assert ranks == [[count / total for count in row] for row, total in zip(hits, tried, strict=True)]
    assert 0 < ranks[1][1] < ranks[0][0]
