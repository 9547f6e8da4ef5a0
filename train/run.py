"""The training run: config → target → data → features → drafter → one loop → the drafter with the best real acceptance.

    accelerate launch -m draftsmith.train.run CONFIG [key=value …]

Started again with the same command after a kill, it continues from its newest checkpoint and, on a CPU, ends with the same
bits. The run folder holds config.yaml (complete), drafter/ (the best so far), checkpoints/, metrics.jsonl.
"""

import dataclasses
import json
import math
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor

from draftsmith import drafters
from draftsmith.configs import locate
from draftsmith.drafters.base import TrainableDrafter, TrainingBatch
from draftsmith.drafters.checkpoint import write_text
from draftsmith.drafters.losses import summarise
from draftsmith.drafters.vocabulary import coverage
from draftsmith.inference.conversations import prompt_ids, prompt_messages, read_conversations
from draftsmith.inference.evaluate import measure_acceptance, spread
from draftsmith.inference.target import Target, load
from draftsmith.train import checkpoints, tracking
from draftsmith.train.config import LoopConfig, OptimConfig, RunConfig, read, to_yaml
from draftsmith.train.data import Sequence, count_answer_tokens, load_sequences, plan_epoch
from draftsmith.train.features import FeatureStore

NOTHING_DONE: dict[str, Any] = {"step": 0, "best_tau": 0.0, "trained_tokens": 0, "seconds": 0.0}
FITTED_TOKENS = 50_000
"""Answer tokens that starting values are fitted to."""


