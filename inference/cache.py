"""The target's key/value cache: preallocated, a length per row, commit and roll-back without copying the prefix.

A forward of R rows writes its keys and values behind each row's length. `commit` then says how many of them stay; what is not
committed is overwritten by the next forward. It plugs into Hugging Face models as their cache object.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from draftsmith.drafters.kv import KeyValues, Slots, slots_behind


class KVCache(Cache):
    """Keys and values of all layers for B rows of up to `capacity` tokens; layers are allocated at their first use."""

    def __init__(self, batch: int, capacity: int) -> None:
        super().__init__(layers=[])
        self.capacity = capacity
        self.lengths = [0] * batch
        """Committed tokens of each row."""
        self._layers: dict[int, KeyValues] = {}
        self._slots: Slots | None = None

    def begin(self, num_new: int, device: torch.device, behind: int = 0) -> Slots:
        """Says that the next forward brings `num_new` rows per sequence, behind the committed ones and `behind` others; ValueError
        if they do not fit."""
        if (needed := max(self.lengths) + behind + num_new) > self.capacity:
            raise ValueError(
                f"the cache holds {self.capacity} tokens and is asked for {needed}; "
                "allocate it larger (prompt + new tokens + draft length)"
            )
        self._slots = slots_behind([length + behind for length in self.lengths], num_new, device)
        return self._slots

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Called by the model's attention layers: stores (B, H, R, E) and returns everything written so far."""
        assert self._slots is not None, "begin() comes before a forward"
        if layer_idx not in self._layers:
            batch, heads, _, width = key_states.shape
            buffers = KeyValues(batch, heads, self.capacity, width, key_states.dtype, key_states.device)
            if value_states.shape[-1] != width:
                buffers.values_BHSE = value_states.new_zeros(batch, heads, self.capacity, value_states.shape[-1])
            self._layers[layer_idx] = buffers
        return self._layers[layer_idx].write(key_states, value_states, self._slots)

    @torch.inference_mode()  # as the forward that allocated the buffers
    def commit(self, counts: list[int], rows_BA: Tensor | None = None) -> None:
        """Keeps what the last forward brought: the first `counts[b]` rows of sequence b.

        Args:
            counts: number of rows kept, the root included.
            rows_BA: int64, which rows are kept, in path order; None if they are 0, 1, 2, … (a chain), which moves nothing.
        """
        if rows_BA is not None:
            assert self._slots is not None
            source_BA = self._slots.index_BR.gather(1, rows_BA)
            destination_BA = self._slots.index_BR[:, : rows_BA.shape[1]]
            for buffers in self._layers.values():
                buffers.move(source_BA, destination_BA)
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    @torch.inference_mode()
    def replace(self, rows_B: Tensor, other: "KVCache") -> None:
        """Gives the given batch rows the contents of `other`, whose batch they are, for sequences that join later."""
        for layer, buffers in self._layers.items():
            buffers.replace(rows_B, other._layers[layer])
        for row, length in zip(rows_B.tolist(), other.lengths, strict=True):
            self.lengths[row] = length

    def select(self, rows_B: Tensor) -> None:
        """Keeps only the given batch rows, for when others have finished."""
        for buffers in self._layers.values():
            buffers.select(rows_B)
        self.lengths = [self.lengths[row] for row in rows_B.tolist()]

    def used_layers(self) -> set[int]:
        """The layer indices that have stored something."""
        return set(self._layers)

    def contents(self, layer: int, row: int) -> tuple[Tensor, Tensor]:
        """Committed keys and values (H, length, E) of one row, for audits."""
        buffers, length = self._layers[layer], self.lengths[row]
        return buffers.keys_BHSE[row, :, :length], buffers.values_BHSE[row, :, :length]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return max(self.lengths)
