"""Drafting in blocks, trained at some of the starts: which ones, and how all blocks of a sequence attend at once.

Of each sequence at most so many starts are drawn, by a hash of text and epoch (padding, batch composition and resuming cannot
change them), each weighted by how many starts it stands for: the expected gradient is that of all starts, at bounded work.

Letters: J depths, B sequences, T positions, n anchors (drawn starts), A anchors of one sequence, Q block entries, R entries that
attend together, S keys, H heads, E head width, X = H E.
"""

import torch
from torch import Tensor

from draftsmith.drafters.base import TrainingBatch
from draftsmith.drafters.layers import Attention
from draftsmith.drafters.starts import Starts, start_numbers, trained_starts

GROUP_QUERIES = 512
"""R of a sequence at most: bounds the mask, and how many keys of other blocks are computed only to be masked."""


def anchor_weights(batch: TrainingBatch, depth: int, most: int) -> Tensor:
    """What each start and depth weighs, fp64 (J, B, T): 0 unless it is supervised and its start was drawn, else the number of its
    sequence's starts over that of the drawn ones. A start is one whose first depth is supervised.

    Args:
        batch: the training sequences.
        depth: J.
        most: starts that are drawn of one sequence, at most.
    """
    trained_JBT = trained_starts(batch, depth)
    starts_BT = trained_JBT[0]
    order_BT = start_numbers(batch).masked_fill(~starts_BT, 2.0).argsort(dim=1, stable=True)
    drawn_BT = starts_BT & (order_BT.argsort(1) < most)
    scale_B1 = starts_BT.sum(1, keepdim=True).double() / drawn_BT.sum(1, keepdim=True).clamp_min(1)
    return (trained_JBT & drawn_BT) * scale_B1


class Blocks:
    """One block of Q entries behind each anchor. Its entries see the context up to the anchor's start, and each other."""

    def __init__(self, anchors: Starts, num_entries: int) -> None:
        self.anchors, self.num_entries = anchors, num_entries
        self.groups: list[tuple[slice, int, Tensor]] = []
        """Anchors that attend together, how much context any of them sees, and what each entry sees: bool (B, R, context + R)."""
        start_BA = anchors.pad(anchors.starts_n[:, None])[..., 0]
        size = max(1, GROUP_QUERIES // num_entries)
        for begin in range(0, anchors.most, size):
            group = slice(begin, min(begin + size, anchors.most))
            extent = int(start_BA[:, group].max()) + 1
            context_BAS = start_BA[:, group, None] >= torch.arange(extent, device=start_BA.device)
            own_AA = torch.eye(group.stop - begin, dtype=torch.bool, device=start_BA.device)
            own_RR = own_AA.repeat_interleave(num_entries, 0).repeat_interleave(num_entries, 1)
            seen_BRS = torch.cat(
                [context_BAS.repeat_interleave(num_entries, 1), own_RR.expand(anchors.batch, -1, -1)], 2
            )
            self.groups.append((group, extent, seen_BRS))

    def attend(
        self, attention: Attention, context: tuple[Tensor, Tensor], query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """What the entries read, (n, Q, X), from the context's keys and values (B, T, H, E) and their own (n, Q, H, E)."""
        query_BAQHE, *own = (
            self.anchors.pad(x_nQHE.flatten(1)).unflatten(2, x_nQHE.shape[1:]) for x_nQHE in (query, key, value)
        )
        read: list[Tensor] = []
        for group, extent, seen_BRS in self.groups:
            key_BHSE, value_BHSE = (
                torch.cat([there[:, :extent], here[:, group].flatten(1, 2)], 1).transpose(1, 2)
                for there, here in zip(context, own, strict=True)
            )
            read.append(attention.mix(query_BAQHE[:, group].flatten(1, 2), key_BHSE, value_BHSE, seen_BRS))
        read_BAX = torch.cat(read, 1).unflatten(1, (-1, self.num_entries)).flatten(2)
        return self.anchors.unpad(read_BAX).unflatten(1, (self.num_entries, -1))
