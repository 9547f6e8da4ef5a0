"""The quickstart's result: one table over all runs of a folder, in Markdown.

python -m draftsmith.scripts.summary RUNS
"""

import json
import sys
from pathlib import Path
from typing import Any

from draftsmith.scripts.tables import describe_adapted, plan_label


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python -m draftsmith.scripts.summary RUNS")
    runs = sorted(path.parent for path in Path(sys.argv[1]).glob("*/eval.json"))
    if not runs:
        print(f"summary: no eval.json in {sys.argv[1]}/*/; run draftsmith eval with --json first", file=sys.stderr)
        sys.exit(2)
    print(summary(runs))


def summary(runs: list[Path]) -> str:
    """A row per run and temperature at its largest K, and the fastest K beside it."""
    reports: dict[Path, dict[str, Any]] = {run: json.loads((run / "eval.json").read_text()) for run in runs}
    depth = max(r["k"] for report in reports.values() for r in report["results"] if not r["speed_only"])
    header = (
        f"drafter | size | trained in | T | tau at K = {depth} | accepted given the one before | "
        "fastest K or tree | tokens/s plain | tokens/s speculative | speed-up"
    )
    lines = [f"| {header} |", "|" + " --- |" * (header.count("|") + 1)]
    for run, report in reports.items():
        finished = json.loads((run / "finished.json").read_text())
        record = report["record"]
        for temperature in sorted({r["temperature"] for r in report["results"]}):
            results = [r for r in report["results"] if r["temperature"] == temperature]
            deep = max((r for r in results if not r["speed_only"]), key=lambda r: r["k"])
            timed = [r for r in results if "speedup" in r]
            fast = max(timed, key=lambda r: r["speedup"]["value"], default=None)
            cells = [
                run.name,
                f"{record['drafter_parameters'] / 1e6:.1f} M",
                f"{finished['seconds'] / 60:.1f} min, {finished['trained_tokens'] / 1e3:.0f} k tokens",
                f"{temperature:g}",
                interval(deep["tokens_per_round"]),
                " ".join(f"{a:.2f}" for a in deep["cond_accept"] if a is not None),
            ]
            if fast is None:
                cells += ["-"] * 4
            else:
                rates = [f"{fast[name]:.1f}" for name in ("plain_tokens_per_second", "tokens_per_second")]
                cells += [plan_label(fast), *rates, interval(fast["speedup"])]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *footnotes([*reports.values()])])


def footnotes(reports: list[dict[str, Any]]) -> list[str]:
    """What was measured on what, and the evidence of losslessness; then a line for each target that training adapted."""
    adapted = [report["record"] for report in reports if report["record"].get("target_adapted_from")]
    record = next(
        (report["record"] for report in reports if report["record"] not in adapted), adapted[0] if adapted else {}
    )
    settings = record["settings"]
    agreements = [r["agreement"] for report in reports for r in report["results"] if "agreement" in r]
    identical, total = sum(a["identical"] for a in agreements), sum(a["of"] for a in agreements)
    worst = max((a["largest_margin"] for a in agreements), default=0.0)
    timed = min(settings["speed_prompts"], record["num_prompts"])
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    return [
        f"Target {record['target']} ({record['target_parameters'] / 1e6:.0f} M parameters, {record['dtype']}), "
        f"{record['threads']} threads, {versions}; {record['num_prompts']} held-out prompts, "
        f"{settings['max_new']} tokens per answer; speed at batch 1 on {timed} of them, "
        f"{settings['speed_max_new'] or settings['max_new']} tokens each. "
        "tau: tokens per target pass; intervals: 95 %, bootstrap over prompts.",
        f"Lossless: {identical} of {total} outputs identical to plain decoding; where {record['dtype']} rounding parts them, "
        f"the two tokens' scores differ by at most {worst:.2g}.",
        *(f"{record['name']}: {describe_adapted(record['target_adapted_from'])}." for record in adapted),
    ]


def interval(value: dict[str, float]) -> str:
    return f"{value['value']:.2f} [{value['low']:.2f}, {value['high']:.2f}]"


if __name__ == "__main__":
    main()
