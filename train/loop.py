"""The one loop of training, the same on every engine: micro-batches, optimizer step, log line, evaluation, checkpoint.

How many steps there are, and which conversations are in which, is a function of config, data and the number of processes, so step
N is the same whenever it is reached.
"""

import contextlib
import dataclasses
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from draftsmith.drafters.base import Load, TrainableDrafter, TrainingBatch
from draftsmith.inference.target import Target
from draftsmith.train import checkpoints, on_policy, serving, tracking
from draftsmith.train.average import Average
from draftsmith.train.clock import Clock
from draftsmith.train.config import RunConfig
from draftsmith.train.data import Sequence, plan_epoch
from draftsmith.train.evaluation import evaluate_now
from draftsmith.train.features import FeatureStore
from draftsmith.train.finite import Finite
from draftsmith.train.guard import Guard
from draftsmith.train.meter import Meter, peak_tflops
from draftsmith.train.optim import schedule, set_rates
from draftsmith.train.profiling import Profile

NOTHING_DONE: dict[str, Any] = {
    "step": 0, "best_tau": 0.0, "best_step": 0, "trained_tokens": 0, "seconds": 0.0, "evaluation_seconds": 0.0,
}  # fmt: skip
"""Progress of a run that begins."""


class Plan:
    """Which micro-batches are in which step.

    Attributes:
        per_step: micro-batches of an optimizer step, over all processes.
        steps_per_epoch: optimizer steps; all processes take equally many.
        num_steps: of the run.
    """

    def __init__(self, config: RunConfig, sequences: list[Sequence], num_processes: int) -> None:
        self._config = config
        self._lengths = [len(sequence.ids) for sequence in sequences]
        self._newest: tuple[int, list[list[int]]] | None = None
        self.per_step = config.loop.accumulation * num_processes
        self.steps_per_epoch = len(self.epoch(0)) // self.per_step
        self.num_steps = max(1, round(self.steps_per_epoch * config.loop.epochs))

    def epoch(self, epoch: int) -> list[list[int]]:
        """The micro-batches of an epoch in order, each the indices of its sequences; the newest one asked for is kept."""
        if self._newest is None or self._newest[0] != epoch:
            loop, seed = self._config.loop, self._config.seed
            batches = plan_epoch(self._lengths, loop.batch_size, self.per_step, seed, epoch, loop.batch_tokens)
            self._newest = epoch, batches
        return self._newest[1]


