r"""Tree arithmetic on a tree drawn by hand:

          root (row 0)
         /            \
      node 0         node 1          rows 1, 2
      /    \            |
  node 2  node 3     node 4          rows 3, 4, 5
                        |
                     node 5          row 6
"""

import pytest
import torch

from draftsmith.drafters import tree
from draftsmith.drafters.tree import Dynamic, Fixed, Tree, chain, fixed

PARENTS = (-1, -1, 0, 0, 1, 4)


def test_depths_count_the_steps_from_the_root() -> None:
    assert tree.depths(PARENTS) == [0, 1, 1, 2, 2, 2, 3]
    assert tree.depths(()) == [0]
    assert fixed(PARENTS).depth_bR.tolist() == [tree.depths(PARENTS)]
    assert fixed(()).depth_bR.tolist() == [[0]]


def test_a_row_may_see_itself_and_its_ancestors_only() -> None:
    expected = [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0, 0],
        [1, 1, 0, 1, 0, 0, 0],
        [1, 1, 0, 0, 1, 0, 0],
        [1, 0, 1, 0, 0, 1, 0],
        [1, 0, 1, 0, 0, 1, 1],
    ]
    assert fixed(PARENTS).ancestors_bRR[0].int().tolist() == expected


def test_paths_walk_from_the_root_and_repeat_their_end() -> None:
    expected = [[0, 0, 0, 0], [0, 1, 1, 1], [0, 2, 2, 2], [0, 1, 3, 3], [0, 1, 4, 4], [0, 2, 5, 5], [0, 2, 5, 6]]
    assert fixed(PARENTS).paths(torch.arange(7)).tolist() == expected


def test_sequences_with_shapes_of_their_own_are_what_each_is_alone() -> None:
    other = (-1, 0, 1, 1, -1, 4)
    both = Tree(torch.tensor([PARENTS, other]), 3)
    for row, parents in enumerate((PARENTS, other)):
        alone = fixed(parents)
        assert torch.equal(both.depth_bR[row], alone.depth_bR[0])
        assert torch.equal(both.ancestors_bRR[row], alone.ancestors_bRR[0])
        for end in range(7):
            assert torch.equal(both.paths(torch.tensor([end, end]))[row], alone.paths(torch.tensor([end]))[0])


def test_a_chain_is_recognised_and_its_mask_is_causal() -> None:
    assert chain(3).parents == (-1, 0, 1) and chain(0).parents == ()
    assert fixed((-1, 0, 1)).is_chain and fixed(()).is_chain and fixed((-1,)).is_chain
    assert not fixed((-1, -1, 0)).is_chain
    assert torch.equal(fixed(chain(4).parents).ancestors_bRR[0], torch.ones(5, 5, dtype=torch.bool).tril())
    assert fixed(chain(2).parents).paths(torch.arange(3)).tolist() == [[0, 0, 0], [0, 1, 1], [0, 1, 2]]


@pytest.mark.parametrize("parents", [(0,), (-1, 1), (-1, -2), (-1, 0, 5)])
def test_a_parent_that_is_not_an_earlier_node_is_refused_by_its_place(parents: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"parents\[\d\] = -?\d: must be -1 \(the root\) or an earlier node"):
        Fixed(parents)


@pytest.mark.parametrize("sizes", [(0, 3, 2), (4, 0, 2), (4, 3, 0), (7, 2, 2)])
def test_a_dynamic_tree_that_cannot_exist_is_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="a dynamic tree of"):
        Dynamic(*sizes)


@pytest.mark.parametrize("text", ["5", "dynamic:16,5,8", "tree:-1,-1,0"])
def test_a_plan_is_named_as_it_is_written(text: str) -> None:
    assert tree.plan_name(tree.parse_plan(text)) == text


def test_short_forms_of_a_plan() -> None:
    assert tree.parse_plan("dynamic:16") == Dynamic(16, 5, 8)
    assert tree.parse_plan("dynamic:16,4") == Dynamic(16, 4, 8)
    assert tree.parse_plan("wide:2,1") == Fixed((-1, -1, 0, 1)) == tree.branching([2, 1])
    assert tree.plan_name(tree.parse_plan("wide:1,1,1")) == "3"


@pytest.mark.parametrize("text", ["", "x", "dynamic:", "dynamic:1,2,3,4", "wide:0", "bushy:3", "3,4"])
def test_what_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no plan|children per depth"):
        tree.parse_plan(text)
