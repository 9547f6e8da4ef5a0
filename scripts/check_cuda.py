"""What the tests prove on a CPU, on one CUDA GPU, and absolute figures of training for an 8B target; at most ten minutes.

    scripts/check_cuda.sh [--out FILE.md]          on a machine with a GPU
    scripts/check_cuda.sh --dry-run                all of it at toy sizes on a CPU, in a minute or two

Each section runs in a process of its own with a time limit, so that a failure, a hang or a broken context costs the others nothing.
The exit status is 1 if a check failed. No target is downloaded: weights are random.
"""

import argparse
import importlib
import importlib.metadata
import platform
import subprocess
import sys
import time
from pathlib import Path

import torch

from draftsmith.drafters.checkpoint import write_text

SECTIONS = {  # name: module with `run(device, dry)`, seconds allowed, title
    "attention": ("cuda_attention", 70, "Attention of packed texts against its plain definition in fp64"),
    "loss": ("cuda_loss", 90, "The fused loss against its plain definition in fp64, and its memory"),
    "kinds": ("cuda_kinds", 120, "Every kind against the CPU in fp64, packed and padded"),
    "runs": ("cuda_runs", 150, "Training runs: killed and continued, and ZeRO-2 on one device"),
    "figures": ("cuda_figures", 150, "Training for an 8B target with random weights"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Checks and figures on one CUDA GPU.")
    parser.add_argument("--dry-run", action="store_true", help="toy sizes on the CPU")
    parser.add_argument("--out", type=Path, default=None, metavar="FILE.md", help="write the results, too")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), metavar="SECTION")
    parser.add_argument("--section", choices=SECTIONS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.dry_run and not torch.cuda.is_available():
        sys.exit("check_cuda: there is no CUDA GPU here; --dry-run does everything at toy sizes on a CPU")
    if options.section:
        _section(options.section, options.dry_run)
        return
    failed, lines = [], _head(options.dry_run)
    for name in options.only:
        passed, more = _guarded(name, options.dry_run)
        lines += more
        print("\n".join(more), flush=True)
        if not passed:
            failed.append(name)
    lines += ["", f"Failed: {', '.join(failed)}." if failed else "All checks passed."]
    print(lines[-1])
    if options.out is not None:
        write_text(options.out, "\n".join([*lines, ""]))
    sys.exit(1 if failed else 0)


def check(what: str, value: float, allowed: float) -> None:
    """One measured deviation on a line of its own, and an error if it is too large or no number."""
    print(f"- {what}: {value:.2g} (allowed {allowed:.2g})", flush=True)
    if not value <= allowed:
        raise AssertionError(f"{what} is {value:.3g}, allowed {allowed:.3g}")


def relative(ours: torch.Tensor, right: torch.Tensor) -> float:
    """Length of the difference, as a share of the right one's length."""
    ours, right = ours.detach().cpu().double(), right.detach().cpu().double()
    return float((ours - right).norm() / right.norm().clamp_min(1e-30))


def _section(name: str, dry: bool) -> None:
    module = importlib.import_module(f"draftsmith.scripts.{SECTIONS[name][0]}")
    module.run(torch.device("cpu" if dry else "cuda"), dry)


def _guarded(name: str, dry: bool) -> tuple[bool, list[str]]:
    _, seconds, title = SECTIONS[name]
    command = [
        sys.executable,
        "-m",
        "draftsmith.scripts.check_cuda",
        "--section",
        name,
        *(["--dry-run"] if dry else []),
    ]
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, err = process.communicate(timeout=seconds)
        passed = process.returncode == 0
        problem = "\n".join(err.strip().splitlines()[-12:])
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        passed, problem = False, f"took longer than its {seconds} seconds"
    said = [line for line in out.strip().splitlines() if not line.startswith("[")]  # DeepSpeed announces itself there
    lines = ["", f"## {title}: {'passed' if passed else 'FAILED'} ({time.perf_counter() - start:.0f} s)", "", *said]
    return passed, lines if passed else [*lines, "", "```", problem, "```"]


def _head(dry: bool) -> list[str]:
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers", "accelerate")
    )
    if dry:
        where = f"dry run on a CPU ({platform.machine()})"
    else:
        free, total = torch.cuda.mem_get_info()
        where = f"{torch.cuda.get_device_name()}, {total / 2**30:.0f} GiB ({free / 2**30:.0f} free), CUDA {torch.version.cuda}"
    return [
        f"# Checks on a GPU, {time.strftime('%Y-%m-%d')}",
        "",
        f"{where}; Python {platform.python_version()}, {versions}.",
    ]


if __name__ == "__main__":
    main()
