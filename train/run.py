"""The training run: config → target → data → features → drafter → one loop → the drafter with the best real acceptance.

    accelerate launch -m draftsmith.train.run CONFIG [key=value …]

Started again with the same command after a kill, it continues from its newest checkpoint and, on a CPU, ends with the same
bits (unless `loop.max_minutes` leaves it to the clock how many steps there are). The run folder holds config.yaml (complete),
drafter/ (the best so far; of a kind that adapts the target, target/ beside it), checkpoints/, metrics.jsonl.
"""

import dataclasses
import json
import math
import sys
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
from draftsmith.drafters.vocabulary import check_fill, check_hash, vocabulary_hash
from draftsmith.inference.conversations import read_conversations
from draftsmith.inference.evaluate import measure_acceptance, spread
from draftsmith.inference.records import prompt_messages
from draftsmith.inference.rendering import prompt_ids
from draftsmith.inference.target import Target, load
from draftsmith.train import checkpoints, on_policy, serving, tracking
from draftsmith.train.average import Average
from draftsmith.train.clock import Clock
from draftsmith.train.config import LoopConfig, RunConfig, read, to_yaml
from draftsmith.train.coverage import held_out_answers, measure
from draftsmith.train.data import Sequence, count_answer_tokens, data_hash, load_sequences, plan_epoch
from draftsmith.train.features import FeatureStore
from draftsmith.train.optim import make_optimizers, schedule, set_rates
from draftsmith.train.rows import exists, parse_source

