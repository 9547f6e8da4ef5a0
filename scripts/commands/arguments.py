"""Options that several subcommands share, and what they become."""

import argparse
import re
from collections.abc import Callable
from typing import Any


def command(commands: Any, name: str, about: str, run: Callable[[argparse.Namespace], None]) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=about, description=about)
    parser.set_defaults(run=run)
    parser.add_argument("--device", default=None, help="cpu, cuda, cuda:1, ... (default: cuda where there is one)")
    return parser


def target_arguments(parser: Any, required: bool = True) -> None:
    parser.add_argument("--target", required=required, metavar="T", help="model folder, hub id or .gguf file")
    parser.add_argument("--revision", default=None, help="of a hub id")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32", "float64"])
    parser.add_argument("--adapter", default=None, metavar="A", help="its LoRA adapter: peft folder or hub id")
    parser.add_argument("--merge-adapter", action="store_true", help="add the adapter to the weights")
    parser.add_argument("--quantisation", default=None, choices=["8bit", "4bit"], help="of the decoder (bitsandbytes)")
    about = "on one device (default), or spread over all devices of this process"
    parser.add_argument("--placement", default="replicated", choices=["replicated", "device_map"], help=about)
    parser.add_argument("--trust-remote-code", action="store_true", help="run modelling code from the checkpoint")


def sampling_arguments(parser: argparse.ArgumentParser, several: bool = False) -> None:
    if several:
        parser.add_argument(
            "--temperature", type=numbers, default=(0.0,), metavar="T[,T]", help="0 is greedy (default)"
        )
    else:
        parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)")
    parser.add_argument("--top-k", type=int, default=None, metavar="N", help="keep the N most likely tokens")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="keep the most likely mass P")


def config_arguments(parser: argparse.ArgumentParser) -> None:
    about = "a run's YAML, see configs/; then settings for it, for example optim.learning_rate=3e-4"
    parser.add_argument("words", nargs="+", metavar="CONFIG [key=value]", help=about)


def words(options: argparse.Namespace) -> tuple[list[str], list[str]]:
    """The configs and the overrides among the words; the first is a config, whatever it is called."""
    rest = options.words[1:]
    overrides = [word for word in rest if re.match(r"[\w.]*=", word)]
    return [options.words[0], *(word for word in rest if word not in overrides)], overrides


def load_target(options: argparse.Namespace) -> Any:
    import torch

    from draftsmith.inference.load_target import load

    return load(
        options.target,
        dtype=getattr(torch, options.dtype),
        device=get_device(options.device),
        placement=options.placement,
        quantisation=options.quantisation,
        adapter=options.adapter,
        merge_adapter=options.merge_adapter,
        revision=options.revision,
        trust_remote_code=options.trust_remote_code,
    )


def get_device(name: str | None) -> Any:
    import torch

    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"unknown device {name!r}; give cpu, cuda or cuda:N") from error


def positive(options: argparse.Namespace, *names: str) -> None:
    for name in names:
        if getattr(options, name) is not None and getattr(options, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(options, name)}; give 1 or more")


def integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def numbers(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))
