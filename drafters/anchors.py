"""Drafting in blocks, trained at some of the starts: which ones.

Of each text at most so many starts are drawn, by a hash of text and epoch (padding, batch composition and resuming cannot
change them), each weighted by how many starts it stands for: the expected gradient is that of all starts, at bounded work.

Letters: J depths, B rows, T places of a row, n starts, X texts.
"""

import torch
from torch import Tensor

from draftsmith.drafters.base import TrainingBatch
from draftsmith.drafters.starts import start_numbers, trained_starts


def anchor_weights(batch: TrainingBatch, depth: int, most: int) -> Tensor:
    """What each start and depth weighs, fp64 (J, B, T), on the host: 0 unless it is supervised and its start was drawn, else the
    number of its text's starts over that of the drawn ones. A start is one whose first depth is supervised.

    Args:
        batch: the training texts.
        depth: J.
        most: starts that are drawn of one text, at most.
    """
    trained_JBT = trained_starts(batch, depth)
    place_n = trained_JBT[0].flatten().nonzero()[:, 0]
    number_n, text_n = start_numbers(batch).flatten()[place_n], batch.layout.text_N[place_n]
    count_X = torch.bincount(text_n, minlength=len(batch.layout.bounds))
    order_n = number_n.argsort(stable=True)
    order_n = order_n[text_n[order_n].argsort(stable=True)]  # by text, and by number within it
    rank_n = torch.arange(len(place_n)) - (count_X.cumsum(0) - count_X)[text_n]
    drawn_n = order_n[rank_n < most]
    scale_N = torch.zeros(batch.layout.ids_BT.numel(), dtype=torch.float64)
    scale_N[place_n[drawn_n]] = (count_X.double() / count_X.clamp(1, most))[text_n[drawn_n]]
    return trained_JBT * scale_N.view_as(trained_JBT[0])
