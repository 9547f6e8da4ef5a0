"""`draftsmith generate`: one answer, drafted tokens in green."""

import argparse
import sys
from typing import Any

from draftsmith.scripts.commands.arguments import command, load_target, sampling_arguments, target_arguments


def add(commands: Any) -> None:
    parser = command(commands, "generate", "answer one prompt, tokens that the drafter guessed in green", run)
    parser.add_argument(
        "drafter", metavar="DRAFTER", help="run folder, drafter folder, causal LM, ngram, suffix, or mtp"
    )
    target_arguments(parser)
    parser.add_argument("--prompt", required=True, metavar="TEXT")
    parser.add_argument("--k", type=int, default=5, metavar="K", help="draft length (default 5)")
    parser.add_argument("--tree", default=None, metavar="PLAN", help="a tree instead, as for eval: dynamic:16, ...")
    parser.add_argument("--max-new", type=int, default=256, metavar="N", help="token budget (default 256)")
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    sampling_arguments(parser)


def run(options: argparse.Namespace) -> None:
    from draftsmith.drafters.tree import chain, parse_plan
    from draftsmith.inference.decode import generate
    from draftsmith.inference.loading import load_drafter
    from draftsmith.inference.metrics import tokens_per_round
    from draftsmith.inference.output import Seconds
    from draftsmith.inference.rendering import prompt_ids
    from draftsmith.inference.sampling import Sampler
    from draftsmith.inference.speculation import Speculation
    from draftsmith.scripts.tables import Stream, describe_adapted

    target = load_target(options)
    drafter = load_drafter(options.drafter, target)
    plan = parse_plan(options.tree) if options.tree else chain(min(options.k, drafter.max_depth or options.k))
    stream, seconds = Stream(target.tokenizer), Seconds()
    outputs = generate(
        target,
        [prompt_ids(target.tokenizer, [{"role": "user", "content": options.prompt}])],
        max_new=options.max_new,
        sampler=Sampler(options.temperature, options.top_k, options.top_p),
        speculation=Speculation(drafter, plan),
        seeds=[options.seed],
        on_tokens=lambda _row, tokens, drafted: stream.add(tokens, drafted),
        seconds=seconds,
    )
    stream.close()
    tokens = len(outputs[0].ids)
    rate = (tokens - 1) / seconds.decode if seconds.decode else float("nan")
    tau = tokens_per_round([outputs[0].rounds])
    print(f"{tokens} tokens, {tau:.2f} per round, {rate:.1f} tokens/s, lossless", file=sys.stderr)
    if target.adapted_from:
        print(describe_adapted(target.adapted_from), file=sys.stderr)
