"""A packed batch as right-padded texts, one a row, and back: for models that know nothing of packing.

A Hugging Face model inside a drafter may be of any architecture, and few of these attend within documents; texts of similar length
are padded together, so that little of its work is wasted.

Letters: B rows, T places of a row, N = B T, X texts, L length of the longest of them, D width.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from draftsmith.drafters.base import TrainingBatch
from draftsmith.drafters.layout import sent

WASTE = 0.2
"""Of a group of texts that are padded together the shortest lacks at most this share of the longest's length."""


def text_by_text(run: Callable[[Tensor], Tensor], batch: TrainingBatch) -> Tensor:
    """What a causal model gives for each token of its text, (B, T, D), 0 at padding.

    Args:
        run: from ids (X, L), padded on the right with any token, to values (X, L, D).
        batch: the training texts.
    """
    bounds = sorted(batch.layout.bounds, key=lambda bound: bound[0] - bound[1])
    groups: list[list[tuple[int, int]]] = []
    for begin, end in bounds:
        longest = groups[-1][0] if groups else (0, 0)
        if end - begin < (1 - WASTE) * (longest[1] - longest[0]) or not groups:
            groups.append([])
        groups[-1].append((begin, end))
    ids_N, places, values = batch.layout.ids_BT.flatten(), [], []
    for group in groups:
        place_XL, real_XL = _places(group)
        out_XLD = run(sent(ids_N[place_XL], batch.ids_BT.device))
        real_n = sent(real_XL.flatten().nonzero()[:, 0], out_XLD.device)
        places.append(place_XL[real_XL])
        values.append(out_XLD.flatten(0, 1).index_select(0, real_n))
    all_nD = torch.cat(values)
    out_ND = all_nD.new_zeros(len(ids_N), all_nD.shape[1])
    return out_ND.index_copy(0, sent(torch.cat(places), all_nD.device), all_nD).unflatten(0, batch.ids_BT.shape)


def one_per_row(batch: TrainingBatch) -> TrainingBatch:
    """The same texts, each in a row of its own, padded on the right with 0."""
    place_XL, real_XL = _places(batch.layout.bounds)
    place_XL, real_XL = sent(place_XL, batch.ids_BT.device), sent(real_XL, batch.ids_BT.device)
    fields = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    rows: dict[str, Any] = {
        name: value.flatten(0, 1)[place_XL] * real_XL.view(*real_XL.shape, *[1] * (value.dim() - 2))
        for name, value in fields.items()
        if isinstance(value, Tensor)
    }
    return TrainingBatch(**rows, epoch=batch.epoch)


def recompute_layers(model: Any, on: bool) -> list[Any]:
    """Whether a Hugging Face model in training mode keeps only what enters its layers, which are returned, and computes the rest
    again in backward. By the attributes that its layers read: the method that sets them has another name in every other version."""
    layers: list[Any] = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for layer in layers:
        layer.gradient_checkpointing = on
        layer._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=False)
    return layers


def apart(x_BT: Tensor, batch: TrainingBatch) -> Tensor:
    """Each text in a row of its own, (X, L), 0 or False behind it."""
    place_XL, real_XL = (sent(x_XL, x_BT.device) for x_XL in _places(batch.layout.bounds))
    return x_BT.flatten()[place_XL] * real_XL


def together(x_XL: Tensor, batch: TrainingBatch) -> Tensor:
    """The inverse, 0 at padding: (B, T)."""
    place_XL, real_XL = _places(batch.layout.bounds)
    real_n = sent(real_XL.flatten().nonzero()[:, 0], x_XL.device)
    out_N = x_XL.new_zeros(batch.ids_BT.numel())
    return out_N.index_copy(0, sent(place_XL[real_XL], x_XL.device), x_XL.flatten()[real_n]).view_as(batch.ids_BT)


def _places(bounds: list[tuple[int, int]] | tuple[tuple[int, int], ...]) -> tuple[Tensor, Tensor]:
    """The places of each text's tokens (X, L), the last one repeated behind them; and which are no repetition."""
    begin_X1, end_X1 = torch.tensor(bounds).T[..., None]
    place_XL = begin_X1 + torch.arange(int((end_X1 - begin_X1).max()))
    return torch.minimum(place_XL, end_X1 - 1), place_XL < end_X1
