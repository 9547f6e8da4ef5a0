"""The `draftsmith` command: thin, every subcommand only parses and calls the module that does the work.

What a user can put right is a `ValueError` below and one line here, with exit status 2.
"""

import argparse
import json
import os
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="draftsmith", description="Train, verify and measure draft heads.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in (_add_data, _add_cache, _add_train, _add_eval, _add_generate):
        add(commands)
    options, rest = parser.parse_known_args(arguments)
    if rest:
        # argparse does not collect configs and key=value behind an option such as --dry-run
        if not hasattr(options, "words") or any(word.startswith("-") for word in rest):
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        options.words = [*options.words, *rest]
    options.command_line = shlex.join(["draftsmith", *(sys.argv[1:] if arguments is None else arguments)])
    try:
        options.run(options)
    except ValueError as error:
        sys.exit(_fail(options.command, str(error)))
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        sys.exit(_fail(options.command, f"{where}{error.strerror or error}; free space or choose another path"))
    except KeyboardInterrupt:
        print(f"\ndraftsmith {options.command}: interrupted; the same command continues where it can", file=sys.stderr)
        sys.exit(130)


def _fail(command: str, message: str) -> int:
    print(f"draftsmith {command}: {' '.join(message.split())}", file=sys.stderr)
    return 2


# ---- data -------------------------------------------------------------------------------------------------------------


def _add_data(commands: Any) -> None:
    about = "build training conversations: the frozen target answers prompts, or invents them too"
    parser = _command(commands, "data", about, _data)
    parser.add_argument("prompts", nargs="?", metavar="PROMPTS", help="JSONL of prompts or conversations")
    _target_arguments(parser)
    parser.add_argument("--out", required=True, metavar="FILE", help="JSONL to write; an interrupted run continues")
    parser.add_argument("--self-prompt", type=int, default=0, metavar="N", help="user turns the target invents itself")
    parser.add_argument("--samples", type=int, default=1, metavar="N", help="answers per prompt (default 1)")
    parser.add_argument("--max-new", type=int, default=256, metavar="N", help="token budget of an answer (default 256)")
    parser.add_argument("--batch-size", type=int, default=64, metavar="N", help="prompts decoded together (default 64)")
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    _sampling_arguments(parser)


def _data(options: argparse.Namespace) -> None:
    from draftsmith.inference.sampling import Sampler
    from draftsmith.train.regenerate import Settings, regenerate

    _positive(options, "samples", "max_new", "batch_size")
    settings = Settings(
        sampler=Sampler(options.temperature, options.top_k, options.top_p),
        max_new=options.max_new,
        batch_size=options.batch_size,
        samples=options.samples,
        seed=options.seed,
        self_prompt=options.self_prompt,
    )
    records = regenerate(_load_target(options), options.prompts, options.out, settings)
    print(f"{options.out}: {len(records):,} conversations")


# ---- cache and train --------------------------------------------------------------------------------------------------


def _add_cache(commands: Any) -> None:
    parser = _command(
        commands, "cache", "fill the feature store of a run, so that training need not run the target", _cache
    )
    _config_arguments(parser)


def _cache(options: argparse.Namespace) -> None:
    import dataclasses

    from draftsmith import drafters
    from draftsmith.train.config import read
    from draftsmith.train.features import FeatureStore
    from draftsmith.train.run import load_target, load_training_sequences

    files, overrides = _words(options)
    if len(files) > 1:
        raise ValueError(f"{len(files)} configs are given, {', '.join(files)}; give one, and settings as key=value")
    config = read(files[0], overrides)
    if config.features.store != "disk":
        raise ValueError("the config's features.store is not disk; add features.store=disk features.folder=FOLDER")
    target = load_target(config, _device(options.device))
    sequences = load_training_sequences(config, target)
    layers = drafters.build(config.kind, config.drafter_settings, target.shape).feature_layers
    store = FeatureStore(target, sequences, layers, **dataclasses.asdict(config.features))
    size = store.bytes_per_token() * sum(len(sequence.ids) for sequence in sequences)
    print(f"{config.features.folder}: {len(sequences):,} conversations, about {size / 1e9:.2f} GB", file=sys.stderr)
    store.fill()


