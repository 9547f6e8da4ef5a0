"""Compiles what training runs (`torch.compile`), in place: parameters and checkpoints keep their names.

Compiled is what happens around attention (norms, rotary positions, gated MLPs, residual blocks), the layers of a draft LM, and
what the loss does between its products. Not whole forwards: which rows of which texts are trained is worked out on the host,
differently for every batch, so a graph of all of it would be compiled again and again.
"""

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from draftsmith.drafters import fused
from draftsmith.drafters.base import TrainableDrafter
from draftsmith.drafters.layers import MLP, Attention, ResidualBlock, RMSNorm


def compile_training(drafter: TrainableDrafter, on: bool) -> None:
    """Compiles a drafter that is about to be trained, and the loss, for batches of any size; or sees to it that the loss is not."""
    fused.use_compiled(on)
    if on:
        compile_layers(drafter)


def compile_layers(drafter: TrainableDrafter, backend: str = "inductor") -> None:
    """The drafter's part of it."""
    for module in drafter.modules():
        if isinstance(module, Attention):
            module.queries = torch.compile(module.queries, dynamic=True, backend=backend)  # type: ignore[method-assign]
            module.keys = torch.compile(module.keys, dynamic=True, backend=backend)  # type: ignore[method-assign]
        elif isinstance(module, MLP | RMSNorm | ResidualBlock | GradientCheckpointingLayer):
            module.compile(dynamic=True, backend=backend)