NOTHING_DONE: dict[str, Any] = {
    "step": 0, "best_tau": 0.0, "trained_tokens": 0, "seconds": 0.0, "evaluation_seconds": 0.0,
}  # fmt: skip
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
    missing = [source for source in config.data.train if not exists(parse_source(source))]
    if not locate(config.eval.prompts).is_file():
        missing.append(config.eval.prompts)
    if missing:
        raise ValueError(f"{missing[0]} does not exist; correct data.train or eval.prompts in the config")
    if config.target.device_map is not None and accelerator.num_processes > 1:
        raise ValueError(
            f"target.device_map is {config.target.device_map!r}, which spreads one target over all devices, and there are "
            f"{accelerator.num_processes} processes; start one, or set it to null"
        )
    set_seed(config.seed)
    target = load_target(config, accelerator.device)
    sequences = load_training_sequences(config, target)
    counts_V = count_answer_tokens(sequences, target.shape.vocab_size)
    check_fill(counts_V, config.drafter_settings.get("draft_vocab_size"), config.data.vocabulary_fill)
    drafter = drafters.build(config.kind, config.drafter_settings, target.shape)
    store = FeatureStore(target, sequences, drafter.feature_layers, config.features)
    store.fill()  # processes share the work

    # The plan: every process takes equally many micro-batches, and step N is the same whenever it is reached.
    lengths = [len(sequence.ids) for sequence in sequences]
    per_step = config.loop.accumulation * accelerator.num_processes
    first_epoch = plan_epoch(lengths, config.loop.batch_size, per_step, config.seed, 0)
    steps_per_epoch = len(first_epoch) // per_step

    # The drafter starts from the target.
    resumes = bool(checkpoints.complete(folder / "checkpoints"))  # then its weights replace these
    drafter.initialise(target, counts_V, () if resumes else some_batches(store, first_epoch))
    drafter.to(accelerator.device, torch.float64 if target.dtype == torch.float64 else torch.float32)
    describe(accelerator, config, target, drafter, sequences, counts_V)
    vocabulary, data = vocabulary_hash(drafter.token_ids_W), data_hash(sequences)
    if config.optim.ema is not None and not drafter.averages:
        raise ValueError(f"optim.ema cannot average the adapters of this {config.kind}; set it to null")
    average = None if config.optim.ema is None else Average(config.optim.ema, drafter)
    model, *optimizers = accelerator.prepare(drafter, *make_optimizers(drafter, config.optim))

    # Where the run stands: at its newest checkpoint, if there is one.
    num_steps = max(1, round(steps_per_epoch * config.loop.epochs))
    budget = math.inf if config.loop.max_minutes is None else 60 * config.loop.max_minutes
    progress = checkpoints.load_latest(accelerator, folder / "checkpoints", average) or NOTHING_DONE
    check_continues(folder, progress, vocabulary_hash(drafter.token_ids_W), vocabulary, data)
    first_step, best_tau, trained_tokens = progress["step"], progress["best_tau"], progress["trained_tokens"]
    tracking.start(accelerator, config, dataclasses.asdict(config))
    metrics = tracking.Metrics(accelerator, folder / "metrics.jsonl", first_step)
    held_out = load_held_out(config, target)
    answers = serving.plain_answers(target, held_out, config.eval) if drafter.adapts_target else []
    if first_step:
        say(accelerator, f"continuing from step {first_step} of {num_steps}")

    clock = Clock(progress["seconds"], progress["evaluation_seconds"])
    used = progress["seconds"] - progress["evaluation_seconds"]
    window, planned, batches = tracking.Window(clock), -1, []
    for step in range(first_step, num_steps):
        epoch, within = divmod(step, steps_per_epoch)
        if epoch != planned:
            planned, batches = epoch, plan_epoch(lengths, config.loop.batch_size, per_step, config.seed, epoch)
            ahead = batches[within * per_step + accelerator.process_index :: accelerator.num_processes]
            store.announce(ahead, epoch)
        mine = batches[within * per_step : (within + 1) * per_step][
            accelerator.process_index :: accelerator.num_processes
        ]

        # One optimizer step: losses are sums, divided once by the count over all micro-batches and processes.
        texts = [[sequences[index] for index in indices] for indices in mine]
        written: set[int] = set()  # which of them the drafter wrote itself
        for number, text in enumerate(texts):
            key = (config.seed, step, number * accelerator.num_processes + accelerator.process_index)
            if on_policy.chosen(drafter.on_policy, key):
                texts[number] = on_policy.write(drafter.eval(), target, text, key)
                written.add(number)
        supervised = sum(sum(sequence.loss_mask[2:]) for text in texts for sequence in text)
        global_count = accelerator.reduce(torch.tensor(float(supervised), device=accelerator.device), "sum").clamp_min(
            1
        )
        model.train()
        for number, indices in enumerate(mine):
            if number in written:
                batch = on_policy.batch(target, texts[number], epoch, config.features.top_k)
            else:
                batch = store.batch(indices, epoch)
            with accelerator.autocast(), sync_last(accelerator, model, number == len(mine) - 1):
                parts = model(batch)
                accelerator.backward(
                    parts.sum * accelerator.num_processes / global_count
                )  # DDP averages over processes
            window.add(parts.metrics)
        window.tokens += supervised
        trained_tokens += int(global_count)
        position = max(step, num_steps * used / budget)
        set_rates(optimizers, position, num_steps, config.optim)
        norm = accelerator.clip_grad_norm_(model.parameters(), config.optim.clip_norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        done = step + 1
        if average is not None:
            average.update(accelerator.unwrap_model(model), done)
        if budget < math.inf:  # all processes go by the same clock
            used = float(accelerator.reduce(torch.tensor(clock.training_seconds, device=accelerator.device), "mean"))
        last = done == num_steps or used >= budget

        if done % config.loop.log_every == 0 or last:
            values = window.close(accelerator) | {
                "learning_rate": schedule(position, num_steps, config.optim) * config.optim.learning_rate,
                "gradient_norm": float(norm),
            }
            if not math.isfinite(values["loss"]):
                raise ValueError(
                    f"the loss at step {done} is not finite; lower optim.learning_rate, or look for bad values in the data"
                )
            values["epoch"] = done / steps_per_epoch
            metrics.log(done, values)
            left = max(0.0, min(clock.seconds / done * (num_steps - done), budget - used))
            say(
                accelerator,
                f"step {done}/{num_steps}  loss {values['loss']:.3f}  accuracy {values['accuracy/0']:.3f}  "
                f"predicted tau {values['predicted_tau']:.2f}  {values['tokens_per_second']:.0f} tokens/s  "
                f"{left / 60:.1f} min left",
            )
        if done % config.eval.every == 0 or last:
            with clock.evaluation():
                drafter_now = accelerator.unwrap_model(model) if average is None else average.drafter
                now, served = serving.serve(target, drafter_now, answers)
                measured = evaluate_now(config, now, served, held_out) | serving.distances(now)
                metrics.log(done, measured)
                say(accelerator, f"step {done}/{num_steps}  real acceptance: tau {measured['acceptance/tau']:.3f}")
                if accelerator.is_main_process and measured["acceptance/tau"] > best_tau:
                    serving.save(now, served, folder)
                best_tau = max(best_tau, measured["acceptance/tau"])
        progress = {
            "best_tau": best_tau,
            "trained_tokens": trained_tokens,
            "seconds": clock.seconds,
            "evaluation_seconds": clock.evaluation_seconds,
            "data": data,
        }
        if last:
            break
        if done % config.loop.checkpoint_every == 0:
            checkpoints.save(accelerator, folder / "checkpoints", done, progress, average, config.loop.keep_checkpoints)

    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        summary = {"steps": done, "answer_tokens": int(counts_V.sum()), **progress}
        if drafter.adapts_target:
            summary["target_adapted_from"] = serving.origin(folder)
        write_text(folder / "finished.json", json.dumps(summary, indent=2) + "\n")
    accelerator.end_training()
    return folder


def begun(folder: Path, config: RunConfig) -> bool:
    """Whether the folder holds this very run; one that never took a step is none yet. ValueError if it holds another."""
    text, file = to_yaml(config), folder / "config.yaml"
    found = any((folder / name).exists() for name in ("metrics.jsonl", "checkpoints", "finished.json"))
    if found and file.exists() and file.read_text() != text:
        differing = sorted(
            {line.strip() for line in file.read_text().splitlines()} ^ set(map(str.strip, text.splitlines()))
        )
        raise ValueError(
            f"{folder} holds a run with other settings (one has, the other has not: {', '.join(differing)}); "
            "give another output, or delete that folder"
        )
    return found


def claim_folder(folder: Path, config: RunConfig, accelerator: Accelerator) -> None:
    """Writes config.yaml, or checks that the folder belongs to this very run."""
    there = begun(folder, config)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process and not there:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "config.yaml", to_yaml(config))
    accelerator.wait_for_everyone()


