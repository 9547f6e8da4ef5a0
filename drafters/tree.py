"""Tree arithmetic: everything that follows from a list of parents, as pure functions.

A proposal of N nodes is `parents`, a tuple of N integers: node i hangs under node `parents[i]`, or under the root (the
newest committed token) where it is -1. Parents come before children. A chain is (-1, 0, 1, ...). The target reads
R = N + 1 rows: row 0 is the root and row i + 1 is node i.

Letters: N nodes, R = N + 1 rows, P = depth of the deepest node.
"""

import torch
from torch import Tensor


def chain(depth: int) -> tuple[int, ...]:
    """The parents of a chain of `depth` nodes."""
    return tuple(range(-1, depth - 1))


def is_chain(parents: tuple[int, ...]) -> bool:
    return parents == chain(len(parents))


def check_parents(parents: tuple[int, ...]) -> None:
    """Raises ValueError unless every parent is -1 or an earlier node."""
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise ValueError(f"parents[{node}] = {parent}: must be -1 (the root) or an earlier node, 0 to {node - 1}")


def depths(parents: tuple[int, ...]) -> list[int]:
    """Depth of each row, R integers: 0 for the root, 1 for its children, ..."""
    depth = [0]
    for parent in parents:
        depth.append(depth[parent + 1] + 1)
    return depth


def ancestor_mask(parents: tuple[int, ...]) -> Tensor:
    """Which rows each row may attend to: bool (R, R), True for itself and its ancestors, the root included."""
    rows = len(parents) + 1
    mask_RR = torch.eye(rows, dtype=torch.bool)
    for node, parent in enumerate(parents):
        mask_RR[node + 1] |= mask_RR[parent + 1]
    return mask_RR


def path_rows(parents: tuple[int, ...]) -> Tensor:
    """The rows from the root to each row: int64 (R, P + 1), the root first, short paths padded with their last row."""
    depth = depths(parents)
    table_RP = torch.zeros(len(depth), max(depth) + 1, dtype=torch.int64)
    for row in range(1, len(depth)):
        table_RP[row] = table_RP[parents[row - 1] + 1]
        table_RP[row, depth[row] :] = row
    return table_RP
