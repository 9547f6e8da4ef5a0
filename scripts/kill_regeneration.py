"""Kills the making of training conversations at random points, again and again, and compares what comes of it.

    python -m draftsmith.scripts.kill_regeneration --target T --prompts FILE [--kills 50] [--out FILE.md]

Each trial starts from nothing, gets SIGKILL after a random part of the time that an uninterrupted run took, is started again and
runs to its end; then its file and meta file must equal, byte for byte, those of the uninterrupted run. A kill that comes after the
end does not count. The children are forked from a process that has loaded the target, so that a trial costs the work and no start;
it computes on one thread, for threads do not survive a fork. Exit status 1 if any file differs.
"""

import argparse
import importlib.metadata
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from draftsmith.drafters.checkpoint import write_text
from draftsmith.inference.conversations import read_conversations
from draftsmith.inference.load_target import load
from draftsmith.inference.sampling import Sampler
from draftsmith.train.answers import Settings
from draftsmith.train.invent import invent
from draftsmith.train.journal import journals
from draftsmith.train.regenerate import regenerate


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill regeneration at random points and compare the files.")
    parser.add_argument("--target", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--num-prompts", type=int, default=24)
    parser.add_argument("--self-prompt", type=int, default=4)
    parser.add_argument("--max-new", type=int, default=24)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--kills", type=int, default=50, help="per dtype")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="a file for the report")
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers"))
    lines = [
        "# Regeneration, killed",
        "",
        f"{options.target}, {options.num_prompts} prompts and {options.self_prompt} invented ones, {options.max_new} tokens each, "
        f"temperatures 0 and 0.8 mixed, batches of {options.batch_size}, one thread; {versions}. SIGKILL after a random part of an "
        f"uninterrupted run's time (seed {options.seed}), then the same command again.",
        "",
        "| dtype | kills | identical files | while inventing | while answering |",
        "| --- | --- | --- | --- | --- |",
    ]
    wrong = 0
    for dtype in options.dtypes.split(","):
        with tempfile.TemporaryDirectory() as folder:
            same, stages = _trials(_work(options, getattr(torch, dtype)), Path(folder), options.kills, options.seed)
        lines.append(f"| {dtype} | {options.kills} | {same} | {stages['prompts']} | {stages['answers']} |")
        wrong += options.kills - same
    report = "\n".join(lines) + "\n"
    print(report)
    if options.out:
        write_text(Path(options.out), report)
    sys.exit(1 if wrong else 0)


def _work(options: argparse.Namespace, dtype: torch.dtype) -> Callable[[Path], None]:
    """What is killed."""
    target = load(options.target, dtype=dtype)
    given = read_conversations(options.prompts)[: options.num_prompts]
    settings = Settings(
        sampler=Sampler(),
        temperatures=((0.0, 1.0), (0.8, 1.0)),
        max_new=options.max_new,
        batch_size=options.batch_size,
        seed=options.seed,
    )

    def work(out: Path) -> None:
        invented = invent(target, options.self_prompt, out, settings) if options.self_prompt else None
        conversations = given + (invented.conversations if invented else [])
        regenerate(target, conversations, out, settings, sources=[invented.account] if invented else [])

    return work


def _trials(work: Callable[[Path], None], folder: Path, kills: int, seed: int) -> tuple[int, dict[str, int]]:
    """How many of the killed runs end with the same files, and at what stage of the work the kills came."""
    straight, out = folder / "straight" / "out.jsonl", folder / "killed" / "out.jsonl"
    started = time.perf_counter()
    assert _run(work, straight)
    seconds, expected = time.perf_counter() - started, _files(straight.parent)
    rng, same, stages = random.Random(seed), 0, {"prompts": 0, "answers": 0}
    while sum(stages.values()) < kills:
        shutil.rmtree(out.parent, ignore_errors=True)
        if _run(work, out, kill_after=rng.uniform(0, seconds)):
            continue  # it was done before
        stages["answers" if journals(out, "answers") else "prompts"] += 1
        assert _run(work, out)
        same += _files(out.parent) == expected
        print(f"kill {sum(stages.values())} of {kills}: {same} identical", file=sys.stderr)
    return same, stages


def _run(work: Callable[[Path], None], out: Path, kill_after: float | None = None) -> bool:
    """Works in a child; False if it was killed after so many seconds."""
    out.parent.mkdir(exist_ok=True)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), 2)  # its progress
            work(out)
            status = 0
        except BaseException:
            traceback.print_exc(file=sys.stdout)
        finally:
            sys.stdout.flush()
            os._exit(status)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    _, ended = os.waitpid(child, 0)
    assert ended == 0 or (os.WIFSIGNALED(ended) and kill_after is not None), "the child failed, see above"
    return ended == 0


def _files(folder: Path) -> dict[str, bytes]:
    """What a run leaves; journals too, there should be none."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


if __name__ == "__main__":
    main()
