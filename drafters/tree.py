"""Trees of drafted tokens: what is asked for (a plan) and what follows from a list of parents, as tensor arithmetic.

A proposal of N nodes has `parents`: node i hangs under node `parents[i]`, or under the root (the newest committed token) where
it is -1. Parents come before children, siblings in the order of their rank. A chain is (-1, 0, 1, …). The target reads
R = N + 1 rows: row 0 is the root and row i + 1 is node i.

Letters: b sequences with a shape of their own (1: all share one), N nodes, R = N + 1 rows, P depth of the deepest node.
"""

import dataclasses
import functools
from collections.abc import Sequence

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Fixed:
    """A plan with a shape that is known beforehand: a chain, or a static tree.

    Attributes:
        parents: one entry per node; none at all means that nothing is drafted.
    """

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        check_parents(self.parents)

    @property
    def depth(self) -> int:
        return max(depths(self.parents))

    @property
    def nodes(self) -> int:
        return len(self.parents)

    @property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(-1, len(self.parents) - 1))


@dataclasses.dataclass(frozen=True, slots=True)
class Dynamic:
    """A plan whose shape follows from the draft's confidence (EAGLE-2, Li et al. 2024, arXiv 2406.16858): at every depth the
    `width` most probable paths are expanded by `width` children each, and of all nodes the `nodes` most probable are proposed.

    Attributes:
        nodes: how many are proposed.
        depth: how deep it is expanded.
        width: paths expanded per depth, and children of each.
    """

    nodes: int
    depth: int
    width: int = 8

    def __post_init__(self) -> None:
        if min(self.nodes, self.depth, self.width) < 1:
            raise ValueError(
                f"a dynamic tree of {self.nodes} nodes, depth {self.depth}, width {self.width}: give 1 or more"
            )
        if self.nodes > (most := self.width + (self.depth - 1) * self.width**2):
            raise ValueError(
                f"a dynamic tree of depth {self.depth} and width {self.width} has {most} nodes at most, not {self.nodes}"
            )

    @property
    def is_chain(self) -> bool:
        return False


Plan = Fixed | Dynamic


def chain(depth: int) -> Fixed:
    """The plan of a chain of `depth` tokens."""
    return Fixed(tuple(range(-1, depth - 1)))


def parse_plan(text: str) -> Plan:
    """A plan as the command line names it: "5" is a chain, "dynamic:16" a dynamic tree of 16 nodes ("dynamic:16,6,8": depth 6 and
    width 8, the default depth 5), "wide:4,2,1" a static tree whose nodes of each depth have so many children, and
    "tree:-1,-1,0" a list of parents."""
    kind, _, rest = text.rpartition(":")
    try:
        numbers = [int(part) for part in rest.split(",")]
    except ValueError:
        raise ValueError(
            f"{text!r} is no plan; give K, dynamic:NODES[,DEPTH[,WIDTH]], wide:A,B,… or tree:PARENTS"
        ) from None
    if kind == "" and len(numbers) == 1:
        return chain(numbers[0])
    if kind == "dynamic" and len(numbers) <= 3:
        nodes, depth, width = [*numbers, *(5, 8)[len(numbers) - 1 :]]
        return Dynamic(nodes, depth, width)
    if kind == "wide":
        return branching(numbers)
    if kind == "tree":
        return Fixed(tuple(numbers))
    raise ValueError(f"{text!r} is no plan; give K, dynamic:NODES[,DEPTH[,WIDTH]], wide:A,B,… or tree:PARENTS")


def plan_name(plan: Plan) -> str:
    """The inverse of `parse_plan`."""
    if isinstance(plan, Dynamic):
        return f"dynamic:{plan.nodes},{plan.depth},{plan.width}"
    return str(plan.depth) if plan.is_chain else f"tree:{','.join(map(str, plan.parents))}"


def branching(children: Sequence[int]) -> Fixed:
    """The static tree in which every node of depth d has `children[d]` children."""
    if not children or min(children) < 1:
        raise ValueError(f"a tree with {list(children)} children per depth: give 1 or more for each depth")
    parents: list[int] = []
    above = [-1]
    for count in children:
        first = len(parents)
        parents += [node for node in above for _ in range(count)]
        above = list(range(first, len(parents)))
    return Fixed(tuple(parents))


def scratch_rows(plan: Plan) -> int:
    """How many rows behind the committed ones target and drafter may need at a time."""
    return plan.nodes + 1 if isinstance(plan, Fixed) else max(plan.nodes, plan.width * plan.depth) + 1


def check_parents(parents: Sequence[int]) -> None:
    """Raises ValueError unless every parent is -1 or an earlier node."""
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise ValueError(f"parents[{node}] = {parent}: must be -1 (the root) or an earlier node, 0 to {node - 1}")


def depths(parents: Sequence[int]) -> list[int]:
    """Depth of each row, R integers: 0 for the root, 1 for its children, …"""
    depth = [0]
    for parent in parents:
        depth.append(depth[parent + 1] + 1)
    return depth


class Tree:
    """The shape of a proposal. What follows from it is worked out once, when it is first asked for.

    Attributes:
        parents_bN: int64; b = 1 if all sequences share the shape.
        depth: P, no node is deeper; known on the host.
        is_chain: every node hangs under the one before.
    """

    def __init__(self, parents_bN: Tensor, depth: int, is_chain: bool = False) -> None:
        self.parents_bN, self.depth, self.is_chain = parents_bN, depth, is_chain

    @property
    def num_nodes(self) -> int:
        return self.parents_bN.shape[1]

    @functools.cached_property
    def up_bR(self) -> Tensor:
        """The row above each row; the root's is itself."""
        return torch.nn.functional.pad(self.parents_bN + 1, (1, 0))

    @functools.cached_property
    def ancestors_bRR(self) -> Tensor:
        """Which rows each row may attend to: bool, True for itself and its ancestors, the root included."""
        up_bR, num_rows = self.up_bR, self.num_nodes + 1
        row_R = torch.arange(num_rows, device=up_bR.device)
        seen_bRR, at_bR = (
            torch.zeros(len(up_bR), num_rows, num_rows, dtype=torch.bool, device=up_bR.device),
            row_R[None],
        )
        for _ in range(self.depth + 1):
            seen_bRR |= at_bR[..., None] == row_R
            at_bR = up_bR.gather(1, at_bR.expand(len(up_bR), -1))
        return seen_bRR

    @functools.cached_property
    def depth_bR(self) -> Tensor:
        """int64, 0 for the root."""
        return self.ancestors_bRR.sum(-1) - 1

    def paths(self, ends_B: Tensor) -> Tensor:
        """The rows from the root to each end row, (B, P + 1): the root first, short paths padded with their end."""
        up_BR, at_B1 = self.up_bR.expand(len(ends_B), -1), ends_B[:, None]
        upwards = [at_B1]
        for _ in range(self.depth):
            upwards.append(up_BR.gather(1, upwards[-1]))
        depth_B1 = self.depth_bR.expand(len(ends_B), -1).gather(1, at_B1)
        place_P = torch.arange(self.depth + 1, device=ends_B.device)
        return torch.cat(upwards, 1).gather(1, (depth_B1 - place_P).clamp_min(0))


@functools.lru_cache(maxsize=64)
def fixed(parents: tuple[int, ...], device: torch.device | None = None) -> Tree:
    """The tree of a known shape, shared by all sequences."""
    plan = Fixed(parents)
    return Tree(torch.tensor([parents], dtype=torch.int64, device=device), plan.depth, plan.is_chain)
