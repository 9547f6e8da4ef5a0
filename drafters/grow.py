"""How a drafter grows what a plan asks for, one depth at a time: `grow` decides which nodes are expanded and which tokens they
get, the drafter's `expand` gives the logits. Chains, static trees and dynamic trees (EAGLE-2) are the same walk.

Rows are numbered in the order in which they are expanded; the root is not among them, the drafter has read it before.

Letters: B sequences, b = B or 1 (the same for all), M nodes expanded together, A rows expanded so far (these included),
k children of each, C candidates, N nodes, W draft vocabulary, V target vocabulary.
"""

import dataclasses
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from draftsmith.drafters.base import Drawn, Pick, Proposal
from draftsmith.drafters.tree import Dynamic, Fixed, Plan, Tree, depths, fixed


@dataclasses.dataclass(frozen=True, slots=True)
class Frontier:
    """Nodes to expand, all at one depth.

    Attributes:
        depth: 1 or more; their children are at depth + 1.
        tokens_BM: int64, target ids.
        parents_bM: int64, the expanded row that each hangs under, -1 for the root.
        visible_bMA: bool, the expanded rows that each may see, itself included; None in a chain: all of them.
    """

    depth: int
    tokens_BM: Tensor
    parents_bM: Tensor
    visible_bMA: Tensor | None


Expand = Callable[[Frontier], Tensor]
"""Logits (B, M, W) for the children of each node, or (B, 1, W) if they are the same for all."""


def seen_slots(lengths_B: Tensor, extent: int, frontier: Frontier) -> Tensor:
    """Which of the first `extent` slots the nodes of a frontier see, bool (B, M, extent): what is committed, and behind it the
    expanded rows that the frontier names."""
    behind_BS = torch.arange(extent, device=lengths_B.device) - lengths_B[:, None]
    if frontier.visible_bMA is None:  # a chain: the newest row is the last
        return (behind_BS < frontier.depth)[:, None]
    num_rows = frontier.visible_bMA.shape[2]
    index_BMS = behind_BS.clamp(0, num_rows - 1)[:, None].expand(-1, frontier.tokens_BM.shape[1], -1)
    visible_BMA = frontier.visible_bMA.expand(len(lengths_B), -1, -1)
    return (behind_BS < 0)[:, None] | (visible_BMA.gather(2, index_BMS) & (behind_BS < num_rows)[:, None])


def grow(plan: Plan, root_logits_BW: Tensor, expand: Expand, pick: Pick, token_ids_W: Tensor | None) -> Proposal:
    """The proposal that a plan asks for.

    Args:
        plan: its shape, or how to find one.
        root_logits_BW: draft logits for the token behind the root.
        expand: called once per further depth.
        pick: how tokens are chosen.
        token_ids_W: target id of each draft id, None if the vocabularies are the same.
    """
    if isinstance(plan, Fixed):
        return _grow_fixed(plan, root_logits_BW, expand, pick, token_ids_W)
    return _grow_dynamic(plan, root_logits_BW, expand, pick, token_ids_W)


def check_drawn(plan: Plan, drawn: Drawn) -> None:
    """ValueError if drafts that come from there cannot have a shape that is found after they were drawn."""
    if drawn == "sampled" and isinstance(plan, Dynamic):
        raise ValueError(
            "a dynamic tree chooses among its nodes after they were drawn, which biases sampled drafts; draft it by way "
            "'coupled' or 'argmax', or sample a static tree"
        )


def _grow_fixed(
    plan: Fixed, root_logits_BW: Tensor, expand: Expand, pick: Pick, token_ids_W: Tensor | None
) -> Proposal:
    device, batch = root_logits_BW.device, len(root_logits_BW)
    shape = fixed(plan.parents, device)
    if not plan.nodes:
        return Proposal(torch.zeros(batch, 0, dtype=torch.int64, device=device), shape, pick.drawn)
    tokens: list[Tensor] = []  # per depth, (B, children)
    probs: list[Tensor] = []
    logits_BMW = root_logits_BW[:, None]
    for level in _levels(plan.parents, device):
        if level.depth > 0:
            tokens_BM = tokens[-1] if level.expanded_M is None else tokens[-1][:, level.expanded_M]
            visible = None if level.visible_MA is None else level.visible_MA[None]
            logits_BMW = expand(Frontier(level.depth, tokens_BM, level.parents_M[None], visible))
        picked = pick(logits_BMW, level.depth, token_ids_W, level.most)
        parent_C = level.child_parent_C if logits_BMW.shape[1] > 1 else torch.zeros_like(level.child_parent_C)
        tokens.append(picked.tokens_BMk[:, parent_C, level.child_rank_C])
        if picked.probs_BMkV is not None:
            probs.append(picked.probs_BMkV[:, parent_C, level.child_rank_C])
    order_N = _order(plan.parents, device)
    probs_BNV = torch.cat(probs, 1)[:, order_N] if probs else None
    return Proposal(torch.cat(tokens, 1)[:, order_N], shape, pick.drawn, probs_BNV)


@dataclasses.dataclass(frozen=True, slots=True)
class _Level:
    """One depth of a fixed plan.

    Attributes:
        depth: of the nodes expanded; 0 is the root.
        expanded_M: which of this depth's nodes have children; None if all have.
        parents_M, visible_MA: see `Frontier`.
        child_parent_C, child_rank_C: of each child (in node order), which expanded node it hangs under and its rank there.
        most: children that one node has at most.
    """

    depth: int
    expanded_M: Tensor | None
    parents_M: Tensor
    visible_MA: Tensor | None
    child_parent_C: Tensor
    child_rank_C: Tensor
    most: int


