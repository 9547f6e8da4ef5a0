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

PARENTS = (-1, -1, 0, 0, 1, 4)


def test_depths_count_the_steps_from_the_root() -> None:
    assert tree.depths(PARENTS) == [0, 1, 1, 2, 2, 2, 3]
    assert tree.depths(()) == [0]


def test_ancestor_mask_lets_a_row_see_itself_and_its_ancestors_only() -> None:
    expected = [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0, 0],
        [1, 1, 0, 1, 0, 0, 0],
        [1, 1, 0, 0, 1, 0, 0],
        [1, 0, 1, 0, 0, 1, 0],
        [1, 0, 1, 0, 0, 1, 1],
    ]
    assert tree.ancestor_mask(PARENTS).int().tolist() == expected


def test_path_rows_walk_from_the_root_and_repeat_their_end() -> None:
    expected = [[0, 0, 0, 0], [0, 1, 1, 1], [0, 2, 2, 2], [0, 1, 3, 3], [0, 1, 4, 4], [0, 2, 5, 5], [0, 2, 5, 6]]
    assert tree.path_rows(PARENTS).tolist() == expected


def test_a_chain_is_recognised_and_its_mask_is_causal() -> None:
    assert tree.chain(3) == (-1, 0, 1)
    assert tree.is_chain((-1, 0, 1)) and tree.is_chain(())
    assert not tree.is_chain((-1, -1, 0))
    assert torch.equal(tree.ancestor_mask(tree.chain(4)), torch.ones(5, 5, dtype=torch.bool).tril())
    assert tree.path_rows(tree.chain(2)).tolist() == [[0, 0, 0], [0, 1, 1], [0, 1, 2]]


@pytest.mark.parametrize("parents", [(0,), (-1, 1), (-1, -2), (-1, 0, 5)])
def test_a_parent_that_is_not_an_earlier_node_is_refused_by_its_place(parents: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"parents\[\d\] = -?\d: must be -1 \(the root\) or an earlier node"):
        tree.check_parents(parents)


def test_valid_parents_pass_the_check() -> None:
    tree.check_parents(PARENTS)
    tree.check_parents(tree.chain(5))
    tree.check_parents(())
