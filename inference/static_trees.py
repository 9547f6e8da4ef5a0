"""The best static tree of n nodes for a drafter: measure which rank at which depth the target agrees with, then search.

The search is that of Medusa (Cai et al. 2024, arXiv 2401.10774, appendix): the expected number of accepted tokens is a sum over
nodes of the product of chances along their path.
"""

import heapq
from collections.abc import Sequence

from draftsmith.drafters.base import Drafter
from draftsmith.drafters.tree import Fixed
from draftsmith.inference.decode import generate
from draftsmith.inference.sampling import Sampler
from draftsmith.inference.speculation import Speculation
from draftsmith.inference.target import Target


def comb(depth: int, width: int) -> Fixed:
    """The tree in which the first node of every depth has `width` children, and the others have none."""
    parents: list[int] = []
    for level in range(depth):
        parents += [(level - 1) * width if level else -1] * width
    return Fixed(tuple(parents))


def measure_ranks(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    *,
    depth: int,
    width: int,
    sampler: Sampler,
    max_new: int,
    batch_size: int = 32,
    way: str | None = None,
) -> list[list[float]]:
    """How often the child of rank r of an accepted path of first ranks is accepted at depth d: `[d][r]`, each in 0 to 1.

    Use other prompts than those on which the tree is measured afterwards.
    """
    plan = comb(depth, width)
    tried, accepted = [0] * depth, [[0] * width for _ in range(depth)]
    outputs = generate(
        target,
        prompts,
        max_new=max_new,
        sampler=sampler,
        speculation=Speculation(drafter, plan, "coupled", way),
        max_batch=batch_size,
    )
    for end in (end for output in outputs for end in output.ends):
        level, rank = divmod(end - 1, width)  # node `end - 1`; -1 is the root
        for above in range(level + 1 if end else 0):
            tried[above] += 1
            accepted[above][rank if above == level else 0] += 1
        reached = 0 if not end else level + 1 if rank == 0 else depth
        if reached < depth:  # the path went on to a node with children, and none of them was right
            tried[reached] += 1
    return [[hits / max(1, total) for hits in row] for row, total in zip(accepted, tried, strict=True)]


def best_tree(ranks: Sequence[Sequence[float]], nodes: int) -> Fixed:
    """The tree of `nodes` nodes (fewer if there are none left) with the largest expected acceptance, if a node of rank r at depth d
    is accepted with chance `ranks[d][r]` once its parent is. Chances never rise along a path, so taking the best remaining child
    each time is optimal."""
    options = [
        (-chance, rank, 0, -1) for rank, chance in enumerate(ranks[0])
    ]  # -chance of the path, rank, depth, parent
    heapq.heapify(options)
    parents: list[int] = []
    while options and len(parents) < nodes:
        negative, _, depth, parent = heapq.heappop(options)
        if depth + 1 < len(ranks):
            for rank, chance in enumerate(ranks[depth + 1]):
                heapq.heappush(options, (negative * chance, rank, depth + 1, len(parents)))
        parents.append(parent)
    return Fixed(tuple(parents))


def expected_accepted(ranks: Sequence[Sequence[float]], plan: Fixed) -> float:
    """What `best_tree` maximises."""
    chances: list[float] = []
    depths: list[int] = []
    children: dict[int, int] = {}
    for parent in plan.parents:
        rank = children.get(parent, 0)
        children[parent] = rank + 1
        depths.append(0 if parent < 0 else depths[parent] + 1)
        chances.append((1.0 if parent < 0 else chances[parent]) * ranks[depths[-1]][rank])
    return sum(chances)
