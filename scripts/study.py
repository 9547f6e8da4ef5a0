"""Trains one config in several variants and tabulates what each choice bought: the τ of the verify loop on held-out prompts.

    python -m draftsmith.scripts.study CONFIG --runs FOLDER --out TABLE.md NAME[:key=value[;key=value]] ...

A variant that is already finished in its folder is not trained again, so a study can be extended or continued.
"""

import argparse
import json
import sys
from pathlib import Path

from draftsmith.train.config import read
from draftsmith.train.run import train


def main() -> None:
    parser = argparse.ArgumentParser(description="Train variants of a config and tabulate their real acceptance.")
    parser.add_argument("config")
    parser.add_argument("--runs", required=True, help="folder of the runs")
    parser.add_argument("--out", required=True, help="Markdown table to write")
    parser.add_argument("variants", nargs="+", metavar="NAME[:key=value[;key=value]]")
    options = parser.parse_args()
    rows = []
    try:
        for variant in options.variants:
            name, _, text = variant.partition(":")
            overrides = [part for part in text.split(";") if part]
            folder = Path(options.runs) / name
            print(f"== {name}: {'; '.join(overrides) or 'as the config says'}", file=sys.stderr)
            train(read(options.config, [*overrides, f"output={folder}", "tracking.tracker=none"]))
            rows.append(row(name, overrides, folder))
            Path(options.out).write_text(table(rows))
    except ValueError as error:
        print(f"study: {error}", file=sys.stderr)
        sys.exit(2)
    print(table(rows))


def row(name: str, overrides: list[str], folder: Path) -> list[str]:
    """One line of the table from a finished run."""
    finished = json.loads((folder / "finished.json").read_text())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    measured = max((line for line in lines if "acceptance/tau" in line), key=lambda line: line["acceptance/tau"])
    trained = [line for line in lines if "predicted_tau" in line][-1]
    conditional = [f"{value:.2f}" for key, value in measured.items() if key.startswith("acceptance/cond")]
    return [
        name,
        "; ".join(overrides) or "-",
        f"{finished['answer_tokens']:,}",
        str(finished["steps"]),
        f"{finished['seconds']:.0f}",
        f"{trained['predicted_tau']:.2f}",
        f"{measured['acceptance/tau']:.3f}",
        " ".join(conditional),
    ]


def table(rows: list[list[str]]) -> str:
    header = [
        "variant",
        "changes",
        "answer tokens trained",
        "steps",
        "seconds",
        "predicted tau (training)",
        "tau",
        "accepted given the one before",
    ]
    lines = ["| " + " | ".join(cells) + " |" for cells in [header, ["---"] * len(header), *rows]]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