def train(config: RunConfig) -> Path:
    """Trains one drafter; returns the run folder. ValueError for everything that a user can put right."""
    tracker = tracking.prepare(config.tracking)
    accelerator = Accelerator(mixed_precision=mixed_precision(config.loop), log_with=tracker, project_dir=config.output)
    folder = Path(config.output)
    claim_folder(folder, config, accelerator)
    if (folder / "finished.json").exists():
        say(accelerator, f"{folder} is finished; delete it or give another output to train again")
        return folder

    # The frozen target and what it says about the data. Missing files are noticed before the target is loaded.
    for file in (*config.data.train, config.eval.prompts):
        if not locate(file).is_file():
            raise ValueError(f"{file} does not exist; correct data.train or eval.prompts in the config")
    set_seed(config.seed)
    target = load_target(config, accelerator.device)
    sequences = load_training_sequences(config, target)
    drafter = drafters.build(config.kind, config.drafter_settings, target.shape)
    store = FeatureStore(target, sequences, drafter.feature_layers, **dataclasses.asdict(config.features))
    with accelerator.main_process_first():
        store.fill()

    # The plan: every process takes equally many micro-batches, and step N is the same whenever it is reached.
    lengths = [len(sequence.ids) for sequence in sequences]
    per_step = config.loop.accumulation * accelerator.num_processes
    first_epoch = plan_epoch(lengths, config.loop.batch_size, per_step, config.seed, 0)
    steps_per_epoch = len(first_epoch) // per_step

    # The drafter starts from the target.
    counts_V = count_answer_tokens(sequences, target.shape.vocab_size)
    resumes = bool(checkpoints.complete(folder / "checkpoints"))  # then its weights replace these
    drafter.initialise(target, counts_V, () if resumes else some_batches(store, first_epoch))
    drafter.to(accelerator.device, torch.float64 if target.dtype == torch.float64 else torch.float32)
    describe(accelerator, drafter, sequences, counts_V)
    model, *optimizers = accelerator.prepare(drafter, *make_optimizers(drafter, config.optim))

    # Where the run stands: at its newest checkpoint, if there is one.
    num_steps = max(1, round(steps_per_epoch * config.loop.epochs))
    progress = checkpoints.load_latest(accelerator, folder / "checkpoints") or NOTHING_DONE
    first_step, best_tau = progress["step"], progress["best_tau"]
    trained_tokens, seconds = progress["trained_tokens"], progress["seconds"]
    tracking.start(accelerator, config, dataclasses.asdict(config))
    metrics = tracking.Metrics(accelerator, folder / "metrics.jsonl", first_step)
    held_out = load_held_out(config, target)
    if first_step:
        say(accelerator, f"continuing from step {first_step} of {num_steps}")

    window, planned, batches = Window(), -1, []
    started = time.perf_counter() - seconds
    for step in range(first_step, num_steps):
        epoch, within = divmod(step, steps_per_epoch)
        if epoch != planned:
            planned, batches = epoch, plan_epoch(lengths, config.loop.batch_size, per_step, config.seed, epoch)
        mine = batches[within * per_step : (within + 1) * per_step][
            accelerator.process_index :: accelerator.num_processes
        ]

        # One optimizer step: losses are sums, divided once by the count over all micro-batches and processes.
        supervised = sum(sum(sequences[index].loss_mask[2:]) for batch in mine for index in batch)
        global_count = accelerator.reduce(torch.tensor(float(supervised), device=accelerator.device), "sum").clamp_min(
            1
        )
        model.train()
        for number, indices in enumerate(mine):
            batch = store.batch(indices, epoch)
            with accelerator.autocast(), sync_last(accelerator, model, number == len(mine) - 1):
                parts = model(batch)
                accelerator.backward(
                    parts.sum * accelerator.num_processes / global_count
                )  # DDP averages over processes
            window.add(parts.metrics)
        window.tokens += supervised
        trained_tokens += int(global_count)
        norm = accelerator.clip_grad_norm_(model.parameters(), config.optim.clip_norm)
        share = schedule(step, num_steps, config.optim)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = share * group["peak"]
            optimizer.step()
            optimizer.zero_grad()
        done = step + 1

        if done % config.loop.log_every == 0 or done == num_steps:
            values = window.close(accelerator) | {
                "learning_rate": share * config.optim.learning_rate,
                "gradient_norm": float(norm),
            }
            if not math.isfinite(values["loss"]):
                raise ValueError(
                    f"the loss at step {done} is not finite; lower optim.learning_rate, or look for bad values in the data"
                )
            values["epoch"] = done / steps_per_epoch
            metrics.log(done, values)
            left = (time.perf_counter() - started) / done * (num_steps - done)
            say(
                accelerator,
                f"step {done}/{num_steps}  loss {values['loss']:.3f}  accuracy {values['accuracy/0']:.3f}  "
                f"predicted tau {values['predicted_tau']:.2f}  {values['tokens_per_second']:.0f} tokens/s  "
                f"{left / 60:.1f} min left",
            )
        if done % config.eval.every == 0 or done == num_steps:
            window.pause()
            drafter_now = accelerator.unwrap_model(model)
            measured = evaluate_now(config, target, drafter_now, held_out)
            metrics.log(done, measured)
            say(accelerator, f"step {done}/{num_steps}  real acceptance: tau {measured['acceptance/tau']:.3f}")
            if accelerator.is_main_process and measured["acceptance/tau"] > best_tau:
                drafters.save(drafter_now, folder / "drafter")
            best_tau = max(best_tau, measured["acceptance/tau"])
            window.resume()
        if done % config.loop.checkpoint_every == 0 and done < num_steps:
            state = {
                "best_tau": best_tau,
                "trained_tokens": trained_tokens,
                "seconds": time.perf_counter() - started,
            }
            checkpoints.save(accelerator, folder / "checkpoints", done, state, config.loop.keep_checkpoints)

    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        summary = {"steps": num_steps, "best_tau": best_tau, "seconds": time.perf_counter() - started}
        summary |= {"answer_tokens": int(counts_V.sum()), "trained_tokens": trained_tokens}
        write_text(folder / "finished.json", json.dumps(summary, indent=2) + "\n")
    accelerator.end_training()
    return folder


