"""Time and memory of the distillation loss with its gradients: in chunks (`drafters.fused`) beside the plain definition.

    python -m draftsmith.scripts.benchmark_loss --out docs/results/DATE-loss.md

One depth, KL towards the whole vocabulary, from states of target and draft through their heads; the draft's is trained or frozen.
The plain version is the definition with autograd: products in the given dtype, softmax and log-softmax in fp32.
The chunked one also gives α, whether each guess is right, and each row's loss; it is told the log-normaliser, as in training.

Every measurement is a process of its own, the versions take turns, medians count. Memory is the peak above what was there before:
resident pages on a CPU (`VmHWM` after a reset), allocated bytes on a GPU.

Letters: n rows, D width, V vocabulary.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.drafters import divergences
from draftsmith.drafters.checkpoint import write_text
from draftsmith.drafters.fused import Teacher, fused, use_compiled

VERSIONS = ("plain", "fused")
WARM_UP_ROWS, SETUP_ROWS = 64, 512


def main() -> None:
    parser = argparse.ArgumentParser(description="Time and memory of the chunked loss beside its plain definition.")
    parser.add_argument("--vocab", type=int, default=151_936, metavar="V")
    parser.add_argument("--rows", type=int, default=8_192, metavar="N", help="supervised tokens")
    parser.add_argument("--width", type=int, default=2_048, metavar="D")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--heads", nargs="+", choices=("trained", "frozen"), default=["trained", "frozen"])
    parser.add_argument("--compiled", action="store_true", help="compile the chunked version's kernel")
    parser.add_argument("--repeats", type=int, default=3, metavar="N")
    parser.add_argument("--out", default=None, metavar="FILE.md")
    parser.add_argument("--one", choices=VERSIONS, default=None, help=argparse.SUPPRESS)  # what a process measures
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(measure(options, options.one, options.heads[0] == "trained")))
        return
    text = "\n".join([*_heading(options), *_table(options), ""])
    print(text)
    if options.out is not None:
        write_text(Path(options.out), text)


def plain(
    states_nD: Tensor, last_nD: Tensor, log_normaliser_n: Tensor, target_head_VD: Tensor, head_VD: Tensor
) -> Tensor:
    with torch.no_grad():
        target_probs_nV = torch.softmax((last_nD @ target_head_VD.T).float(), 1)
    log_probs_nV = torch.log_softmax((states_nD @ head_VD.T).float(), 1)
    return -(target_probs_nV * log_probs_nV).sum()


def chunked(
    states_nD: Tensor, last_nD: Tensor, log_normaliser_n: Tensor, target_head_VD: Tensor, head_VD: Tensor
) -> Tensor:
    num_rows, device = len(states_nD), states_nD.device
    argmax_n = torch.zeros(num_rows, dtype=torch.int64, device=device)
    teacher = Teacher(last_nD, log_normaliser_n, target_head_VD, lambda logits: logits, argmax_n, None, False)
    weights = [torch.ones(num_rows, device=device)]
    kl = divergences.choose("kl", 0.0, 1, 0.0)
    return fused([states_nD], [torch.arange(num_rows)], weights, teacher, kl, [head_VD])[0]


def measure(options: argparse.Namespace, version: str, trained: bool) -> dict[str, float]:
    """Seconds, bytes above the inputs, the loss of a row, and the norms of the gradients."""
    use_compiled(options.compiled)
    dtype, device = getattr(torch, options.dtype), torch.device(options.device)
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, dtype=dtype, device=device, generator=generator).mul_(scale)

    scale = 2 * options.width**-0.5  # logits of standard deviation 2
    target_head_VD, head_VD = (random(options.vocab, options.width, scale=scale) for _ in range(2))
    last_nD, states_nD = (random(options.rows, options.width) for _ in range(2))
    normaliser_n = torch.cat([(x @ target_head_VD.T).float().logsumexp(1) for x in last_nD.split(SETUP_ROWS)])
    head_VD.requires_grad_(trained)
    states_nD.requires_grad_()
    loss = plain if version == "plain" else chunked

    def run(num_rows: int) -> Tensor:
        total = loss(states_nD[:num_rows], last_nD[:num_rows], normaliser_n[:num_rows], target_head_VD, head_VD)
        (total / num_rows).backward()
        return total.detach() / num_rows

    run(min(WARM_UP_ROWS, options.rows))
    states_nD.grad = head_VD.grad = None
    (value, seconds), peak = _peak_bytes(lambda: _timed(lambda: run(options.rows), device), device)
    norms = {
        f"norm of the {name}'s gradient": float(torch.linalg.vector_norm(x.grad, dtype=torch.float32))
        for name, x in (("states", states_nD), ("head", head_VD))
        if x.grad is not None
    }
    return {"seconds": seconds, "bytes": peak, "loss": float(value)} | norms


def _timed(run: Callable[[], Tensor], device: torch.device) -> tuple[Tensor, float]:
    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    start = now()
    value = run()
    return value, now() - start


def _peak_bytes(run: Callable[[], Any], device: torch.device) -> tuple[Any, int]:
    """What it gives, and the most memory that it had at once, above what was there before."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return run(), torch.cuda.max_memory_allocated(device) - before
    Path("/proc/self/clear_refs").write_text("5")  # the peak becomes what is resident now
    before = _status_bytes("VmRSS")
    return run(), _status_bytes("VmHWM") - before


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def _heading(options: argparse.Namespace) -> list[str]:
    where = f"{torch.get_num_threads()} threads of {os.cpu_count()} cores"
    if options.device == "cuda":
        where = torch.cuda.get_device_name()
    return [
        f"# The loss in chunks beside its plain definition, {time.strftime('%Y-%m-%d')}",
        "",
        "```bash",
        f"python -m draftsmith.scripts.benchmark_loss {' '.join(sys.argv[1:])}".rstrip(),
        "```",
        "",
        f"V = {options.vocab:,}, {options.rows:,} rows, D = {options.width:,}, {options.dtype}; Python "
        f"{platform.python_version()}, torch {torch.__version__}, {where}; medians of {options.repeats} processes each.",
        "",
    ]


