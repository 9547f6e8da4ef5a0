"""The training run: config → target → data → features → drafter → one loop → the drafter with the best real acceptance.

    accelerate launch -m draftsmith.train.run CONFIG [key=value …]

Started again with the same command after a kill, it continues from its newest checkpoint and, on a CPU, ends with the same
bits (unless `loop.max_minutes` leaves it to the clock how many steps there are). The run folder holds config.yaml (complete),
drafter/ (the best so far; of a kind that adapts the target, target/ beside it), checkpoints/, metrics.jsonl.
"""

import json
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
from draftsmith.drafters.compiling import compile_training
from draftsmith.drafters.vocabulary import check_fill, check_hash, vocabulary_hash
from draftsmith.inference.conversations import read_conversations
from draftsmith.inference.evaluate import spread
from draftsmith.inference.load_target import load
from draftsmith.inference.records import prompt_messages
from draftsmith.inference.rendering import prompt_ids
from draftsmith.inference.target import Target
from draftsmith.train import checkpoints, serving, tracking, warm_start
from draftsmith.train.average import Average
from draftsmith.train.config import LoopConfig, RunConfig, read, to_yaml
from draftsmith.train.coverage import held_out_answers, measure
from draftsmith.train.data import Sequence, count_answer_tokens, data_hash, load_sequences
from draftsmith.train.features import FeatureStore
from draftsmith.train.loop import NOTHING_DONE, Loop, Plan, say
from draftsmith.train.meter import batch_flops
from draftsmith.train.optim import make_optimizers
from draftsmith.train.rows import exists, parse_source

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
    resumes = bool(checkpoints.complete(folder / "checkpoints"))  # then its weights replace all others
    start = None if resumes and config.data.vocabulary == "data" else warm_start.read(config)
    set_seed(config.seed)
    target = load_target(config, accelerator.device)
    sequences = load_training_sequences(config, target)
    counts_V = count_answer_tokens(sequences, target.shape.vocab_size)
    if config.data.vocabulary == "data":
        check_fill(counts_V, config.drafter_settings.get("draft_vocab_size"), config.data.vocabulary_fill)
    drafter = drafters.build(config.kind, config.drafter_settings, target.shape)
    if target.lockstep is not None and drafter.on_policy and config.features.store != "online":
        raise ValueError(
            f"drafter.on_policy is {drafter.on_policy} and features.store {config.features.store}: then processes run the target "
            "at different times, and a sharded one needs all of them for every pass; give features.store: online"
        )
    store = FeatureStore(target, sequences, drafter.feature_layers, config.features)
    store.fill()  # processes share the work

    plan = Plan(config, sequences, accelerator.num_processes)

    # The drafter starts from the target, or from another drafter.
    chosen_V = warm_start.counts_for_the_map(config, start, counts_V)
    drafter.initialise(target, chosen_V, () if resumes or start else some_batches(store, plan.epoch(0)))
    if start is not None:
        say(accelerator, warm_start.take_over(config, start, drafter, counts_V))
    drafter.to(accelerator.device, torch.float64 if target.dtype == torch.float64 else torch.float32)
    drafter.activation_checkpointing = config.loop.activation_checkpointing
    describe(accelerator, config, target, drafter, sequences, counts_V)
    vocabulary, data = vocabulary_hash(drafter.token_ids_W), data_hash(sequences)
    if config.optim.ema is not None and not drafter.averages:
        raise ValueError(f"optim.ema cannot average the adapters of this {config.kind}; set it to null")
    average = None if config.optim.ema is None else Average(config.optim.ema, drafter)
    flops = batch_flops(drafter, target if config.features.store == "online" else None)
    auto, compiled = accelerator.device.type == "cuda", config.loop.compile
    compile_training(drafter, auto if compiled == "auto" else compiled)
    model, *optimizers = accelerator.prepare(drafter, *make_optimizers(drafter, config.optim))

    # Where the run stands: at its newest checkpoint, if there is one.
    progress = NOTHING_DONE | (checkpoints.load_latest(accelerator, folder / "checkpoints", average) or {})
    check_continues(folder, progress, vocabulary_hash(drafter.token_ids_W), vocabulary, data)
    progress = {**progress, "data": data}
    metrics = tracking.Metrics(accelerator, config, progress["step"])
    held_out = load_held_out(config, target)
    if progress["step"]:
        say(accelerator, f"continuing from step {progress['step']} of {plan.num_steps}")
    loop = Loop(
        config,
        accelerator,
        target,
        store,
        plan,
        drafter,
        model,
        optimizers,
        average,
        metrics,
        held_out,
        flops,
        progress,
    )
    progress = loop.run()

    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        summary = {"steps": progress.pop("step"), "answer_tokens": int(counts_V.sum()), **progress}
        if drafter.adapts_target:
            summary["target_adapted_from"] = serving.origin(folder)
        write_text(folder / "finished.json", json.dumps(summary, indent=2) + "\n")
    metrics.finish(folder / "drafter", progress["best_step"], progress["best_tau"])
    metrics.close()
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
        placement=section.placement,
        quantisation=section.quantisation,
        adapter=section.adapter,
        merge_adapter=section.merge_adapter,
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
        given = config.data.vocabulary == "start"
        say(accelerator, str(measure(ids_W.cpu(), target.shape.vocab_size, sequences, answers, given)))


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
