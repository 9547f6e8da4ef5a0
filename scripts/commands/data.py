"""`draftsmith data`: sources become training conversations, answered by the frozen target or kept as they are."""

import argparse
from pathlib import Path
from typing import Any

from draftsmith.scripts.commands.arguments import command, get_device, load_target, positive, target_arguments


def add(commands: Any) -> None:
    about = (
        "build training conversations: the frozen target answers prompts, or invents them too, or old answers are kept"
    )
    parser = command(commands, "data", about, run)
    what = "prompts or conversations: file, folder or hub id, with ?weight=...&split=...&limit=... (docs/data.md)"
    parser.add_argument("sources", nargs="*", metavar="SOURCE", help=what)
    parser.add_argument("--out", metavar="FILE", help="JSONL to write; an interrupted run continues")
    what = "no target: keep the answers; check, deduplicate, split and write the conversations"
    parser.add_argument("--keep-answers", action="store_true", help=what)
    what = "write nothing: print N of the conversations with the tokens that are supervised marked"
    parser.add_argument("--show", type=int, metavar="N", help=what)
    parser.add_argument("--held-out", metavar="FILE", help="write some of the conversations there, as they are")
    what = "how many: those whose first question falls there by its hash (default 0.02)"
    parser.add_argument("--held-out-share", type=float, default=0.02, metavar="S", help=what)
    parser.add_argument("--salvage", action="store_true", help="take the complete records of a file that is cut off")
    what = (
        "more than this share of rows that cannot be used, or have no answer, stops the work (default 0.05); they are "
        "listed in FILE.rejected.jsonl and FILE.unanswered.jsonl"
    )
    parser.add_argument("--max-bad-share", type=float, default=0.05, metavar="S", help=what)

    here = parser.add_argument_group(
        "target in this process (several: accelerate launch -m draftsmith.scripts.main data ...)"
    )
    target_arguments(here, required=False)
    here.add_argument("--batch-size", type=int, metavar="N", help="prompts decoded together (default 64)")

    server = parser.add_argument_group("target behind a server (its key, if it wants one, in OPENAI_API_KEY)")
    server.add_argument("--endpoint", metavar="URL", help="an OpenAI-compatible server: vLLM, SGLang")
    server.add_argument("--model", metavar="NAME", help="if it serves several")
    server.add_argument("--concurrency", type=int, metavar="N", help="requests under way together (default 16)")

    answers = parser.add_argument_group("answers")
    answers.add_argument("--samples", type=int, default=1, metavar="N", help="per prompt (default 1)")
    answers.add_argument("--max-new", type=int, default=256, metavar="N", help="token budget of each (default 256)")
    answers.add_argument(
        "--temperature", type=mix, default=((0.0, 1.0),), metavar="T[:W][,T[:W]]",
        help="0 is greedy (default); of several, perhaps with weights, each row draws one",
    )  # fmt: skip
    answers.add_argument("--top-k", type=int, metavar="N", help="keep the N most likely tokens")
    answers.add_argument("--top-p", type=float, default=1.0, metavar="P", help="keep the most likely mass P")
    answers.add_argument("--seed", type=int, default=0, metavar="S")
    answers.add_argument(
        "--all-turns", action="store_true", help="make every answer of a conversation anew, not the last only"
    )
    answers.add_argument(
        "--reasoning", choices=["keep", "drop"], default="keep", help="as a field of its turn (default), or not"
    )

    invented = parser.add_argument_group("invented prompts")
    invented.add_argument(
        "--self-prompt", type=int, default=0, metavar="N", help="user turns that the target invents itself"
    )
    what = "drop those as similar to earlier ones (Jaccard, default 0.7)"
    invented.add_argument("--diversity", type=float, default=0.7, metavar="S", help=what)


def run(options: argparse.Namespace) -> None:
    if options.show is not None:
        show(options)
        return
    if options.out is None:
        raise ValueError("no --out FILE to write; give one, or --show N to look at conversations that are there")
    if options.keep_answers:
        keep_answers(options)
    else:
        answer(options)


def show(options: argparse.Namespace) -> None:
    from draftsmith.inference.load_target import load_tokenizer
    from draftsmith.scripts.show import show_conversations
    from draftsmith.train.sources import gather

    positive(options, "show")
    if not options.sources or options.target is None or options.out is not None:
        raise ValueError("--show prints conversations that are there; give sources and --target, and no --out")
    tokenizer = load_tokenizer(options.target, revision=options.revision, trust_remote_code=options.trust_remote_code)
    print(show_conversations(tokenizer, gather(options.sources, _reading(options)).conversations, options.show))


def keep_answers(options: argparse.Namespace) -> None:
    from draftsmith.train.prepare import prepare

    if options.target is not None or options.endpoint is not None or options.self_prompt or options.samples != 1:
        raise ValueError("--keep-answers asks no target: leave out --target, --endpoint, --self-prompt and --samples")
    if not options.sources:
        raise ValueError("no sources: give files, folders or hub ids of conversations")
    held_out = None if options.held_out is None else Path(options.held_out)
    report, train, held = prepare(
        options.sources, Path(options.out), _reading(options), held_out, options.held_out_share
    )
    print(report)
    if report.rejected:
        print(f"{options.out}.rejected.jsonl: {report.rejected.total():,} rows that cannot be used, and why")
    if held_out is not None:
        print(f"{held_out}: {held:,} conversations, held out")
    print(f"{options.out}: {train:,} conversations")