def load_target(config: RunConfig, device: torch.device) -> Target:
    """The frozen target of a run; ValueError if it is not the one that the config describes."""
    section = config.target
    target = load(
        section.path,
        dtype=getattr(torch, section.dtype),
        device=device,
        device_map=section.device_map,
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
        max_bad_share=data.max_bad_share,
        salvage=data.salvage,
        reasoning=data.reasoning,
    )


def load_held_out(config: RunConfig, target: Target) -> list[list[int]]:
    conversations = read_conversations(config.eval.prompts)
    chosen = [conversations[i] for i in spread(len(conversations), config.eval.num_prompts)]
    assert target.tokenizer is not None
    return [prompt_ids(target.tokenizer, prompt_messages(c.messages), c.tools) for c in chosen]


def some_batches(store: FeatureStore, plan: list[list[int]]) -> Iterator[TrainingBatch]:
    """The first batches of a plan, the same on every process, with enough answer tokens to fit starting values to."""
    tokens = 0
    for indices in plan:
        if tokens >= FITTED_TOKENS:
            break
        tokens += sum(store.sequences[index].num_answer_tokens for index in indices)
        yield store.batch(indices)


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
    copy = drafter.served(target.shape).to(target.device, target.dtype).eval()
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


def describe(
    accelerator: Accelerator,
    config: RunConfig,
    target: Target,
    drafter: TrainableDrafter,
    sequences: list[Sequence],
    counts_V: Tensor,
) -> None:
    size = sum(p.numel() for p in drafter.parameters())
    say(
        accelerator,
        f"{len(sequences):,} conversations, {int(counts_V.sum()):,} answer tokens; drafter of {size / 1e6:.1f} M parameters",
    )
    ids_W = drafter.token_ids_W
    if ids_W is not None:
        assert target.tokenizer is not None
        answers = held_out_answers(target.tokenizer, read_conversations(config.eval.prompts))
        say(accelerator, str(measure(ids_W.cpu(), target.shape.vocab_size, sequences, answers)))


def check_continues(folder: Path, progress: dict[str, Any], there: str, here: str, data: str) -> None:
    """ValueError if a run would continue on other data than it was begun with.

    Args:
        folder: of the run.
        progress: of its newest checkpoint; its `data` is not in older ones.
        there, here: hashes of the draft vocabulary in the checkpoint and of the one that the data give now.
        data: `data_hash` now.
    """
    mend = "restore the training data that the run was begun with, or give another output"
    check_hash(there, here, f"the checkpoint in {folder}", mend)
    if progress.get("data", data) != data:
        raise ValueError(
            f"the training data are not those that the run in {folder} was begun with (other conversations, or in another order); "
            f"{mend}"
        )


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