def _add_train(commands: Any) -> None:
    about = (
        "train a drafter (on several devices: accelerate launch -m draftsmith.train.run CONFIG [key=value ...]); "
        "several configs, or a grid of values: train all, and compare them in one table"
    )
    parser = _command(commands, "train", about, _train)
    _config_arguments(parser)
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


def _train(options: argparse.Namespace) -> None:
    from draftsmith.scripts.sweep import Prompts, read_runs, sweep
    from draftsmith.train.run import train

    _positive(options, "eval_num_prompts", "eval_max_new")
    configs = read_runs(*_words(options), options.grid)
    if options.dry_run:
        from draftsmith.train.size import describe_size

        for config in configs:
            print(f"{config.output}: " * (len(configs) > 1) + describe_size(config))
        return
    if options.device == "cpu":
        os.environ["ACCELERATE_USE_CPU"] = "true"
    prompts = Prompts(file=options.eval_prompts, number=options.eval_num_prompts, max_new=options.eval_max_new)
    if len(configs) > 1 or options.grid or options.table or options.beside or prompts != Prompts():
        device = _device(options.device)
        print(sweep(configs, options.beside, prompts, device, options.table, options.command_line))
    else:
        print(train(configs[0]))


# ---- eval -------------------------------------------------------------------------------------------------------------


def _add_eval(commands: Any) -> None:
    about = "measure real acceptance and speed on held-out prompts, through the lossless verify loop"
    parser = _command(commands, "eval", about, _eval)
    parser.add_argument(
        "drafters",
        nargs="+",
        metavar="DRAFTER",
        help="run folder, drafter folder, causal LM, ngram, suffix, or mtp; several share a run",
    )
    _target_arguments(parser)
    parser.add_argument("--prompts", required=True, metavar="FILE", help="JSONL of held-out prompts")
    about = "draft lengths (default 5)"
    parser.add_argument("--k", type=_integers, default=None, metavar="K[,K]", help=about)
    about = "a tree: dynamic:NODES[,DEPTH[,WIDTH]], wide:A,B,... (children per depth) or tree:PARENTS; may be repeated"
    parser.add_argument("--tree", action="append", default=[], metavar="PLAN", help=about)
    _sampling_arguments(parser, several=True)
    parser.add_argument(
        "--rule", default="coupled", help="verification rule: coupled (default), ratio, block, rrsw, ..."
    )
    parser.add_argument("--draft", default=None, help="how draft tokens are chosen: coupled, sample or argmax")
    parser.add_argument("--max-new", type=int, default=128, metavar="N", help="tokens per answer (default 128)")
    parser.add_argument("--num-prompts", type=int, default=None, metavar="N", help="use so many, evenly spread")
    parser.add_argument("--batch-size", type=int, default=32, metavar="N", help="for acceptance (default 32)")
    parser.add_argument("--speed-prompts", type=int, default=8, metavar="N", help="for speed at batch 1; 0 for none")
    parser.add_argument("--speed-k", type=_integers, default=(), metavar="K[,K]", help="tried for speed alone")
    parser.add_argument("--speed-tree", action="append", default=[], metavar="PLAN", help="a tree, for speed alone")
    parser.add_argument(
        "--speed-temperatures", type=_numbers, default=None, metavar="T[,T]", help="measure speed at these only"
    )
    parser.add_argument("--speed-max-new", type=int, default=None, metavar="N", help="tokens per answer for speed")
    parser.add_argument("--repeats", type=int, default=1, metavar="N", help="of each speed prompt (default 1)")
    parser.add_argument("--compile", action="store_true", help="torch.compile target and drafters first (minutes)")
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    about = "where to write the report; several drafters: one --json for each, in their order"
    parser.add_argument("--json", action="append", default=[], metavar="FILE", help=about)