def claim_folder(folder: Path, config: RunConfig, accelerator: Accelerator) -> None:
    """Writes config.yaml, or checks that the folder belongs to this very run; one that never took a step is no run yet."""
    text, file = to_yaml(config), folder / "config.yaml"
    begun = any((folder / name).exists() for name in ("metrics.jsonl", "checkpoints", "finished.json"))
    if begun and file.exists() and file.read_text() != text:
        differing = sorted(
            {line.strip() for line in file.read_text().splitlines()} ^ set(map(str.strip, text.splitlines()))
        )
        raise ValueError(
            f"{folder} holds a run with other settings (one has, the other has not: {', '.join(differing)}); "
            "give another output, or delete that folder"
        )
    accelerator.wait_for_everyone()
    if accelerator.is_main_process and not begun:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(file, text)
    accelerator.wait_for_everyone()


def load_target(config: RunConfig, device: torch.device) -> Target:
    """The frozen target of a run; ValueError if it is not the one that the config describes."""
    section = config.target
    target = load(
        section.path,
        dtype=getattr(torch, section.dtype),
        device=device,
        revision=section.revision,
        trust_remote_code=section.trust_remote_code,
    )
    if section.shape is not None:
        differences = section.shape.differences(target.shape)
        if differences:
            raise ValueError(f"target.shape in the config does not describe {section.path} ({differences}); correct it")
    return target


def load_training_sequences(config: RunConfig, target: Target) -> list[Sequence]:
    if target.tokenizer is None:
        raise ValueError(f"{target.name} has no tokenizer; training needs one")
    data = config.data
    return load_sequences(
        data.train,
        target.tokenizer,
        max_length=data.max_length,
        max_answer_tokens=data.max_answer_tokens,
        seed=config.seed,
    )


def load_held_out(config: RunConfig, target: Target) -> list[list[int]]:
    conversations = read_conversations(config.eval.prompts)
    chosen = [conversations[i] for i in spread(len(conversations), config.eval.num_prompts)]
    assert target.tokenizer is not None
    return [prompt_ids(target.tokenizer, prompt_messages(c.messages)) for c in chosen]


def some_batches(store: FeatureStore, plan: list[list[int]]) -> Iterator[TrainingBatch]:
    """The first batches of a plan, the same on every process, with enough answer tokens to fit starting values to."""
    tokens = 0
    for indices in plan:
        if tokens >= FITTED_TOKENS:
            break
        tokens += sum(store.sequences[index].num_answer_tokens for index in indices)
        yield store.batch(indices)