@functools.lru_cache(maxsize=64)
def _levels(parents: tuple[int, ...], device: torch.device) -> tuple[_Level, ...]:
    depth = depths(parents)[1:]
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)

    def tensor(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    levels: list[_Level] = []
    rows: dict[int, int] = {}
    for level in range(max(depth)):
        here = [-1] if level == 0 else [node for node, d in enumerate(depth) if d == level]
        expanded = [node for node in here if node in children]
        below = [node for node, d in enumerate(depth) if d == level + 1]
        visible = None
        if level > 0:
            rows |= {node: len(rows) + index for index, node in enumerate(expanded)}
            if not Fixed(parents).is_chain:
                visible = torch.zeros(len(expanded), len(rows), dtype=torch.bool, device=device)
                for index, node in enumerate(expanded):
                    while node >= 0:
                        visible[index, rows[node]] = True
                        node = parents[node]
        levels.append(
            _Level(
                depth=level,
                expanded_M=None if expanded == here else tensor([here.index(node) for node in expanded]),
                parents_M=tensor([rows.get(parents[node], -1) if node >= 0 else -1 for node in expanded]),
                visible_MA=visible,
                child_parent_C=tensor([expanded.index(parents[node]) for node in below]),
                child_rank_C=tensor([children[parents[node]].index(node) for node in below]),
                most=max(len(children[node]) for node in expanded),
            )
        )
    return tuple(levels)


@functools.lru_cache(maxsize=64)
def _order(parents: tuple[int, ...], device: torch.device) -> Tensor:
    """Where each node stands in the list that goes depth by depth."""
    depth = depths(parents)[1:]
    by_depth = sorted(range(len(parents)), key=lambda node: (depth[node], node))
    return torch.tensor([by_depth.index(node) for node in range(len(parents))], dtype=torch.int64, device=device)


def _grow_dynamic(
    plan: Dynamic, root_logits_BW: Tensor, expand: Expand, pick: Pick, token_ids_W: Tensor | None
) -> Proposal:
    batch, width = len(root_logits_BW), min(plan.width, root_logits_BW.shape[-1])
    picked = pick(root_logits_BW[:, None], 0, token_ids_W, width)
    check_drawn(plan, pick.drawn)
    tokens_BC, scores_BC = picked.tokens_BMk[:, 0], picked.scores_BMk[:, 0]
    parents_BC = torch.full_like(tokens_BC, -1)  # the candidate that each candidate hangs under
    newest = slice(0, width)
    row_of_BC = torch.full_like(tokens_BC, -1)  # the expanded row of each candidate, -1 if it was not expanded
    visible_BAA = torch.zeros(batch, 0, 0, dtype=torch.bool, device=tokens_BC.device)
    for depth in range(1, plan.depth):
        best_BM = scores_BC[:, newest].topk(min(width, newest.stop - newest.start)).indices + newest.start
        num_new, before = best_BM.shape[1], visible_BAA.shape[1]
        above_BM = parents_BC.gather(1, best_BM)
        parent_row_BM = torch.where(above_BM < 0, -1, row_of_BC.gather(1, above_BM.clamp_min(0)))
        inherited_BMA = torch.nn.functional.pad(visible_BAA, (0, 0, 1, 0))  # row -1 sees nothing
        inherited_BMA = inherited_BMA.gather(1, (parent_row_BM + 1)[..., None].expand(-1, -1, before))
        self_BMM = torch.eye(num_new, dtype=torch.bool, device=tokens_BC.device).expand(batch, -1, -1)
        visible_BMA = torch.cat([inherited_BMA, self_BMM], 2)
        visible_BAA = torch.cat([torch.nn.functional.pad(visible_BAA, (0, num_new)), visible_BMA], 1)
        row_BM = torch.arange(before, before + num_new, device=tokens_BC.device).expand(batch, -1)
        row_of_BC = row_of_BC.scatter(1, best_BM, row_BM)

        logits_BMW = expand(Frontier(depth, tokens_BC.gather(1, best_BM), parent_row_BM, visible_BMA))
        picked = pick(logits_BMW, depth, token_ids_W, width)
        scores_BMk = scores_BC.gather(1, best_BM)[..., None] + picked.scores_BMk
        tokens_BMk = picked.tokens_BMk.expand_as(scores_BMk)
        newest = slice(newest.stop, newest.stop + scores_BMk[0].numel())
        tokens_BC = torch.cat([tokens_BC, tokens_BMk.flatten(1)], 1)
        scores_BC = torch.cat([scores_BC, scores_BMk.flatten(1)], 1)
        parents_BC = torch.cat([parents_BC, best_BM[..., None].expand_as(scores_BMk).flatten(1)], 1)
        row_of_BC = torch.nn.functional.pad(row_of_BC, (0, scores_BMk[0].numel()), value=-1)
    # Scores never rise along a path and equal ones keep their order, so whoever is chosen, its parent is chosen too.
    best_BN = scores_BC.sort(dim=1, descending=True, stable=True).indices[:, : plan.nodes].sort(dim=1).values
    above_BN = parents_BC.gather(1, best_BN)
    parents_BN = torch.where(above_BN < 0, -1, torch.searchsorted(best_BN, above_BN))
    return Proposal(tokens_BC.gather(1, best_BN), Tree(parents_BN, min(plan.depth, best_BN.shape[1])), pick.drawn)