class Loop:
    """Trains a drafter from where a run stands to its end.

    Args:
        config: of the run.
        accelerator: that prepared model and optimizers.
        target: the frozen target.
        store: gives the training batches.
        plan: which they are.
        drafter: in training.
        model: the drafter as the accelerator prepared it.
        optimizers: of its parameters.
        average: of its weights, if there is one; then that is evaluated and saved.
        metrics: where figures go.
        held_out: prompts that acceptance is measured on.
        flops: of the model on a batch.
        progress: where the run stands.
    """

    def __init__(
        self,
        config: RunConfig,
        accelerator: Accelerator,
        target: Target,
        store: FeatureStore,
        plan: Plan,
        drafter: TrainableDrafter,
        model: torch.nn.Module,
        optimizers: list[Any],
        average: Average | None,
        metrics: tracking.Metrics,
        held_out: list[list[int]],
        flops: Callable[[Load], float],
        progress: dict[str, Any],
    ) -> None:
        self.config, self.accelerator, self.target, self.store = config, accelerator, target, store
        self.plan, self.drafter, self.model, self.optimizers, self.average = plan, drafter, model, optimizers, average
        self.metrics, self.held_out, self.progress = metrics, held_out, dict(progress)
        self.folder = Path(config.output)
        self.answers = serving.plain_answers(target, held_out, config.eval) if drafter.adapts_target else []
        self.clock = Clock(progress["seconds"], progress["evaluation_seconds"])
        self.budget = math.inf if config.loop.max_minutes is None else 60 * config.loop.max_minutes
        self.used = progress["seconds"] - progress["evaluation_seconds"]  # of the budget
        device, ids_W = accelerator.device, drafter.token_ids_W
        self.meter = Meter(accelerator, self.clock, flops, peak_tflops(device, config.loop.peak_tflops))
        self.finite = Finite(accelerator, self.folder)
        uniform = math.log(target.shape.vocab_size if ids_W is None else len(ids_W))
        self.guard = Guard(config.guard, config.optim.warmup, uniform, config.eval.temperature == 0, metrics.warn)
        self.profile = Profile(config.loop.profile if accelerator.is_main_process else None, self.folder, device)
        self.position = 0.0  # in the learning rate's schedule, in steps
        self._announced = -1  # the epoch whose batches the store knows of

    def run(self) -> dict[str, Any]:
        """Trains to the end; returns the progress."""
        config, done = self.config, self.progress["step"]
        while done < self.plan.num_steps:
            self.profile.before(done + 1)
            norm = self.step(done)
            done += 1
            last = done == self.plan.num_steps or self.used >= self.budget
            self.profile.after(done, last)
            if done % config.loop.log_every == 0 or last:
                self.log(done, norm)
            if done % config.eval.every == 0 or last:
                self.evaluate(done)
            self.progress |= {
                "step": done,
                "seconds": self.clock.seconds,
                "evaluation_seconds": self.clock.evaluation_seconds,
            }
            if last:
                break
            if done % config.loop.checkpoint_every == 0:
                self.checkpoint()
        return self.progress

    def step(self, step: int) -> Any:
        """One optimizer step: losses are sums, divided once by the count over all micro-batches and processes. Returns the norm of
        the gradients."""
        accelerator, config = self.accelerator, self.config
        epoch, mine = self.micro_batches(step)
        texts, written = self.texts(step, mine)
        loads = [_load(text) for text in texts]
        supervised = sum(load.supervised for load in loads)
        global_count = accelerator.reduce(torch.tensor(float(supervised), device=accelerator.device), "sum").clamp_min(
            1
        )
        self.model.train()
        self.meter.step()
        for number, indices in enumerate(mine):
            text = texts[number]
            again = self._batch(epoch, None if number in written else indices, text)
            with self.meter.waiting():
                batch = again()
            with accelerator.autocast(), sync_last(accelerator, self.model, number == len(mine) - 1):
                parts = self.model(batch)
                accelerator.backward(
                    parts.sum * accelerator.num_processes / global_count
                )  # DDP averages over processes
            self.meter.add(parts.metrics, loads[number])
            self.finite.micro_batch(step + 1, indices, text, batch, parts.sum, again)
        self.progress["trained_tokens"] += int(global_count)
        # Under a time budget, as if all steps took equally long.
        self.position = max(step, self.plan.num_steps * self.used / self.budget)
        set_rates(self.optimizers, self.position, self.plan.num_steps, config.optim)
        norm = accelerator.clip_grad_norm_(self.model.parameters(), config.optim.clip_norm)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.finite.stepped(step + 1, norm)
        if self.average is not None:
            self.average.update(accelerator.unwrap_model(self.model), step + 1)
        if self.budget < math.inf:  # all processes go by the same clock
            self.used = float(
                accelerator.reduce(torch.tensor(self.clock.training_seconds, device=accelerator.device), "mean")
            )
        return norm

    def micro_batches(self, step: int) -> tuple[int, list[list[int]]]:
        """The epoch that a step is in, and this process's micro-batches of it."""
        first, stride, per_step = self.accelerator.process_index, self.accelerator.num_processes, self.plan.per_step
        epoch, within = divmod(step, self.plan.steps_per_epoch)
        batches = self.plan.epoch(epoch)
        if epoch != self._announced:
            self._announced = epoch
            self.store.announce(batches[within * per_step + first :: stride], epoch)
        return epoch, batches[within * per_step : (within + 1) * per_step][first::stride]

    def texts(self, step: int, mine: list[list[int]]) -> tuple[list[list[Sequence]], set[int]]:
        """What the micro-batches of a step say, and which of them the drafter wrote itself."""
        texts = [[self.store.sequences[index] for index in indices] for indices in mine]
        written: set[int] = set()
        for number, text in enumerate(texts):
            place = number * self.accelerator.num_processes + self.accelerator.process_index
            key = (self.config.seed, step, place)
            if on_policy.chosen(self.drafter.on_policy, key):
                texts[number] = on_policy.write(self.drafter.eval(), self.target, text, key)
                written.add(number)
        return texts, written

    def _batch(self, epoch: int, indices: list[int] | None, sequences: list[Sequence]) -> Callable[[], TrainingBatch]:
        """Makes a batch of stored sequences, or of those that no store holds."""
        if indices is None:
            return lambda: on_policy.batch(self.target, sequences, epoch, self.config.features.top_k)
        return lambda: self.store.batch(indices, epoch)

    @property
    def share(self) -> float:
        """Of the run that is done."""
        return min(1.0, (self.position + 1) / self.plan.num_steps)

    def log(self, done: int, norm: Any) -> None:
        """Writes the figures of the steps since the last line."""
        optim, num_steps = self.config.optim, self.plan.num_steps
        self.finite.check()
        values, supervised = self.meter.close()
        values |= {
            "learning_rate": schedule(self.position, num_steps, optim) * optim.learning_rate,
            "gradient_norm": float(norm),
            "epoch": done / self.plan.steps_per_epoch,
        }
        self.metrics.log(done, values)
        self.guard.window(done, self.share, values, supervised)
        left = max(0.0, min(self.clock.seconds / done * (num_steps - done), self.budget - self.used))
        say(
            self.accelerator,
            f"step {done}/{num_steps}  loss {values['loss']:.3f}  accuracy {values['accuracy/0']:.3f}  "
            f"predicted tau {values['predicted_tau']:.2f}  {values['speed/supervised_tokens_per_second']:.0f} tokens/s  "
            f"{left / 60:.1f} min left",
        )

    def evaluate(self, done: int) -> None:
        """Measures real acceptance and keeps the drafter if it is the best so far."""
        self.finite.check()
        with self.clock.evaluation():
            weights = self.accelerator.unwrap_model(self.model) if self.average is None else self.average.drafter
            now, served = serving.serve(self.target, weights, self.answers)
            found = evaluate_now(self.config, now, served, self.held_out)
            found = dataclasses.replace(found, values=found.values | serving.distances(now))
            self.metrics.evaluated(done, found)
            say(self.accelerator, f"step {done}/{self.plan.num_steps}  real acceptance: tau {found.tau:.3f}")
            self.guard.evaluated(done, self.share, found.report)
            if found.tau > self.progress["best_tau"]:
                self.progress |= {"best_tau": found.tau, "best_step": done}
                if self.accelerator.is_main_process:
                    serving.save(now, served, self.folder)

    def checkpoint(self) -> None:
        """Writes down where the run stands."""
        self.finite.check()
        keep = self.config.loop.keep_checkpoints
        checkpoints.save(self.accelerator, self.folder / "checkpoints", self.progress, self.average, keep)


def _load(sequences: list[Sequence]) -> Load:
    """The size of a micro-batch."""
    tokens = sum(len(sequence.ids) for sequence in sequences)
    return Load(tokens, sum(sum(sequence.loss_mask[2:]) for sequence in sequences), len(sequences))


def sync_last(accelerator: Accelerator, model: torch.nn.Module, last: bool) -> Any:
    """Gradients travel between processes with the last micro-batch only."""
    return contextlib.nullcontext() if last else accelerator.no_sync(model)


def say(accelerator: Accelerator, line: str) -> None:
    """A line on stderr, once for all processes."""
    if accelerator.is_main_process:
        print(line, file=sys.stderr, flush=True)