def _table(options: argparse.Namespace) -> list[str]:
    lines = [
        "| draft head | seconds, plain | seconds, chunked | time, chunked / plain | peak GB above the inputs, plain | chunked | "
        "memory, chunked / plain | largest difference of loss and norms of gradients |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for head in options.heads:
        found: dict[str, list[dict[str, float]]] = {version: [] for version in VERSIONS}
        for _ in range(options.repeats):
            for version in VERSIONS:
                found[version].append(_in_a_process(options, version, head))
        one, other = ({k: statistics.median(run[k] for run in found[v]) for k in found[v][0]} for v in VERSIONS)
        apart = max(abs(one[name] / other[name] - 1) for name in one.keys() - {"seconds", "bytes"})
        ratio = {name: other[name] / one[name] for name in ("seconds", "bytes")}
        lines.append(
            f"| {head} | {one['seconds']:.1f} | {other['seconds']:.1f} | {ratio['seconds']:.2f} | {one['bytes'] / 1e9:.2f} | "
            f"{other['bytes'] / 1e9:.2f} | {ratio['bytes']:.1%} | {apart:.2%} |"
        )
    return lines


def _in_a_process(options: argparse.Namespace, version: str, head: str) -> dict[str, float]:
    words = [f"--{name}={getattr(options, name)}" for name in ("vocab", "rows", "width", "dtype", "device")]
    words += ["--compiled"] if options.compiled else []
    command = [sys.executable, "-m", "draftsmith.scripts.benchmark_loss", *words, "--heads", head, "--one", version]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        sys.exit(
            f"benchmark_loss: the process of {version} with {options.rows} rows ended with {done.returncode} "
            "(-9: not enough memory); give fewer --rows"
        )
    out: dict[str, float] = json.loads(done.stdout)
    return out


if __name__ == "__main__":
    main()