def make_optimizers(drafter: TrainableDrafter, config: OptimConfig) -> list[torch.optim.Optimizer]:
    """AdamW alone, or Muon (Jordan et al. 2024) for the inner matrices and AdamW for heads, norms and biases.

    Each parameter group carries `peak`, the learning rate that the schedule scales.
    """
    inner: list[torch.nn.Parameter] = []
    matrices: list[torch.nn.Parameter] = []
    vectors: list[torch.nn.Parameter] = []
    for name, parameter in drafter.named_parameters():
        if parameter.requires_grad:
            is_inner = config.name == "muon" and parameter.dim() == 2 and "lm_head" not in name
            (inner if is_inner else matrices if parameter.dim() >= 2 else vectors).append(parameter)
    beta1, beta2 = config.betas
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay, "peak": config.learning_rate},
        {"params": vectors, "weight_decay": 0.0, "peak": config.learning_rate},
    ]
    groups = [group for group in groups if group["params"]]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, betas=(beta1, beta2), fused=True)]
    if inner:
        rate = config.muon_learning_rate
        muon = torch.optim.Muon(inner, lr=rate, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw")
        muon.param_groups[0]["peak"] = rate
        optimizers.append(muon)
    return optimizers


def schedule(step: int, num_steps: int, config: OptimConfig) -> float:
    """Share of the peak learning rate: linear warm-up, then a cosine down to `final`. A function of the step alone, so there is
    no state to lose."""
    warmup = config.warmup * num_steps
    if step < warmup:
        return (step + 1) / (warmup + 1)
    along = (step - warmup) / max(1, num_steps - warmup)
    return config.final + (1 - config.final) * 0.5 * (1 + math.cos(math.pi * along))


def mixed_precision(loop: LoopConfig) -> str:
    """accelerate's name for the precision; `auto` asks the hardware."""
    if loop.precision != "auto":
        return {"bfloat16": "bf16", "float32": "no"}[loop.precision]
    if torch.cuda.is_available():
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "no"
    # Not in the oldest torch that we admit.
    able: Mapping[str, Any] = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return "bf16" if able.get("amx_bf16") or able.get("avx512_bf16") else "no"


def evaluate_now(
    config: RunConfig, target: Target, drafter: TrainableDrafter, held_out: list[list[int]]
) -> dict[str, float]:
    """Real acceptance of the drafter as it would be served: a copy in the target's dtype, through the verify loop."""
    copy = drafters.build(config.kind, config.drafter_settings, drafter.shape)
    copy.load_state_dict(drafter.state_dict())
    copy.to(target.device, target.dtype).eval()
    measured: dict[str, Any] = measure_acceptance(
        target,
        copy,
        held_out,
        depth=config.eval.depth,
        temperature=config.eval.temperature,
        max_new=config.eval.max_new,
        batch_size=config.eval.batch_size,
    )
    values = {"acceptance/tau": measured["tokens_per_round"]["value"]}
    conditional = enumerate(measured["cond_accept"], start=1)
    return values | {f"acceptance/cond_{i}": a for i, a in conditional if a is not None}


def sync_last(accelerator: Accelerator, model: torch.nn.Module, last: bool) -> Any:
    """Gradients travel between processes with the last micro-batch only."""
    import contextlib

    return contextlib.nullcontext() if last else accelerator.no_sync(model)


def describe(accelerator: Accelerator, drafter: TrainableDrafter, sequences: list[Sequence], counts_V: Tensor) -> None:
    size = sum(p.numel() for p in drafter.parameters())
    ids = getattr(drafter, "token_ids_W", None)
    share = (
        f", draft vocabulary covers {coverage(counts_V, ids.cpu()):.1%} of the answer tokens" if ids is not None else ""
    )
    say(
        accelerator,
        f"{len(sequences):,} conversations, {int(counts_V.sum()):,} answer tokens; drafter of {size / 1e6:.1f} M parameters{share}",
    )


class Window:
    """Metrics summed since the last line, and the time they took."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.tokens = 0.0
        self.start = time.perf_counter()

    def add(self, metrics: dict[str, Tensor]) -> None:
        for name, value in metrics.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value.clone()

    def pause(self) -> None:
        self.start -= time.perf_counter()

    def resume(self) -> None:
        self.start += time.perf_counter()

    def close(self, accelerator: Accelerator) -> dict[str, float]:
        sums = {name: accelerator.reduce(value, "sum") for name, value in self.sums.items()}
        tokens = float(accelerator.reduce(torch.tensor(self.tokens, device=accelerator.device), "sum"))
        elapsed = time.perf_counter() - self.start
        values = summarise(sums) | {"tokens_per_second": tokens / elapsed}
        values["loss"] = float((sums["loss"] / sums["supervised"].clamp_min(1)).mean())
        self.__init__()  # type: ignore[misc]
        return values


def say(accelerator: Accelerator, line: str) -> None:
    if accelerator.is_main_process:
        print(line, file=sys.stderr, flush=True)


def main() -> None:
    """`accelerate launch -m draftsmith.train.run CONFIG [key=value …]`"""
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: accelerate launch -m draftsmith.train.run CONFIG [key=value …]")
    try:
        train(read(sys.argv[1], sys.argv[2:]))
    except (ValueError, OSError) as error:
        print(f"draftsmith train: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
