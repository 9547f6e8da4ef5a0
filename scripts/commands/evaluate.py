"""`draftsmith eval`: real acceptance and speed."""

import argparse
import json
from pathlib import Path
from typing import Any

from draftsmith.scripts.commands.arguments import (
    command,
    integers,
    load_target,
    numbers,
    positive,
    sampling_arguments,
    target_arguments,
)


def add(commands: Any) -> None:
    about = "measure real acceptance and speed on held-out prompts, through the lossless verify loop"
    parser = command(commands, "eval", about, run)
    parser.add_argument(
        "drafters",
        nargs="+",
        metavar="DRAFTER",
        help="run folder, drafter folder, causal LM, ngram, suffix, or mtp; several share a run",
    )
    target_arguments(parser)
    parser.add_argument("--prompts", required=True, metavar="FILE", help="JSONL of held-out prompts")
    about = "draft lengths (default 5)"
    parser.add_argument("--k", type=integers, default=None, metavar="K[,K]", help=about)
    about = "a tree: dynamic:NODES[,DEPTH[,WIDTH]], wide:A,B,... (children per depth) or tree:PARENTS; may be repeated"
    parser.add_argument("--tree", action="append", default=[], metavar="PLAN", help=about)
    sampling_arguments(parser, several=True)
    parser.add_argument(
        "--rule", default="coupled", help="verification rule: coupled (default), ratio, block, rrsw, ..."
    )
    parser.add_argument("--draft", default=None, help="how draft tokens are chosen: coupled, sample or argmax")
    parser.add_argument("--max-new", type=int, default=128, metavar="N", help="tokens per answer (default 128)")
    parser.add_argument("--num-prompts", type=int, default=None, metavar="N", help="use so many, evenly spread")
    parser.add_argument("--batch-size", type=int, default=32, metavar="N", help="for acceptance (default 32)")
    parser.add_argument("--speed-prompts", type=int, default=8, metavar="N", help="for speed at batch 1; 0 for none")
    parser.add_argument("--speed-k", type=integers, default=(), metavar="K[,K]", help="tried for speed alone")
    parser.add_argument("--speed-tree", action="append", default=[], metavar="PLAN", help="a tree, for speed alone")
    parser.add_argument(
        "--speed-temperatures", type=numbers, default=None, metavar="T[,T]", help="measure speed at these only"
    )
    parser.add_argument("--speed-max-new", type=int, default=None, metavar="N", help="tokens per answer for speed")
    parser.add_argument("--repeats", type=int, default=1, metavar="N", help="of each speed prompt (default 1)")
    parser.add_argument("--compile", action="store_true", help="torch.compile target and drafters first (minutes)")
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    about = "where to write the report; several drafters: one --json for each, in their order"
    parser.add_argument("--json", action="append", default=[], metavar="FILE", help=about)


def run(options: argparse.Namespace) -> None:
    from draftsmith.drafters.checkpoint import write_text
    from draftsmith.drafters.tree import chain, parse_plan
    from draftsmith.inference.conversations import read_conversations
    from draftsmith.inference.evaluate import Settings, evaluate, spread
    from draftsmith.inference.loading import load_drafter
    from draftsmith.scripts.tables import eval_table

    positive(options, "max_new", "batch_size", "repeats", "speed_max_new", "num_prompts")
    speed_plans = [*map(chain, options.speed_k), *map(parse_plan, options.speed_tree)]
    if options.speed_prompts < (1 if speed_plans else 0):
        raise ValueError(
            f"--speed-prompts is {options.speed_prompts}; give 0 or more, and at least 1 with --speed-k or --speed-tree"
        )
    plans = [
        *map(chain, options.k if options.k is not None else () if options.tree else (5,)),
        *map(parse_plan, options.tree),
    ]
    if set(speed_plans) & set(plans):
        raise ValueError(
            "--speed-k or --speed-tree repeats what --k or --tree has, whose speed is measured anyway; leave it out"
        )
    conversations = read_conversations(options.prompts)
    if options.num_prompts is not None:
        conversations = [conversations[i] for i in spread(len(conversations), options.num_prompts)]
    files = [Path(file) for file in options.json]
    if files and len(files) != len(options.drafters):
        raise ValueError(f"{len(files)} times --json for {len(options.drafters)} drafters; give one for each")
    for given in (options.drafters, [file.resolve() for file in files]):
        if len(set(given)) < len(given):
            raise ValueError("a drafter or a --json file is given twice; name each once")
    for file in files:
        if not file.parent.is_dir():
            raise ValueError(f"the folder of {file} does not exist; create it first")
    unmeasured = set(options.speed_temperatures or ()) - set(options.temperature)
    if unmeasured:
        raise ValueError(f"--speed-temperatures has {sorted(unmeasured)}, which --temperature has not")
    settings = Settings(
        plans=tuple(plans),
        temperatures=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        rule=options.rule,
        way=options.draft,
        max_new=options.max_new,
        batch_size=options.batch_size,
        speed_prompts=options.speed_prompts,
        speed_plans=tuple(speed_plans),
        speed_temperatures=options.speed_temperatures,
        speed_max_new=options.speed_max_new,
        repeats=options.repeats,
        seed=options.seed,
        compiled=options.compile,
    )
    target = load_target(options)
    loaded = {name: load_drafter(name, target) for name in options.drafters}
    reports = evaluate(target, loaded, conversations, settings)
    for file, report in zip(files, reports.values(), strict=False):
        write_text(file, json.dumps(report, indent=2) + "\n")
    print("\n\n".join(map(eval_table, reports.values())))
