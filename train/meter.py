"""What a window of training steps says at its log line: the loss and its like, and what the time went into.

    speed/supervised_tokens_per_second    tokens that count in the loss, all processes together
    speed/tokens_per_second               all tokens, prompts included
    speed/…_per_process                   each of these divided by the number of processes
    speed/step_seconds                    an optimizer step
    speed/model_tflops_per_device         10^12 FLOPs of the model per second (see below)
    speed/mfu                             that over the device's peak, where it is known
    speed/data_wait_share                 share of the time in which the loop waits for batches (online: in which the target is
                                          asked; on a GPU that returns before the target is done)
    speed/evaluation_share                share of the whole run's time so far that went into evaluation
    memory/allocated_peak_gb, memory/reserved_peak_gb    of the fullest GPU, since the last line
    memory/rss_peak_gb                    on a CPU: of the largest process, since its start

Evaluation is in none of them but its own. FLOPs are counted by a formula (Kaplan et al. 2020, arXiv 2001.08361): 6 per parameter
of a matrix and position that it is applied to, forward and backward (`TrainableDrafter.training_flops`), and 2 for the frozen
target where it runs in the step. Attention scores, norms and optimizer are left out, and so is what a compiler saves.
"""

import contextlib
import re
import resource
import sys
from collections.abc import Callable, Iterator
from time import perf_counter

import torch
from accelerate import Accelerator
from torch import Tensor

from draftsmith.drafters.base import Load, TrainableDrafter
from draftsmith.drafters.losses import summarise
from draftsmith.inference.target import Target
from draftsmith.train.clock import Clock

PEAK_TFLOPS = {
    ("B200",): 2250.0,  # https://www.nvidia.com/en-us/data-center/hgx/
    ("H200",): 989.0,  # https://www.nvidia.com/en-us/data-center/h200/
    ("GH200",): 989.0,  # https://www.nvidia.com/en-us/data-center/grace-hopper-superchip/
    ("H100", "PCIe"): 756.0,  # https://www.nvidia.com/en-us/data-center/h100/
    ("H100", "NVL"): 835.0,
    ("H100",): 989.0,
    ("A100",): 312.0,  # https://www.nvidia.com/en-us/data-center/a100/
    ("L40S",): 362.0,  # https://www.nvidia.com/en-us/data-center/l40s/
    ("L4",): 121.0,  # https://www.nvidia.com/en-us/data-center/l4/
    ("A40",): 149.7,  # https://www.nvidia.com/en-us/data-center/a40/
    ("A30",): 165.0,  # https://www.nvidia.com/en-us/data-center/products/a30-gpu/
    ("A10",): 125.0,  # https://www.nvidia.com/en-us/data-center/products/a10-gpu/
    ("MI300X",): 1307.4,  # https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html
}
"""Dense bf16, by words of the name that the device gives itself; the first that fits counts. Where a page gives it with sparsity
it is half of that."""


class Meter:
    """Sums since the last log line; nothing is read from a device before `close`.

    Args:
        accelerator: whose processes are summed over.
        clock: of the run.
        flops: of the model on a batch.
        peak: of a device in 10^12 FLOP/s; None if it is not known.
    """

    def __init__(
        self, accelerator: Accelerator, clock: Clock, flops: Callable[[Load], float], peak: float | None
    ) -> None:
        self.accelerator, self.clock, self.flops, self.peak = accelerator, clock, flops, peak
        self._begin()

    def _begin(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._supervised: list[int] = []
        self._tokens, self._flops, self._waited = 0, 0.0, 0.0
        self._start = self.clock.training_seconds
        if self.accelerator.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.accelerator.device)

    def step(self) -> None:
        """A step begins."""
        self._supervised.append(0)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Around what gets a batch."""
        begin = perf_counter()
        yield
        self._waited += perf_counter() - begin

    def add(self, metrics: dict[str, Tensor], load: Load) -> None:
        """A micro-batch of this process is done."""
        for name, value in metrics.items():
            self._sums[name] = self._sums[name] + value if name in self._sums else value.clone()
        self._supervised[-1] += load.supervised
        self._tokens += load.tokens
        self._flops += self.flops(load)

    def close(self) -> tuple[dict[str, float], list[int]]:
        """The figures of the window, the same on all processes, and the tokens that were supervised in each of its steps; the next
        window begins."""
        accelerator = self.accelerator
        sums = {name: accelerator.reduce(value, "sum") for name, value in self._sums.items()}
        elapsed, memory = self.clock.training_seconds - self._start, self._memory()
        mine = [self._tokens, self._flops, self._waited, elapsed, *memory.values(), *self._supervised]
        row = torch.tensor(mine, dtype=torch.float64, device=accelerator.device)
        columns = list(zip(*accelerator.gather(row[None]).tolist(), strict=True))
        num = accelerator.num_processes
        tokens, flops, waited, seconds = (sum(column) for column in columns[:4])
        seconds /= num
        peaks, supervised = columns[4 : 4 + len(memory)], [int(sum(column)) for column in columns[4 + len(memory) :]]
        tflops = flops / seconds / num / 1e12
        values = summarise(sums) | {
            "loss": float((sums["loss"] / sums["supervised"].clamp_min(1)).mean()),
            "speed/supervised_tokens_per_second": sum(supervised) / seconds,
            "speed/tokens_per_second": tokens / seconds,
            "speed/supervised_tokens_per_second_per_process": sum(supervised) / seconds / num,
            "speed/tokens_per_second_per_process": tokens / seconds / num,
            "speed/step_seconds": seconds / len(supervised),
            "speed/model_tflops_per_device": tflops,
            "speed/data_wait_share": waited / num / seconds,
            "speed/evaluation_share": self.clock.evaluation_seconds / self.clock.seconds,
        }
        if self.peak is not None:
            values["speed/mfu"] = tflops / self.peak
        values |= {name: max(column) for name, column in zip(memory, peaks, strict=True)}
        self._begin()
        return values, supervised

    def _memory(self) -> dict[str, float]:
        """Peaks in GB."""
        device = self.accelerator.device
        if device.type == "cuda":
            return {
                "memory/allocated_peak_gb": torch.cuda.max_memory_allocated(device) / 1e9,
                "memory/reserved_peak_gb": torch.cuda.max_memory_reserved(device) / 1e9,
            }
        unit = 1 if sys.platform == "darwin" else 1024
        return {"memory/rss_peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9}


def batch_flops(drafter: TrainableDrafter, target: Target | None) -> Callable[[Load], float]:
    """FLOPs of the model in training on a batch.

    Args:
        drafter: in training.
        target: if it runs in the step, else None.
    """
    training, forward = drafter.training_flops(), 0.0 if target is None else 2.0 * target_matrices(target)
    return lambda load: training(load) + forward * load.tokens


def target_matrices(target: Target) -> int:
    """The target's parameters that multiply: all but its embedding, unless that is its head as well."""
    total = sum(parameter.numel() for parameter in target.model.parameters())
    embedding, head = target.model.get_input_embeddings().weight, target.head_weight()
    return total - (0 if embedding is head or embedding.data_ptr() == head.data_ptr() else embedding.numel())


def peak_tflops(device: torch.device, given: float | None) -> float | None:
    """The peak of a device: what the config says, or what its name says; None if neither does."""
    if given is not None or device.type != "cuda":
        return given
    return known_peak(torch.cuda.get_device_name(device))


def known_peak(name: str) -> float | None:
    """The peak of the device of that name."""
    words = set(re.split(r"[ -]", name))
    return next((peak for wanted, peak in PEAK_TFLOPS.items() if words >= set(wanted)), None)
