"""`draftsmith train`: one run, or several and a table."""

import argparse
import os
from pathlib import Path
from typing import Any

from draftsmith.scripts.commands.arguments import command, config_arguments, get_device, positive, words


def add(commands: Any) -> None:
    about = (
        "train a drafter (on several devices: accelerate launch -m draftsmith.train.run CONFIG [key=value ...]); "
        "several configs, or a grid of values: train all, and compare them in one table"
    )
    parser = command(commands, "train", about, run)
    config_arguments(parser)
    parser.add_argument("--dry-run", action="store_true", help="check the config, print the drafter's size and stop")
    about = "one run for each of these values; several --grid: for each combination"
    parser.add_argument("--grid", action="append", default=[], metavar="key=V,V", help=about)
    about = "write the table of all runs there, and their full reports beside it as .json (default: DATE-sweep.md beside the runs)"
    parser.add_argument("--table", type=Path, default=None, metavar="FILE.md", help=about)
    about = "a drafter that is not trained but measured in the table too, as for eval; may be repeated"
    parser.add_argument("--beside", action="append", default=[], metavar="DRAFTER", help=about)
    about = "held-out prompts for the table (default: eval.prompts of the configs)"
    parser.add_argument("--eval-prompts", default=None, metavar="FILE", help=about)
    parser.add_argument("--eval-num-prompts", type=int, default=None, metavar="N", help="so many, evenly spread")
    parser.add_argument("--eval-max-new", type=int, default=None, metavar="N", help="tokens per answer (default 128)")


def run(options: argparse.Namespace) -> None:
    from draftsmith.scripts.sweep import Prompts, read_runs, sweep
    from draftsmith.train.run import train

    positive(options, "eval_num_prompts", "eval_max_new")
    configs = read_runs(*words(options), options.grid)
    if options.dry_run:
        from draftsmith.train.size import describe_size

        for config in configs:
            print(f"{config.output}: " * (len(configs) > 1) + describe_size(config))
        return
    if options.device == "cpu":
        os.environ["ACCELERATE_USE_CPU"] = "true"
    prompts = Prompts(file=options.eval_prompts, number=options.eval_num_prompts, max_new=options.eval_max_new)
    if len(configs) > 1 or options.grid or options.table or options.beside or prompts != Prompts():
        device = get_device(options.device)
        print(sweep(configs, options.beside, prompts, device, options.table, options.command_line))
    else:
        print(train(configs[0]))
