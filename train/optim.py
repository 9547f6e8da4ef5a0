"""What a training step does with gradients: the optimizers of the config, and the course of their learning rate."""

import math
from typing import Any

import torch

from draftsmith.drafters.base import Pace, TrainableDrafter
from draftsmith.train.config import OptimConfig


def make_optimizers(drafter: TrainableDrafter, config: OptimConfig) -> list[torch.optim.Optimizer]:
    """AdamW alone, or Muon (Jordan et al. 2024) for the inner matrices and AdamW for embeddings, heads, norms, biases, single rows
    and what has a pace of its own (a low-rank adapter is only a factor of the matrix that Muon is meant for).

    Each parameter group carries `peak`, the learning rate that the schedule scales, and `start`, where the schedule begins.
    """
    inner: list[torch.nn.Parameter] = []
    others: dict[tuple[float, Pace], list[torch.nn.Parameter]] = {}  # by weight decay and pace
    embeddings = {id(module.weight) for module in drafter.modules() if isinstance(module, torch.nn.Embedding)}
    for name, parameter in drafter.named_parameters():
        if parameter.requires_grad:
            pace = drafter.pace(name)
            is_matrix = parameter.dim() == 2 and min(parameter.shape) > 1
            is_inner = is_matrix and "lm_head" not in name and id(parameter) not in embeddings
            if config.name == "muon" and is_inner and pace == Pace():
                inner.append(parameter)
            else:
                decay = config.weight_decay if parameter.dim() >= 2 else 0.0
                others.setdefault((decay, pace), []).append(parameter)
    beta1, beta2 = config.betas
    groups = [
        {"params": some, "weight_decay": decay, "peak": config.learning_rate * pace.rate, "start": pace.start}
        for (decay, pace), some in others.items()
    ]
    optimizers: list[torch.optim.Optimizer] = []
    if groups:
        optimizers.append(torch.optim.AdamW(groups, betas=(beta1, beta2), fused=True))
    if inner:
        rate = config.muon_learning_rate
        muon = torch.optim.Muon(inner, lr=rate, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw")
        muon.param_groups[0] |= {"peak": rate, "start": 0.0}
        optimizers.append(muon)
    return optimizers


def set_rates(optimizers: list[Any], position: float, num_steps: int, config: OptimConfig) -> None:
    """Gives every parameter group its learning rate. Those that do not train yet lose their gradients, so that neither the norm nor
    AdamW's moments know of them."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            waiting = round(group["start"] * num_steps)
            group["lr"] = group["peak"] * schedule(max(0, position - waiting), num_steps - waiting, config)
            if position < waiting:
                for parameter in group["params"]:
                    parameter.grad = None


def schedule(position: float, num_steps: int, config: OptimConfig) -> float:
    """Share of the peak learning rate: a linear warm-up, then what `config.schedule` names. A function of the position alone, so
    there is no state to lose.

    Args:
        position: steps done so far; under a time budget what they would be at an even pace, so it need not be whole.
        num_steps: of the whole run.
        config: names the schedule.
    """
    warmup = config.warmup * num_steps
    if position < warmup:
        return (position + 1) / (warmup + 1)
    if config.schedule == "constant":
        return 1.0
    begin = warmup if config.decay_share is None else (1 - config.decay_share) * num_steps  # of the way down
    along = min(1.0, max(0.0, position - begin) / max(1, num_steps - begin))
    down = 0.5 * (1 + math.cos(math.pi * along)) if config.schedule == "cosine" else 1 - along
    return config.final + (1 - config.final) * down
