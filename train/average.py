"""An exponential moving average of a drafter's weights: steadier than the newest weights, at no cost in training time.

Every process holds the whole average; the weights agree on all of them after each step, so the averages do too.
"""

from pathlib import Path

import safetensors.torch
import torch

from draftsmith.drafters.base import TrainableDrafter

FILE = "average.safetensors"


class Average:
    """average ← d average + (1 - d) weights, behind every step. Starts as the weights are.

    Attributes:
        drafter: the averaged drafter, in fp32 (fp64 for a target in fp64); to evaluate and to save, not to train.
    """

    def __init__(self, decay: float, weights: TrainableDrafter) -> None:
        self.decay = decay
        self.drafter = type(weights)(weights.config, weights.shape)
        first = next(weights.parameters())
        self.drafter.to(first.device, torch.promote_types(first.dtype, torch.float32))
        self.drafter.load_state_dict(weights.state_dict())
        self.drafter.requires_grad_(False).eval()

    @torch.no_grad()
    def update(self, weights: TrainableDrafter, step: int) -> None:
        """Takes in the weights after step 1, 2, …; early steps weigh more, lest the starting weights stay for long."""
        new = 1 - decay_at(self.decay, step)
        for average, weight in zip(self.drafter.parameters(), weights.parameters(), strict=True):
            average.lerp_(weight.to(average.dtype), new)

    def save(self, folder: Path) -> None:
        """Beside accelerate's files, not through it: it reads custom state with pickle."""
        safetensors.torch.save_file(
            {name: tensor.contiguous() for name, tensor in self.drafter.state_dict().items()}, folder / FILE
        )

    def load(self, folder: Path) -> None:
        self.drafter.load_state_dict(safetensors.torch.load_file(folder / FILE))


def decay_at(decay: float, step: int) -> float:
    """The decay of step 1, 2, …: at most (1 + step) / (10 + step), as in TensorFlow's ExponentialMovingAverage."""
    return min(decay, (1 + step) / (10 + step))
