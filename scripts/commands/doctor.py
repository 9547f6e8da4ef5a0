"""`draftsmith doctor`: a preflight of a run, as a table of checks with pass, warn or fail and the mend."""

import argparse
import dataclasses
import json
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Any

from draftsmith.scripts.commands.arguments import command, config_arguments, get_device, positive, words

COLOURS = {"pass": "32", "warn": "33", "fail": "31"}


def add(commands: Any) -> None:
    about = "look a run over before it costs anything: data, masks, target, drafter, time, disk and memory"
    parser = command(commands, "doctor", about, run)
    config_arguments(parser)
    parser.add_argument(
        "--json", type=Path, default=None, metavar="FILE", help="write every check with its figures there"
    )
    parser.add_argument(
        "--rows", type=int, default=1000, metavar="N", help="conversations that are rendered (default 1000)"
    )
    about = "the chat template that the server uses (a jinja file), to be compared with the target's own"
    parser.add_argument("--serving-template", type=Path, default=None, metavar="FILE", help=about)
    about = "tokens of prompt and answer that will be served"
    parser.add_argument("--serving-length", type=int, default=None, metavar="N", help=about)


def run(options: argparse.Namespace) -> None:
    """Exit status 0 if nothing failed, 1 if something did; what keeps it from starting is a ValueError (2)."""
    from draftsmith.drafters.checkpoint import write_text
    from draftsmith.train.checks import Subject
    from draftsmith.train.config import read
    from draftsmith.train.doctor import examine, failed
    from draftsmith.train.run import load_target

    positive(options, "rows", "serving_length")
    files, overrides = words(options)
    if len(files) > 1:
        raise ValueError(f"{len(files)} configs are given, {', '.join(files)}; give one, and settings as key=value")
    if options.json is not None and not options.json.parent.is_dir():
        raise ValueError(f"the folder of {options.json} does not exist; create it first")
    config = read(files[0], overrides)
    subject = Subject(
        config,
        load_target(config, get_device(options.device)),
        num_rows=options.rows,
        serving_template=None if options.serving_template is None else options.serving_template.read_text("utf-8"),
        serving_length=options.serving_length,
    )
    checks = examine(subject)
    if options.json is not None:
        record = {"config": files[0], "failed": failed(checks), "checks": [dataclasses.asdict(c) for c in checks]}
        write_text(options.json, json.dumps(record, indent=2, ensure_ascii=False) + "\n")
    print(table(checks, sys.stdout.isatty()))
    if failed(checks):
        sys.exit(1)


def table(checks: list[Any], colour: bool) -> str:
    """A line per check with what was found and, where something is wrong, what mends it; then a row with its supervised tokens."""
    width = max(60, min(150, shutil.get_terminal_size((132, 24)).columns))
    indent = max(len(check.name) for check in checks) + 8
    lines = []
    for check in checks:
        head = f"{paint(check.verdict, COLOURS[check.verdict], colour)}  {check.name:{indent - 8}}  "
        text = textwrap.wrap(check.found, width - indent, break_long_words=False)
        text += textwrap.wrap(f"-> {check.mend}", width - indent) if check.mend else []
        lines += [head + text[0], *(" " * indent + line for line in text[1:])]
    counts = {verdict: sum(check.verdict == verdict for check in checks) for verdict in COLOURS}
    seconds = sum(check.seconds for check in checks)
    lines.append("\n" + ", ".join(f"{n} {verdict}" for verdict, n in counts.items()) + f"; {seconds:.0f} s")
    for check in checks:
        if "sample" in check.figures:
            marks = ("", "") if colour else ("[[", "]]")
            parts = [
                paint(marks[0] + text + marks[1], "32", colour) if supervised else text
                for text, supervised in check.figures["sample"]
            ]
            how = "in green" if colour else "in [[ ]]"
            lines.append(f"\nA row, its supervised tokens {how}:\n\n" + "".join(parts).rstrip("\n"))
    return "\n".join(lines)


def paint(text: str, colour: str, on: bool) -> str:
    return f"\033[{colour}m{text}\033[0m" if on else text