def _eval(options: argparse.Namespace) -> None:
    from draftsmith.drafters.checkpoint import write_text
    from draftsmith.drafters.tree import chain, parse_plan
    from draftsmith.inference.conversations import read_conversations
    from draftsmith.inference.evaluate import Settings, evaluate, spread
    from draftsmith.inference.loading import load_drafter
    from draftsmith.scripts.tables import eval_table

    _positive(options, "max_new", "batch_size", "repeats", "speed_max_new", "num_prompts")
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
    target = _load_target(options)
    loaded = {name: load_drafter(name, target) for name in options.drafters}
    reports = evaluate(target, loaded, conversations, settings)
    for file, report in zip(files, reports.values(), strict=False):
        write_text(file, json.dumps(report, indent=2) + "\n")
    print("\n\n".join(map(eval_table, reports.values())))


# ---- generate ---------------------------------------------------------------------------------------------------------


def _add_generate(commands: Any) -> None:
    parser = _command(commands, "generate", "answer one prompt, tokens that the drafter guessed in green", _generate)
    parser.add_argument(
        "drafter", metavar="DRAFTER", help="run folder, drafter folder, causal LM, ngram, suffix, or mtp"
    )
    _target_arguments(parser)
    parser.add_argument("--prompt", required=True, metavar="TEXT")
    parser.add_argument("--k", type=int, default=5, metavar="K", help="draft length (default 5)")
    parser.add_argument("--tree", default=None, metavar="PLAN", help="a tree instead, as for eval: dynamic:16, ...")
    parser.add_argument("--max-new", type=int, default=256, metavar="N", help="token budget (default 256)")
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    _sampling_arguments(parser)


def _generate(options: argparse.Namespace) -> None:
    from draftsmith.drafters.tree import chain, parse_plan
    from draftsmith.inference.conversations import prompt_ids
    from draftsmith.inference.decode import generate
    from draftsmith.inference.loading import load_drafter
    from draftsmith.inference.metrics import tokens_per_round
    from draftsmith.inference.output import Seconds
    from draftsmith.inference.sampling import Sampler
    from draftsmith.inference.speculation import Speculation
    from draftsmith.scripts.tables import Stream, describe_adapted

    target = _load_target(options)
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


# ---- shared -----------------------------------------------------------------------------------------------------------


def _command(
    commands: Any, name: str, about: str, run: Callable[[argparse.Namespace], None]
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=about, description=about)
    parser.set_defaults(run=run)
    parser.add_argument("--device", default=None, help="cpu, cuda, cuda:1, ... (default: cuda where there is one)")
    return parser


def _target_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", required=True, metavar="T", help="model folder, hub id or .gguf file")
    parser.add_argument("--revision", default=None, help="of a hub id")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32", "float64"])
    parser.add_argument("--trust-remote-code", action="store_true", help="run modelling code from the checkpoint")


def _sampling_arguments(parser: argparse.ArgumentParser, several: bool = False) -> None:
    if several:
        parser.add_argument(
            "--temperature", type=_numbers, default=(0.0,), metavar="T[,T]", help="0 is greedy (default)"
        )
    else:
        parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)")
    parser.add_argument("--top-k", type=int, default=None, metavar="N", help="keep the N most likely tokens")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="keep the most likely mass P")


def _config_arguments(parser: argparse.ArgumentParser) -> None:
    about = "a run's YAML, see configs/; then settings for it, for example optim.learning_rate=3e-4"
    parser.add_argument("words", nargs="+", metavar="CONFIG [key=value]", help=about)


def _words(options: argparse.Namespace) -> tuple[list[str], list[str]]:
    """The configs and the overrides among the words; the first is a config, whatever it is called."""
    rest = options.words[1:]
    overrides = [word for word in rest if re.match(r"[\w.]*=", word)]
    return [options.words[0], *(word for word in rest if word not in overrides)], overrides


def _load_target(options: argparse.Namespace) -> Any:
    import torch

    from draftsmith.inference.target import load

    return load(
        options.target,
        dtype=getattr(torch, options.dtype),
        device=_device(options.device),
        revision=options.revision,
        trust_remote_code=options.trust_remote_code,
    )


def _device(name: str | None) -> Any:
    import torch

    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"unknown device {name!r}; give cpu, cuda or cuda:N") from error


def _positive(options: argparse.Namespace, *names: str) -> None:
    for name in names:
        if getattr(options, name) is not None and getattr(options, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(options, name)}; give 1 or more")


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


if __name__ == "__main__":
    main()
