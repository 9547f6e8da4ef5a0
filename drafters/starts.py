"""Where drafters are trained: the positions from which they draft, and how a layer runs on these alone.

The draft state at start p and depth j predicts token p + 2 + j. Its teacher is the target's law at m = p + 1 + j, and it counts
where the target itself generated token m + 1.

Letters: J depths, B sequences, T positions, n supervised rows (b, m) or starts (b, p), A starts of one sequence, D width.
"""

import torch
from torch import Tensor, nn

from draftsmith.drafters.base import TrainingBatch


def supervised_rows(batch: TrainingBatch) -> tuple[Tensor, Tensor]:
    """Rows b and columns m (int64, n each) at which the target generated token m + 1; m = 0 has no draft start."""
    rows_n, columns_n = batch.loss_mask_BT[:, 2:].nonzero(as_tuple=True)
    return rows_n, columns_n + 1


def trained_starts(batch: TrainingBatch, depth: int, thin: float = 1.0) -> Tensor:
    """Where the draft state at start p and depth j is trained, bool (J, B, T).

    Deeper depths matter less and may be thinned: depth j is then trained on a share `thin ** j` of the starts, nested and
    chosen by a hash of text and epoch, so that padding, batch composition and resuming cannot change it.
    """
    mask_BT = batch.loss_mask_BT
    shift = nn.functional.pad
    trained_JBT = torch.stack([shift(mask_BT[:, 2 + j :], (0, min(2 + j, mask_BT.shape[1]))) for j in range(depth)])
    if thin == 1:
        return trained_JBT
    share_J11 = thin ** torch.arange(depth, device=mask_BT.device)[:, None, None]
    return trained_JBT & (start_numbers(batch) < share_J11)


def start_numbers(batch: TrainingBatch) -> Tensor:
    """One number in [0, 1) per position, (B, T), from text and epoch alone: for choosing starts at random."""
    return _position_hashes(batch) / 2**32


def element_numbers(batch: TrainingBatch, width: int) -> Tensor:
    """One number in [0, 1) per position and element, (B, T, width), from text and epoch alone: for noise."""
    element_D = torch.arange(1, width + 1, device=batch.ids_BT.device)
    return _scramble(_position_hashes(batch)[..., None] + element_D * 0x165667B1) / 2**32


def _position_hashes(batch: TrainingBatch) -> Tensor:
    ids_BT = batch.ids_BT
    position_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
    mixed_BT = (
        ids_BT * 0x9E3779B1 + ids_BT.roll(-1, 1) * 0x85EBCA77 + position_T * 0xC2B2AE3D + batch.epoch * 0x27D4EB2F
    )
    return _scramble(mixed_BT)


def _scramble(values: Tensor) -> Tensor:
    """A hash of each integer, below 2³²."""
    for shift_right, factor in ((15, 0x2C1B3C6D), (12, 0x297A2D39), (15, 1)):
        values = values & 0xFFFFFFFF
        values = (values ^ (values >> shift_right)) * factor
    return values


class Starts:
    """Some of the B x T starts as n rows: where a drafter's layers have to run at all.

    Attributes:
        rows_n, starts_n: int64, sequence and start.
        slots_n: int64, place of a start among those of its sequence.
        count: n.
        most: A, the largest number of starts in one sequence.
    """

    def __init__(self, active_BT: Tensor) -> None:
        self.active_BT = active_BT
        self.batch, self.width = active_BT.shape
        self.rows_n, self.starts_n = active_BT.nonzero(as_tuple=True)
        self.count = len(self.rows_n)
        slots_BT = active_BT.cumsum(1) - 1
        self.slots_n = slots_BT[self.rows_n, self.starts_n]
        self.most = max(1, int(slots_BT.max()) + 1)

    def pick(self, x_BTD: Tensor) -> Tensor:
        """What stands at the starts: (n, D)."""
        return x_BTD.flatten(0, 1).index_select(0, self.rows_n * self.width + self.starts_n)

    def place(self, x_nD: Tensor) -> Tensor:
        """The inverse, 0 elsewhere: (B, T, D)."""
        flat_ND = x_nD.new_zeros(self.batch * self.width, x_nD.shape[1])
        return flat_ND.index_copy(0, self.rows_n * self.width + self.starts_n, x_nD).unflatten(0, (self.batch, -1))

    def pad(self, x_nD: Tensor) -> Tensor:
        """One row per sequence, its starts moved to the left, 0 behind them: (B, A, D)."""
        flat_ND = x_nD.new_zeros(self.batch * self.most, x_nD.shape[1])
        return flat_ND.index_copy(0, self.rows_n * self.most + self.slots_n, x_nD).unflatten(0, (self.batch, -1))

    def unpad(self, x_BAD: Tensor) -> Tensor:
        """The inverse: (n, D)."""
        return x_BAD.flatten(0, 1).index_select(0, self.rows_n * self.most + self.slots_n)

    def among(self, others: "Starts") -> Tensor:
        """Which rows of `others` these are, int64 (n); all of them must be there."""
        return self.active_BT[others.rows_n, others.starts_n].nonzero()[:, 0]
