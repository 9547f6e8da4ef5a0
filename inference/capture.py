"""Looking into a model that runs: hooks on its decoder layers, and an environment flag for the time of a call."""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from draftsmith.drafters.base import LayerId


def hook(layers: nn.ModuleList, wanted: Iterable[LayerId], captured: dict[LayerId, Tensor]) -> list[RemovableHandle]:
    """Notes the residual stream entering layer i (or leaving the last one) in `captured` at every call from now on."""

    def entering(index: int) -> Callable[..., None]:
        def note(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            captured[index] = args[0] if args else kwargs["hidden_states"]

        return note

    def leaving(_module: nn.Module, _args: Any, output: Any) -> None:
        captured[len(layers)] = output[0] if isinstance(output, tuple) else output

    handles = []
    for layer in wanted:
        if layer == len(layers):
            handles.append(layers[-1].register_forward_hook(leaving))
        elif layer != "last":
            handles.append(layers[layer].register_forward_pre_hook(entering(layer), with_kwargs=True))
    return handles


@contextmanager
def capture(layers: nn.ModuleList, wanted: Iterable[LayerId]) -> Iterator[dict[LayerId, Tensor]]:
    """Hooks for the time of one call."""
    captured: dict[LayerId, Tensor] = {}
    handles = hook(layers, wanted, captured)
    try:
        yield captured
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def grouped_attention(device: torch.device) -> Iterator[None]:
    """On a CPU, lets query heads share keys and values in masked calls too, for the time of one call: transformers would copy all
    of them once per query head, because other devices' kernels want that."""
    name = "TRANSFORMERS_SDPA_FORCE_GQA"
    before = os.environ.get(name)
    if device.type == "cpu":
        os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before
