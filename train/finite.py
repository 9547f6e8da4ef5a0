"""Stops a run at the first loss, gradient or feature that is not finite, and writes the batch aside.

No device is asked in a step: the loss of each micro-batch, whether its features are finite, and the step's gradient norm stay
where they are until `check` reads them all at once, at a log line, before an evaluation and before a checkpoint. So no checkpoint
is written behind a bad step, and what is not finite is found at most `loop.log_every` steps later.
"""

import dataclasses
import json
import math
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from accelerate import Accelerator
from torch import Tensor

from draftsmith.drafters.base import TrainingBatch
from draftsmith.drafters.checkpoint import write_text
from draftsmith.train.data import Sequence

SHOWN = 8
"""Places of a tensor that are named."""


class _MicroBatch(NamedTuple):
    step: int
    number: int
    indices: list[int]
    sequences: SequenceOf[Sequence]
    again: Callable[[], TrainingBatch]


class Finite:
    """Watches a run's numbers.

    Args:
        accelerator: whose processes stop together.
        folder: of the run; what is bad goes to bad-batch/ in it.
    """

    def __init__(self, accelerator: Accelerator, folder: Path) -> None:
        self.accelerator, self.folder = accelerator, folder / "bad-batch"
        self._batches: list[_MicroBatch] = []
        self._seen: list[Tensor] = []  # of each micro-batch: loss, and 1 if its features are finite
        self._norms: list[tuple[int, Tensor]] = []

    def micro_batch(
        self,
        step: int,
        indices: SequenceOf[int],
        sequences: SequenceOf[Sequence],
        batch: TrainingBatch,
        loss: Tensor,
        again: Callable[[], TrainingBatch],
    ) -> None:
        """Takes note of a micro-batch of the step 1, 2, …

        Args:
            indices: its conversations among the training sequences.
            sequences: what they say.
            batch: made of them; not kept.
            loss: scalar.
            again: makes the same batch once more.
        """
        number = 1 + sum(1 for other in self._batches if other.step == step)
        self._batches.append(_MicroBatch(step, number, [*indices], sequences, again))
        values = [value for value in _tensors(batch).values() if value.is_floating_point() and value.numel()]
        # Far cheaper than `isfinite` of everything, which knows no vector instructions for bf16 on a CPU.
        finite = torch.stack([torch.stack(value.aminmax()).isfinite().all() for value in values]).all()
        self._seen.append(torch.stack([loss.detach().double(), finite.double()]))

    def stepped(self, step: int, norm: Tensor | float) -> None:
        """Takes note of the gradient norm of the step 1, 2, …"""
        self._norms.append((step, torch.as_tensor(norm, dtype=torch.float64, device=self.accelerator.device)))

    def check(self) -> None:
        """Looks at everything since the last check.

        Raises:
            ValueError: something is not finite, on this process or another one; says what, where, and what to do.
        """
        if not self._batches and not self._norms:
            return
        norms = torch.stack([norm for _, norm in self._norms]) if self._norms else torch.zeros(0)
        read = torch.cat([torch.cat(self._seen or [torch.zeros(0)]).to(norms.device), norms]).tolist()
        pairs = list(zip(read[0 : 2 * len(self._batches) : 2], read[1 : 2 * len(self._batches) : 2], strict=True))
        bad = [i for i, (loss, finite) in enumerate(pairs) if not (math.isfinite(loss) and finite)]
        norm_of = dict(zip((step for step, _ in self._norms), read[2 * len(self._batches) :], strict=True))
        bad_norms = [step for step, norm in norm_of.items() if not math.isfinite(norm)]
        mine = min([self._batches[i].step for i in bad] + bad_norms, default=math.inf)
        first = float(self.accelerator.gather(torch.tensor([mine], device=self.accelerator.device)).min())
        if first < math.inf:
            step = [i for i, batch in enumerate(self._batches) if batch.step == first]
            chosen = [i for i in bad if i in step][:1]
            anybody = float(self.accelerator.gather(torch.tensor([len(chosen)], device=self.accelerator.device)).max())
            written = []
            for i in step:  # all of them again, on all processes: a sharded target may have to run
                batch = self._batches[i].again()
                if i in chosen or not anybody:  # if only the gradient is bad, any of them may be the reason
                    written.append(self._write(self._batches[i], batch, *pairs[i], norm_of.get(int(first))))
            self.accelerator.wait_for_everyone()
            raise ValueError(self._message(int(first), bool(anybody), written))
        self._batches, self._seen, self._norms = [], [], []

    def _write(
        self, micro: _MicroBatch, batch: TrainingBatch, loss: float, finite: float, norm: float | None
    ) -> list[str]:
        """Writes a micro-batch aside; returns the names of its tensors that are not finite."""
        process = self.accelerator.process_index
        name = f"step-{micro.step:08d}-process-{process}-batch-{micro.number}"
        values = {name: value.detach().cpu().contiguous() for name, value in _tensors(batch).items()}
        self.folder.mkdir(parents=True, exist_ok=True)
        safetensors.torch.save_file(
            {key: value.clone() for key, value in values.items()}, self.folder / f"{name}.safetensors"
        )
        bad = {key: _places(value) for key, value in values.items() if not bool(value.isfinite().all())}
        record = {
            "step": micro.step,
            "process": process,
            "micro_batch": micro.number,
            "conversations": micro.indices,
            "ids": [sequence.ids for sequence in micro.sequences],
            "loss": repr(loss),
            "features_finite": bool(finite),
            "gradient_norm": repr(norm),
            "not_finite": bad,
            "shapes": {key: list(value.shape) for key, value in values.items()},
        }
        write_text(self.folder / f"{name}.json", json.dumps(record, indent=1) + "\n")
        return list(bad)

    def _message(self, step: int, in_loss: bool, written: list[list[str]]) -> str:
        what = "the loss" if in_loss else "the gradient's norm"
        bad = sorted({name for names in written for name in names})
        if bad:
            advice = (
                f"the target's own values are not finite there ({', '.join(bad)}): look at these conversations, and give "
                "target.dtype bfloat16 or float32 in place of float16"
            )
        else:
            advice = (
                "what the target says is finite, so training has diverged: lower optim.learning_rate, warm up longer, or give "
                "loop.precision=float32"
            )
        return (
            f"{what} of step {step} is not finite; the batch is in {self.folder}, and no checkpoint is as new as that step; "
            f"{advice}"
        )


def _tensors(batch: TrainingBatch) -> dict[str, Tensor]:
    values = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def _places(value: Tensor) -> dict[str, Any]:
    places = (~value.isfinite()).nonzero()
    return {"count": len(places), "first": places[:SHOWN].tolist()}
