"""Acceptance by verification rule: chains and trees of 8, 16 and 32 nodes, at temperatures above 0.

    python -m draftsmith.scripts.rules DRAFTER --target T --fit FILE --prompts FILE --out FILE.md

Static trees are searched for each way of drafting on the prompts of --fit, and everything is measured on those of --prompts.
Tokens per round with a 95 % bootstrap interval over prompts; a Markdown table, and the trees that were found.
"""

import argparse
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

from draftsmith import drafters
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.checkpoint import write_text
from draftsmith.drafters.tree import Dynamic, Fixed, Plan, chain, plan_name
from draftsmith.inference import metrics
from draftsmith.inference.conversations import read_conversations
from draftsmith.inference.decode import generate
from draftsmith.inference.evaluate import spread
from draftsmith.inference.load_target import load
from draftsmith.inference.records import prompt_messages
from draftsmith.inference.rendering import prompt_ids
from draftsmith.inference.sampling import Sampler
from draftsmith.inference.speculation import Speculation
from draftsmith.inference.static_trees import best_tree, measure_ranks
from draftsmith.inference.target import Target

DEPTH, WIDTH, SIZES = 5, 8, (8, 16, 32)


def main() -> None:
    parser = argparse.ArgumentParser(description="Acceptance of a drafter by verification rule.")
    parser.add_argument("drafter")
    parser.add_argument("--target", required=True)
    parser.add_argument("--fit", required=True, help="JSONL of prompts on which static trees are searched")
    parser.add_argument("--prompts", required=True, help="JSONL of held-out prompts")
    parser.add_argument("--temperatures", default="0.7,1")
    parser.add_argument("--num-prompts", type=int, default=48)
    parser.add_argument("--max-new", type=int, default=48)
    parser.add_argument("--batch-size", type=int, default=24)
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    target = load(options.target, dtype=torch.bfloat16)
    drafter = drafters.load(options.drafter, dtype=torch.bfloat16)
    assert target.tokenizer is not None

    def prompts(file: str) -> list[list[int]]:
        conversations = read_conversations(file)
        chosen = [conversations[i] for i in spread(len(conversations), options.num_prompts)]
        return [prompt_ids(target.tokenizer, prompt_messages(c.messages), c.tools) for c in chosen]

    fit, held_out = prompts(options.fit), prompts(options.prompts)
    lines: list[str] = []
    for temperature in map(float, options.temperatures.split(",")):
        sampler = Sampler(temperature)
        static: dict[str, dict[int, Fixed]] = {}
        for way in ("coupled", "argmax"):
            ranks = measure_ranks(
                target, drafter, fit, depth=DEPTH, width=WIDTH, sampler=sampler, max_new=options.max_new,
                batch_size=options.batch_size, way=way,
            )  # fmt: skip
            static[way] = {size: best_tree(ranks, size) for size in SIZES}
        static["sample"] = static[
            "coupled"
        ]  # siblings without replacement are as likely right as coupled ones, rank by rank
        lines += [f"Temperature {temperature:g}", "", *_header()]
        cells: list[tuple[str, str, dict[int, Plan]]] = [
            ("coupled, dynamic tree", "coupled", {size: Dynamic(size, DEPTH, WIDTH) for size in SIZES}),
            ("coupled, static tree", "coupled", {**static["coupled"]}),
            ("rrsw, static tree", "rrsw", {**static["sample"]}),
            (
                "point_mass, deterministic dynamic tree",
                "point_mass",
                {size: Dynamic(size, DEPTH, WIDTH) for size in SIZES},
            ),
            ("point_mass, deterministic static tree", "point_mass", {**static["argmax"]}),
        ]
        chains: list[tuple[str, str, Plan]] = [(rule, rule, chain(DEPTH)) for rule in ("coupled", "ratio", "block")]
        for name, rule, plan in [*chains, ("point_mass, argmax", "point_mass", chain(DEPTH))]:
            tau = _tau(target, drafter, held_out, sampler, plan, rule, options)
            _add(lines, f"| {name}, chain | {tau} | - | - | - |")
        for name, rule, plans in cells:
            taus = [_tau(target, drafter, held_out, sampler, plans[size], rule, options) for size in SIZES]
            _add(lines, f"| {name} | - | {' | '.join(taus)} |")
        lines += ["", "Static trees found (parents of each node, -1 is the root):", ""]
        lines += [
            f"- {way}, {size}: `{plan_name(static[way][size])}`" for way in ("coupled", "argmax") for size in SIZES
        ]
        lines.append("")
    versions = f"python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}"
    about = (
        f"{options.drafter} for {options.target}, bfloat16, {len(held_out)} prompts of {options.prompts}, up to {options.max_new} "
        f"tokens each; dynamic trees: depth {DEPTH}, width {WIDTH}. {versions}."
    )
    write_text(Path(options.out), "\n".join(["# Acceptance by rule", "", about, "", *lines]))


def _header() -> Sequence[str]:
    sizes = " | ".join(f"{size} nodes" for size in SIZES)
    return f"| tokens per round [95 %] | K = {DEPTH} | {sizes} |", "| --- | --- | --- | --- | --- |"


def _add(lines: list[str], line: str) -> None:
    print(line, file=sys.stderr, flush=True)
    lines.append(line)


def _tau(
    target: Target, drafter: Drafter, prompts: list[list[int]], sampler: Sampler, plan: Plan, rule: str,
    options: argparse.Namespace,
) -> str:  # fmt: skip
    outputs = generate(
        target,
        prompts,
        max_new=options.max_new,
        sampler=sampler,
        speculation=Speculation(drafter, plan, rule),
        max_batch=options.batch_size,
    )
    tau = metrics.pooled([output.rounds for output in outputs], metrics.tokens_per_round)
    return f"{tau['value']:.2f} [{tau['low']:.2f}, {tau['high']:.2f}]"


if __name__ == "__main__":
    main()
