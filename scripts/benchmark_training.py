"""Training tokens/s and peak memory of every kind at SmolLM2's sizes, on the machine at hand; for before and after.

    python -m draftsmith.scripts.benchmark_training [--kinds eagle3 medusa] [--tokens 2048] [--out FILE.md]

A drafter of each kind as its SmolLM2 config builds it, for a target of that shape with random weights (time does not depend on
them): whole optimizer steps, bf16 autocast over fp32 weights, one pack of texts of 224 tokens, a quarter of each prompt, with
features that lie ready. Each case, with activations kept or computed again, runs in a process of its own. Its peak memory is what
it took above what it held before the drafter was made (weights, optimizer, gradients and all), and above its rest between steps.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from draftsmith import drafters
from draftsmith.configs import locate
from draftsmith.drafters.base import TrainableDrafter, TrainingBatch
from draftsmith.drafters.checkpoint import write_text
from draftsmith.scripts.benchmark_lengths import make_batch, random_smollm2
from draftsmith.scripts.resident import Memory
from draftsmith.train.config import read
from draftsmith.train.optim import make_optimizers

TEXT = 224
"""The mean length of the bundled answers' conversations."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Training tokens/s and peak memory of every kind.")
    parser.add_argument("--kinds", nargs="+", default=drafters.kinds(), choices=drafters.kinds(), metavar="KIND")
    parser.add_argument("--tokens", type=int, default=2048, help="of a step")
    parser.add_argument("--steps", type=int, default=5, help="timed ones, behind two that warm up")
    parser.add_argument("--out", type=Path, default=None, metavar="FILE.md")
    parser.add_argument("--case", choices=("kept", "recomputed"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.tokens < TEXT:
        parser.error(f"--tokens is {options.tokens}; give {TEXT} or more")
    if options.case:
        print(json.dumps(measure(options.kinds[0], options.tokens, options.steps, options.case == "recomputed")))
        return
    rows = table(options)
    print("\n".join(rows))
    if options.out is not None:
        versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers"))
        where = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{torch.get_num_threads()} threads"
        head = [
            f"# Training speed and memory, {time.strftime('%Y-%m-%d')}",
            "",
            "```bash",
            f"python -m draftsmith.scripts.benchmark_training {' '.join(sys.argv[1:])}",
            "```",
            "",
            f"Python {platform.python_version()}, {versions}; {where} of {os.cpu_count()} cores.",
            "",
        ]
        write_text(options.out, "\n".join([*head, *rows, ""]))


def table(options: argparse.Namespace) -> list[str]:
    """A row for each kind and case; a case whose process fails says so on stderr and is left out."""
    rows = [
        "| kind | activations | step, ms [least, most] | tokens/s | supervised tokens/s | peak, everything, MiB | above rest |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for kind in options.kinds:
        for case in ("kept", "recomputed"):
            command = [sys.executable, "-m", "draftsmith.scripts.benchmark_training", "--kinds", kind, "--case", case]
            command += ["--tokens", str(options.tokens), "--steps", str(options.steps)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
            if done.returncode != 0:
                print(f"benchmark_training: {kind}, {case} failed; see above", file=sys.stderr)
                continue
            found = json.loads(done.stdout.splitlines()[-1])
            milliseconds = [1e3 * seconds for seconds in found["seconds"]]
            median = statistics.median(milliseconds)
            step = f"{median:.0f} [{min(milliseconds):.0f}, {max(milliseconds):.0f}]"
            speeds = [f"{1e3 * found[name] / median:,.0f}" for name in ("tokens", "supervised")]
            rows.append(
                f"| {kind} | {case} | {step} | {' | '.join(speeds)} | {found['peak']:.0f} | {found['above']:.0f} |"
            )
            print(rows[-1], file=sys.stderr)
    return rows


def measure(kind: str, tokens: int, num_steps: int, recompute: bool) -> dict[str, object]:
    """Seconds of each step, and MiB."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target = random_smollm2(30, device)
    memory = Memory() if device.type == "cpu" else None
    floor = 0 if memory else torch.cuda.memory_allocated()
    run = read(locate(f"configs/{kind}_smollm2.yaml"))
    drafter = drafters.build(kind, run.drafter_settings, target.shape)
    drafter.initialise(target, torch.ones(target.shape.vocab_size, dtype=torch.int64))
    drafter.to(device, torch.float32).train()
    drafter.activation_checkpointing = recompute
    optimizers = make_optimizers(drafter, run.optim)
    batch = make_batch(drafter, [TEXT] * (tokens // TEXT), device)
    seconds, peaks, above = [], [], []
    for _ in range(2 + num_steps):
        if memory:
            rest = memory.rest()
        else:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            rest = (torch.cuda.memory_allocated() - floor) / 2**20
        start = time.perf_counter()
        optimizer_step(drafter, batch, optimizers, run.optim.clip_norm)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        peaks.append(memory.peak() if memory else (torch.cuda.max_memory_allocated() - floor) / 2**20)
        above.append(peaks[-1] - rest)
    return {
        "seconds": seconds[2:],
        "tokens": batch.ids_BT.numel(),
        "supervised": batch.layout.num_supervised,
        "peak": max(peaks),
        "above": max(above[2:]),
    }


def optimizer_step(
    drafter: TrainableDrafter, batch: TrainingBatch, optimizers: list[torch.optim.Optimizer], clip_norm: float
) -> None:
    """One whole step in bf16 autocast."""
    with torch.autocast(batch.ids_BT.device.type, torch.bfloat16):
        parts = drafter(batch)
    (parts.sum / parts.count).backward()
    torch.nn.utils.clip_grad_norm_(drafter.parameters(), clip_norm)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
