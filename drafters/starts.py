"""Where drafters are trained: the places from which they draft, and how a layer runs on these alone.

The draft state at start p and depth j predicts token p + 2 + j. Its teacher is the target's law at m = p + 1 + j, and it counts
where the target itself generated token m + 1 and that token belongs to the text of p. All of this is found on the host (`layout`).

Letters: J depths, B rows, T places of a row, N = B T, n starts or teachers, D width.
"""

import functools

import torch
from torch import Tensor

from draftsmith.drafters.base import TrainingBatch
from draftsmith.drafters.layout import Layout, rounded, sent


def supervised_rows(batch: TrainingBatch) -> Tensor:
    """The places m at which the target generated token m + 1, int64 (n), ascending, on the host; the first of a text has no
    start."""
    return _continued(batch.layout, 1)[0].nonzero()[:, 0] + 1


def trained_starts(batch: TrainingBatch, depth: int, thin: float = 1.0) -> Tensor:
    """Where the draft state at start p and depth j is trained, bool (J, B, T), on the host.

    Deeper depths matter less and may be thinned: depth j is then trained on a share `thin ** j` of the starts, nested and
    chosen by a hash of text and epoch, so that padding, batch composition and resuming cannot change it.
    """
    trained_JN = _continued(batch.layout, depth)
    if thin != 1:
        share_J1 = thin ** torch.arange(depth)[:, None]
        trained_JN &= start_numbers(batch).flatten() < share_J1
    return trained_JN.unflatten(1, batch.layout.ids_BT.shape)


def _continued(layout: Layout, depth: int) -> Tensor:
    """Whether token p + 2 + j is supervised and of the text of p, bool (J, N)."""
    mask_N, text_N = layout.loss_mask_BT.flatten(), layout.text_N
    continued_JN = torch.zeros(depth, len(mask_N), dtype=torch.bool)
    for j in range(min(depth, len(mask_N) - 2)):
        rest = len(mask_N) - 2 - j
        continued_JN[j, :rest] = mask_N[2 + j :] & (text_N[:rest] == text_N[2 + j :]) & (text_N[:rest] >= 0)
    return continued_JN


def start_numbers(batch: TrainingBatch) -> Tensor:
    """One number in [0, 1) per place, (B, T), on the host, from text and epoch alone: for choosing starts at random."""
    return _place_hashes(batch) / 2**32


def element_numbers(batch: TrainingBatch, width: int) -> Tensor:
    """One number in [0, 1) per place and element, (B, T, width), from text and epoch alone: for noise."""
    device = batch.ids_BT.device
    element_D = torch.arange(1, width + 1, device=device)
    return _scramble(sent(_place_hashes(batch), device)[..., None] + element_D * 0x165667B1) / 2**32


def _place_hashes(batch: TrainingBatch) -> Tensor:
    ids_N, position_N = batch.layout.ids_BT.flatten(), batch.layout.position_N
    mixed_N = ids_N * 0x9E3779B1 + ids_N.roll(-1) * 0x85EBCA77 + position_N * 0xC2B2AE3D + batch.epoch * 0x27D4EB2F
    return _scramble(mixed_N).unflatten(0, batch.layout.ids_BT.shape)


def _scramble(values: Tensor) -> Tensor:
    """A hash of each integer, below 2³²."""
    for shift_right, factor in ((15, 0x2C1B3C6D), (12, 0x297A2D39), (15, 1)):
        values = values & 0xFFFFFFFF
        values = (values ^ (values >> shift_right)) * factor
    return values


class Starts:
    """Some places of a batch: where a drafter's layers have to run at all.

    Attributes:
        position_n: int64, their positions in their texts, on the host.
        layout: of the batch.
        device: where their tensors are.
        count: n.

    Args:
        batch: whose places they are.
        place_n: int64, on the host; ascending, a place may occur more than once.
    """

    def __init__(self, batch: TrainingBatch, place_n: Tensor) -> None:
        self.layout, self.device, self.place_n = batch.layout, batch.ids_BT.device, place_n
        self.position_n = self.layout.position_N[self.place_n]
        self.count = len(self.place_n)

    @classmethod
    def where(cls, batch: TrainingBatch, active_BT: Tensor) -> "Starts":
        """The places at which a bool tensor on the host is True."""
        return cls(batch, active_BT.flatten().nonzero()[:, 0])

    @classmethod
    def round_number(cls, batch: TrainingBatch, active_BT: Tensor) -> "Starts":
        """The same; on a CPU the last one is repeated up to a `rounded` number of them."""
        place_n = active_BT.flatten().nonzero()[:, 0]
        if batch.ids_BT.device.type == "cpu" and len(place_n):
            place_n = torch.cat([place_n, place_n[-1:].expand(rounded(len(place_n)) - len(place_n))])
        return cls(batch, place_n)

    @classmethod
    def tokens(cls, batch: TrainingBatch) -> "Starts":
        """The places of all texts: everything but padding."""
        return cls(batch, (batch.layout.text_N >= 0).nonzero()[:, 0])

    @functools.cached_property
    def index_n(self) -> Tensor:
        """`place_n` on the device."""
        return sent(self.place_n, self.device)

    def pick(self, x_BTD: Tensor, offset: int = 0) -> Tensor:
        """What stands at the starts, or so many places behind them: (n, D)."""
        x_ND = x_BTD.flatten(0, 1)
        return x_ND.index_select(0, sent(self.place_n + offset, self.device)) if offset else self.among_places(x_ND)

    def among_places(self, x_ND: Tensor) -> Tensor:
        """The same of places that are in one row already; no copy where the starts are all places."""
        return x_ND if self._everywhere else x_ND.index_select(0, self.index_n)

    def over_places(self, x_nX: Tensor) -> Tensor:
        """What stands at the starts, at all places (N, …), 0 elsewhere; no copy where the starts are all places."""
        if self._everywhere:
            return x_nX
        return x_nX.new_zeros(self.layout.ids_BT.numel(), *x_nX.shape[1:]).index_copy(0, self.index_n, x_nX)

    @functools.cached_property
    def _everywhere(self) -> bool:
        return torch.equal(self.place_n, torch.arange(self.layout.ids_BT.numel()))

    def ids_at(self, offset: int) -> Tensor:
        """The tokens so many places behind the starts, int64 (n), on the device; any token where the batch ends before that."""
        ids_N = self.layout.ids_BT.flatten()
        return sent(ids_N[(self.place_n + offset).clamp_max(len(ids_N) - 1)], self.device)

    def paths(self, count: int) -> Tensor:
        """The tokens behind the starts, so many of each: int64 (n, count)."""
        return torch.stack([self.ids_at(1 + i) for i in range(count)], 1)

    def among(self, others: "Starts") -> Tensor:
        """Which of `others` these are, int64 (n), on the host; all of them must be there."""
        return torch.searchsorted(others.place_n, self.place_n)

    def of(self, others: "Starts", x_nD: Tensor) -> Tensor:
        """What stands at these starts, from what stands at `others`."""
        if torch.equal(self.place_n, others.place_n):
            return x_nD
        return x_nD.index_select(0, sent(self.among(others), self.device))
