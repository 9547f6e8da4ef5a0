"""Several runs in one command, and one table of what they reached: the configs of `draftsmith train A.yaml B.yaml`, each with every
combination of the `--grid` values.

The runs are trained one after the other, each exactly as it would be by itself; finished ones are kept, so the same command goes on
after a kill. Then all drafters are measured together: on the same held-out prompts, in one run that shares plain decoding.
Drafters that are not trained here (n-grams, a stock model) may be measured beside them.
"""

import dataclasses
import datetime
import itertools
import json
import re
import sys
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate.state import AcceleratorState

from draftsmith import drafters
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.checkpoint import write_text
from draftsmith.drafters.tree import Dynamic, Plan, chain
from draftsmith.inference.conversations import read_conversations
from draftsmith.inference.evaluate import Settings, evaluate, spread
from draftsmith.inference.loading import load_drafter
from draftsmith.inference.records import Conversation
from draftsmith.inference.target import Target
from draftsmith.scripts.summary import footnotes, interval
from draftsmith.scripts.tables import plan_label
from draftsmith.train.config import RunConfig, read
from draftsmith.train.run import load_target, train

DEPTH, NODES, WIDTH = 5, 16, 8
"""Of the chain and the dynamic tree that are measured; a drafter that cannot go so deep goes as deep as it can."""
MEASURED = Settings(temperatures=(0.0, 1.0), max_new=128, speed_temperatures=(0.0,), speed_max_new=64)
HEADER = (
    "run | kind | parameters | training tokens | seconds | drafts | tau greedy | tau at T = 1 | accepted given the one before | "
    "draft time | speed-up"
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """What drafters are compared on.

    Attributes:
        file: JSONL of held-out prompts; None for `eval.prompts` of the configs.
        number: so many of them, evenly spread; None for all.
        max_new: tokens per answer; None for 128.
    """

    file: str | None = None
    number: int | None = None
    max_new: int | None = None


def read_runs(files: list[str], overrides: list[str], grid: list[str]) -> list[RunConfig]:
    """All runs of a sweep, one per config and combination of grid values, with a folder each.

    Args:
        files: run configs.
        overrides: `key=value`, for all of them.
        grid: `key=value,value,…`; a run's folder is its config's `output` with the values behind it.

    Raises:
        ValueError: a setting that a config refuses, a grid that is none, or two runs in one folder.
    """
    axes = dict(_axis(text) for text in grid)
    given = [text.partition("=")[0] for text in (*overrides, *grid)]
    twice = sorted({name for name in axes if given.count(name) > 1})
    if twice:
        raise ValueError(
            f"{', '.join(twice)} is given twice; give all its values in one --grid, and no override for it"
        )
    runs: dict[Path, str] = {}
    configs = []
    for file, values in itertools.product(files, itertools.product(*axes.values())):
        cell = [f"{name}={json.dumps(value, default=str)}" for name, value in zip(axes, values, strict=True)]
        config = read(file, [*overrides, *cell])
        config = dataclasses.replace(config, output=config.output + _suffix(dict(zip(axes, values, strict=True))))
        folder, origin = Path(config.output).resolve(), " ".join([file, *cell])
        if folder in runs:
            raise ValueError(
                f"{runs[folder]} and {origin} have the same folder {config.output}; give them different output or values"
            )
        runs[folder] = origin
        configs.append(config)
    return configs


def sweep(
    configs: list[RunConfig],
    beside: list[str],
    prompts: Prompts,
    device: torch.device,
    table: Path | None,
    command: str,
) -> str:
    """Trains all runs that are not finished, measures them together, and returns the table.

    Args:
        configs: the runs.
        beside: further drafters that are measured with them, as `inference.loading.load_drafter` takes them.
        prompts: held-out prompts.
        device: of the measurement.
        table: Markdown file for the table, where it comes from and how it was made; the full reports go beside it, as .json.
            None: for several drafters, a file with the date in its name in the folder that the first run lies in.
        command: what made it, for that file.

    Raises:
        ValueError: runs that cannot be compared, or what training and measuring refuse.
    """
    file = prompts.file or _common(
        configs, "eval.prompts", [config.eval.prompts for config in configs], "--eval-prompts"
    )
    targets = [dataclasses.replace(config.target, shape=None) for config in configs]
    _common(configs, "target", targets, "one table for each target")
    if table is not None and table.suffix != ".md":
        raise ValueError(f"--table is {table}; give a name that ends in .md")
    if table is not None and not table.parent.is_dir():
        raise ValueError(f"the folder of {table} does not exist; create it first")
    conversations = read_conversations(file)
    if prompts.number is not None:
        conversations = [conversations[i] for i in spread(len(conversations), prompts.number)]

    names = [*(config.output for config in configs), *beside]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{', '.join(twice)} is to be measured twice; leave it out of --beside")
    if table is None and len(names) > 1:
        table = Path(names[0]).parent / f"{datetime.date.today()}-sweep.md"
        table.parent.mkdir(parents=True, exist_ok=True)

    for config in configs:
        print(f"== {config.output}", file=sys.stderr, flush=True)
        AcceleratorState._reset_state()  # it lasts as long as the process and holds one precision; the next run may have another
        try:
            train(config)
        except ValueError as error:
            raise ValueError(f"{config.output}: {error}") from error

    target = load_target(configs[0], device)
    settings = MEASURED if prompts.max_new is None else dataclasses.replace(MEASURED, max_new=prompts.max_new)
    adapted = {config.output: config for config in configs if drafters.kind_module(config.kind).Model.adapts_target}
    reports = _measure(target, [name for name in names if name not in adapted], conversations, settings)
    for name, config in adapted.items():  # for each the target that its training made
        own = dataclasses.replace(config.target, path=str(Path(name) / "target"), revision=None, shape=None)
        reports |= _measure(
            load_target(dataclasses.replace(config, target=own), device), [name], conversations, settings
        )
    reports = {name: reports[name] for name in names}
    rows, notes = _rows(reports), footnotes([*reports.values()])
    if table is not None:
        data = sorted({name for config in configs for name in config.data.train})
        about = [f"Trained on {', '.join(data)}; measured on {len(conversations)} prompts of {file}.", *notes]
        head = [f"# Drafters for {configs[0].target.path}, {datetime.date.today()}", "", "```bash", command, "```", ""]
        write_text(table, "\n".join([*head, *about, "", *rows, ""]))
        write_text(table.with_suffix(".json"), json.dumps(reports, indent=2) + "\n")
        print(f"written to {table}", file=sys.stderr)
    return "\n".join([*rows, "", *notes])


def _measure(
    target: Target, names: list[str], prompts: list[Conversation], settings: Settings
) -> dict[str, dict[str, Any]]:
    """The reports of the drafters of one target."""
    if not names:
        return {}
    loaded = {name: load_drafter(name, target) for name in names}
    plans = {name: plans_for(drafter) for name, drafter in loaded.items()}
    return evaluate(target, loaded, prompts, settings, plans)


def plans_for(drafter: Drafter) -> tuple[Plan, ...]:
    """The chain, and the dynamic tree of a drafter that grows trees."""
    depth = min(DEPTH, drafter.max_depth or DEPTH)
    if not drafter.grows_trees:
        return (chain(depth),)
    return chain(depth), Dynamic(min(NODES, WIDTH + (depth - 1) * WIDTH**2), depth, WIDTH)


def _axis(text: str) -> tuple[str, list[Any]]:
    name, separator, values = text.partition("=")
    try:
        parsed = yaml.safe_load(f"[{values}]") if separator and name else None
    except yaml.YAMLError:
        parsed = None
    if not parsed:
        raise ValueError(f"--grid {text} is not of the form key=value,value, for example optim.learning_rate=1e-4,3e-4")
    if name == "output":
        raise ValueError("--grid output is not possible: every combination of values gets its own folder anyway")
    return name, parsed


def _suffix(values: dict[str, Any]) -> str:
    """ "-learning_rate-3e-4" """
    words = [word for name, value in values.items() for word in (name.rpartition(".")[2], value)]
    return "".join("-" + re.sub(r"[^\w.+-]+", "_", str(word)).strip("_") for word in words)


def _common(configs: list[RunConfig], name: str, values: list[Any], remedy: str) -> Any:
    """The value that all runs have, or ValueError."""
    for config, value in zip(configs, values, strict=True):
        if value != values[0]:
            raise ValueError(f"{configs[0].output} and {config.output} have different {name}; give {remedy}")
    return values[0]


def _rows(reports: dict[str, dict[str, Any]]) -> list[str]:
    """A row per run and plan."""
    lines = [f"| {HEADER} |", "|" + " --- |" * (HEADER.count("|") + 1)]
    for name, report in reports.items():
        record, file = report["record"], Path(name) / "finished.json"
        first = [name, record["drafter"], f"{record['drafter_parameters'] / 1e6:.1f} M", "-", "-"]
        if file.exists():
            finished = json.loads(file.read_text())
            first[3:] = [
                f"{finished['trained_tokens']:,}",
                f"{finished['seconds'] - finished['evaluation_seconds']:.0f}",
            ]
        results = {(r["temperature"], r["plan"]): r for r in report["results"]}
        for (temperature, plan), greedy in results.items():
            if temperature:
                continue
            cells = [*first, plan_label(greedy, "K = "), interval(greedy["tokens_per_round"])]
            cells.append(interval(results[MEASURED.temperatures[1], plan]["tokens_per_round"]))
            cells.append(" ".join("-" if a is None else f"{a:.2f}" for a in greedy["cond_accept"]))
            timed = "speedup" in greedy
            cells += [f"{greedy['round_cost']['draft']:.2f}", interval(greedy["speedup"])] if timed else ["-", "-"]
            lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "",
        "seconds: of training, without evaluation; draft time: of a round, in plain decode steps; "
        "it, the speed-up and the share accepted given the one before are greedy.",
    ]
    return lines
