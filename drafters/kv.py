"""Preallocated keys and values of one attention layer, with a write position per row.

Rows of a batch grow at different speeds, so each row has its own length. New entries are written behind it; what a
round rejects is simply overwritten by the next one, because nothing behind a row's length is ever attended to. The
prefix is never copied.

Letters: B rows, H key/value heads, S slots, R new entries per row, E head width.
"""

import dataclasses

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Slots:
    """Where R new entries of each row go, worked out once per forward and shared by all layers.

    Attributes:
        start: the common first slot if all rows are equally long (then a plain slice is written), else None.
        index_BR: int64 (B, R), the slot of each new entry.
        extent: number of slots that can hold something after the write, max(lengths) + R.
    """

    start: int | None
    index_BR: Tensor
    extent: int


def slots_behind(lengths: list[int], num_new: int, device: torch.device) -> Slots:
    """Slots for `num_new` entries behind each row's length."""
    lengths_B = torch.tensor(lengths, device=device)
    index_BR = lengths_B[:, None] + torch.arange(num_new, device=device)
    same = min(lengths) == max(lengths)
    return Slots(lengths[0] if same else None, index_BR, max(lengths) + num_new)


def with_rows(lengths: list[int], rows_B: Tensor, others: list[int]) -> list[int]:
    """The lengths after rows B have been replaced by others."""
    replaced = dict(zip(rows_B.tolist(), others, strict=True))
    return [replaced.get(row, length) for row, length in enumerate(lengths)]


class KeyValues:
    """Keys and values (B, H, S, E) of one layer."""

    def __init__(
        self, batch: int, heads: int, capacity: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        # Zeros, not empty: unused slots are masked, but a mask cannot hide a NaN that the memory happened to hold.
        self.keys_BHSE = torch.zeros(batch, heads, capacity, width, dtype=dtype, device=device)
        self.values_BHSE = torch.zeros_like(self.keys_BHSE)

    def write(self, keys_BHRE: Tensor, values_BHRE: Tensor, slots: Slots) -> tuple[Tensor, Tensor]:
        """Writes the new entries and returns views (B, H, extent, E) of all slots written so far."""
        for buffer, new in ((self.keys_BHSE, keys_BHRE), (self.values_BHSE, values_BHRE)):
            if slots.start is not None:
                buffer[:, :, slots.start : slots.start + new.shape[2]] = new
            else:
                rows_B1 = torch.arange(len(new), device=new.device)[:, None]
                buffer[rows_B1, :, slots.index_BR.to(new.device)] = new.transpose(1, 2)
        return self.keys_BHSE[:, :, : slots.extent], self.values_BHSE[:, :, : slots.extent]

    def move(self, source_BA: Tensor, destination_BA: Tensor) -> None:
        """Copies A entries per row from slots `source_BA` to `destination_BA` (both int64), reading all before writing."""
        device = self.keys_BHSE.device  # a model's layers may lie on several
        source_BA, destination_BA = source_BA.to(device), destination_BA.to(device)
        rows_B1 = torch.arange(len(source_BA), device=device)[:, None]
        for buffer in (self.keys_BHSE, self.values_BHSE):
            buffer[rows_B1, :, destination_BA] = buffer[rows_B1, :, source_BA]

    def replace(self, rows_B: Tensor, other: "KeyValues") -> None:
        """Overwrites the given batch rows with those of `other`."""
        rows_B = rows_B.to(self.keys_BHSE.device)
        self.keys_BHSE[rows_B], self.values_BHSE[rows_B] = other.keys_BHSE, other.values_BHSE

    def select(self, rows_B: Tensor) -> None:
        """Keeps only the given batch rows."""
        rows_B = rows_B.to(self.keys_BHSE.device)
        self.keys_BHSE, self.values_BHSE = self.keys_BHSE[rows_B], self.values_BHSE[rows_B]
