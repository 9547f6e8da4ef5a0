"""The gradient of a draft head, summed up over chunks of rows in fp32 (fp64 for fp64), without a second matrix of its size.

In bf16 such a sum would stand still where an addend is below half a rounding step of it.

Letters: r rows, D width, W draft vocabulary, X rows of a block of the head.
"""

import torch
from torch import Tensor

BLOCK_BYTES = 1 << 26
"""The gradient of a head is added up in blocks of about this size, each freed when it has been converted to the head's dtype. Above
32 MiB, where glibc hands freed memory back at once."""
PRODUCT_ELEMENTS = 1 << 21
"""Elements of a head's gradient that are multiplied at once, on a CPU: the product is added while it is in the cache."""


class HeadGradient:
    """The sum of products that all belong to one head (W, D)."""

    def __init__(self, head_WD: Tensor) -> None:
        self._dtype, self._empty, exact = head_WD.dtype, True, exact_dtype(head_WD.dtype)
        size = max(1, BLOCK_BYTES // (head_WD.shape[1] * exact.itemsize))
        self._whole_WD = torch.empty_like(head_WD) if exact == head_WD.dtype else None
        if self._whole_WD is not None:
            self._blocks = list(self._whole_WD.split(size))
        else:
            self._blocks = [torch.empty_like(block_XD, dtype=exact) for block_XD in head_WD.split(size)]

    def add(self, grad_rW: Tensor, scaled_rD: Tensor) -> None:
        """The product of the gradient towards the logits and the states."""
        size, begin = max(1, PRODUCT_ELEMENTS // scaled_rD.shape[1]), 0
        for block_XD in self._blocks:
            for part_XD in block_XD.split(size if grad_rW.device.type == "cpu" else len(block_XD)):
                product_XD = grad_rW[:, begin : begin + len(part_XD)].T @ scaled_rD
                begin += len(part_XD)
                if self._empty:
                    part_XD.copy_(product_XD)
                else:
                    part_XD.add_(product_XD)
        self._empty = False

    def scaled(self, factor: Tensor) -> Tensor:
        """Times a factor, in the head's dtype; what was summed up is gone."""
        if self._empty:
            for block_XD in self._blocks:
                block_XD.zero_()
        if self._whole_WD is not None:
            return self._whole_WD.mul_(factor)
        shape, device = (sum(map(len, self._blocks)), self._blocks[0].shape[1]), self._blocks[0].device
        out_WD, begin = torch.empty(shape, dtype=self._dtype, device=device), 0
        while self._blocks:
            block_XD = self._blocks.pop(0)
            out_WD[begin : begin + len(block_XD)] = block_XD.mul_(factor)
            begin += len(block_XD)
        return out_WD


def exact_dtype(dtype: torch.dtype) -> torch.dtype:
    """What is summed up in."""
    return dtype if dtype == torch.float64 else torch.float32
