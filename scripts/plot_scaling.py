"""Plots how the τ of the verify loop grows with training tokens, from finished runs.

python -m draftsmith.scripts.plot_scaling OUT.png LABEL=RUN,RUN,... [LABEL=RUN,...]
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def main() -> None:
    if len(sys.argv) < 3 or not all("=" in word for word in sys.argv[2:]):
        sys.exit("usage: python -m draftsmith.scripts.plot_scaling OUT.png LABEL=RUN,RUN,... [LABEL=RUN,...]")
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    ticks: set[int] = set()
    for word in sys.argv[2:]:
        label, _, runs = word.partition("=")
        points = sorted(point(Path(run)) for run in runs.split(","))
        axes.plot(*zip(*points, strict=True), marker="o", label=label)
        for tokens, tau in points:
            axes.annotate(f"{tau:.2f}", (tokens, tau), textcoords="offset points", xytext=(0, 7), ha="center")
        ticks |= {round(tokens, -4) for tokens, _ in points}
    axes.set_xscale("log")
    axes.set_xticks(sorted(ticks), [f"{tick // 1000} k" for tick in sorted(ticks)])
    axes.minorticks_off()
    axes.margins(y=0.15)
    axes.set_xlabel("answer tokens trained on")
    axes.set_ylabel("τ on held-out prompts (greedy, chain K = 5)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(sys.argv[1], dpi=120)


def point(run: Path) -> tuple[int, float]:
    finished = json.loads((run / "finished.json").read_text())
    return finished["trained_tokens"], finished["best_tau"]


if __name__ == "__main__":
    main()
