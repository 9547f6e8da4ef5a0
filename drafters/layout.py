"""Where the texts of a training batch lie: one or more in a row, one behind the other, padding only behind the last.

It lives on the host, whatever device the batch is on: all index arithmetic of training is done here and in `starts`, and what a
device needs of it is sent there. So no index ever waits for an answer from the device.

Letters: B rows, T places of a row, N = B T places of all rows one behind the other, n some of these.
"""

import dataclasses
import functools
from collections.abc import Sequence

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """The texts of a batch; a place is counted through all rows, 0 to N - 1.

    Attributes:
        ids_BT: int64, on the CPU.
        loss_mask_BT: bool, on the CPU.
        bounds: first place of each text and the one behind its last, ascending.
    """

    ids_BT: Tensor
    loss_mask_BT: Tensor
    bounds: tuple[tuple[int, int], ...]

    @property
    def num_supervised(self) -> int:
        """Tokens that count in a loss: supervised ones from the third of a text on."""
        mask_N = self.loss_mask_BT.flatten()
        return sum(int(mask_N[begin + 2 : end].sum()) for begin, end in self.bounds)

    @functools.cached_property
    def text_N(self) -> Tensor:
        """int64, which text a place belongs to; -1 for padding."""
        text_N = torch.full((self.ids_BT.numel(),), -1)
        for number, (begin, end) in enumerate(self.bounds):
            text_N[begin:end] = number
        return text_N

    @functools.cached_property
    def position_N(self) -> Tensor:
        """int64, place of a token in its own text; 0 for padding."""
        position_N = torch.zeros(self.ids_BT.numel(), dtype=torch.int64)
        for begin, end in self.bounds:
            position_N[begin:end] = torch.arange(end - begin)
        return position_N

    @functools.cached_property
    def begins_N(self) -> Tensor:
        """int64, the first place of the text that a place belongs to."""
        return torch.arange(self.ids_BT.numel()) - self.position_N


def one_text_per_row(ids_BT: Tensor, loss_mask_BT: Tensor) -> Layout:
    """The layout of a batch in which nothing is packed; what may be padding counts as a text's end, which changes nothing."""
    num_rows, width = ids_BT.shape
    return Layout(ids_BT.cpu(), loss_mask_BT.cpu(), tuple((b * width, (b + 1) * width) for b in range(num_rows)))


def packed(ids: Sequence[Sequence[int]], loss_masks: Sequence[Sequence[bool]]) -> Layout:
    """Texts one behind the other in one row."""
    bounds, end = [], 0
    for text in ids:
        bounds.append((end, end + len(text)))
        end += len(text)
    ids_1T = torch.tensor([token for text in ids for token in text], dtype=torch.int64)[None]
    mask_1T = torch.tensor([supervised for mask in loss_masks for supervised in mask], dtype=torch.bool)[None]
    return Layout(ids_1T, mask_1T, tuple(bounds))


def rounded(count: int) -> int:
    """So many rows, filled up to one of few numbers, eight between a power of two and the next, at most an eighth more.

    On a CPU a product of other sizes than any before it has a kernel made for it, which takes as long as many products, and the
    kernels of all sizes are kept, some MB each: training on packs that are all different would be slower and grow without end.
    """
    step = max(64, 1 << max(0, count.bit_length() - 4))
    return -(-count // step) * step


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device; nobody waits for it to arrive."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