def answer(options: argparse.Namespace) -> None:
    from draftsmith.inference.sampling import Sampler
    from draftsmith.train.answers import Settings
    from draftsmith.train.prepare import check_outputs
    from draftsmith.train.processes import launched
    from draftsmith.train.sources import gather, say

    positive(options, "samples", "max_new", "batch_size", "concurrency")
    if (options.target is None) == (options.endpoint is None):
        given = "both --target and --endpoint" if options.target else "nobody to answer"
        raise ValueError(
            f"{given}; give --target T to decode here, --endpoint URL of a server that runs the target, or --keep-answers"
        )
    check_outputs(options.sources, Path(options.out), None if options.held_out is None else Path(options.held_out))
    several = len(options.temperature) > 1
    settings = Settings(
        sampler=Sampler(0.0 if several else options.temperature[0][0], options.top_k, options.top_p),
        temperatures=options.temperature if several else (),
        max_new=options.max_new,
        batch_size=options.batch_size or 64,
        samples=options.samples,
        seed=options.seed,
        all_turns=options.all_turns,
        reasoning=options.reasoning,
        max_bad_share=options.max_bad_share,
    )
    processes = launched(cpu=options.endpoint is not None or get_device(options.device).type == "cpu")
    conversations = []
    if options.sources:
        gathered = gather(options.sources, _reading(options, main=processes.main))
        conversations = gathered.conversations
        say(f"prompts: {gathered.report}")
    if options.endpoint:
        _ask_server(options, conversations, settings, processes)
    else:
        _decode_here(options, conversations, settings, processes)


def _decode_here(options: argparse.Namespace, conversations: list[Any], settings: Any, processes: Any) -> None:
    from draftsmith.train.invent import invent
    from draftsmith.train.regenerate import regenerate
    from draftsmith.train.sources import with_free_ids

    _refuse(options, "--target", "model", "concurrency")
    if options.device is None and processes.device is not None:
        options.device = str(processes.device)
    target, sources = load_target(options), list(options.sources)
    if options.self_prompt:
        invented = invent(
            target, options.self_prompt, options.out, settings, diversity=options.diversity, processes=processes
        )
        conversations = with_free_ids(conversations + invented.conversations)
        sources.append(invented.account)
    conversations = _to_answer(options, conversations, processes)
    records = regenerate(target, conversations, options.out, settings, sources=sources, processes=processes)
    if processes.main:
        print(f"{options.out}: {len(records):,} conversations")


def _ask_server(options: argparse.Namespace, conversations: list[Any], settings: Any, processes: Any) -> None:
    from draftsmith.train.endpoint import Endpoint, regenerate_at

    _refuse(options, "--endpoint", "batch_size", "device", "revision", "adapter", "quantisation")
    if options.self_prompt:
        raise ValueError(
            "a server cannot invent prompts, it fills in the template itself; give a file of prompts, or --target"
        )
    if processes.count > 1:
        raise ValueError(
            "one process is enough for a server; start it without accelerate launch, and raise --concurrency"
        )
    conversations = _to_answer(options, conversations, processes)
    endpoint = Endpoint(url=options.endpoint, model=options.model, concurrency=options.concurrency or 16)
    records = regenerate_at(endpoint, conversations, options.out, settings, sources=options.sources)
    print(f"{options.out}: {len(records):,} conversations")


def _to_answer(options: argparse.Namespace, conversations: list[Any], processes: Any) -> list[Any]:
    """Those that are not held out."""
    from draftsmith.train.prepare import hold_out
    from draftsmith.train.sources import say

    if options.held_out is None:
        return conversations
    train = hold_out(conversations, Path(options.held_out), options.held_out_share, write=processes.main)
    say(f"{options.held_out}: {len(conversations) - len(train):,} conversations, held out")
    return train


def _reading(options: argparse.Namespace, main: bool = True) -> Any:
    """How sources are read; of several processes the main one notes what cannot be used."""
    from draftsmith.train.sources import Settings

    rejected = Path(f"{options.out}.rejected.jsonl") if options.out and main else None
    return Settings(max_bad_share=options.max_bad_share, salvage=options.salvage, seed=options.seed, rejected=rejected)


def _refuse(options: argparse.Namespace, used: str, *names: str) -> None:
    for name in names:
        if getattr(options, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} has no effect with {used}; leave it out")


def mix(text: str) -> tuple[tuple[float, float], ...]:
    """Temperatures and their weights: `0.7`, `0,0.7,1` or `0:1,0.7:3`."""
    pairs = [part.partition(":") for part in text.split(",")]
    return tuple((float(temperature), float(weight) if colon else 1.0) for temperature, colon, weight in pairs)
