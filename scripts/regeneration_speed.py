"""How fast answers are made, against how fast the same batch decodes when nothing else is done.

    python -m draftsmith.scripts.regeneration_speed --target T --prompts FILE [--out FILE.md]

Raw: the same prompts in the same order in batches through the same decode loop, each row until it ends or its budget is used up;
new tokens by the time of the decode rounds alone, prefill not counted. Ideal: the same batches without an end, so that no row is
ever idle, each row for so long that its tokens stand as far from the beginning as those of the answers do on average.
Regeneration: `train.regenerate` from conversations to the written file, tokenising, prefill, rows that come and go, the thin end of
each chunk and the journal included; new tokens by wall time. They alternate within one run, after a short one that is not counted.
"""

import argparse
import importlib.metadata
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from draftsmith.drafters.checkpoint import write_text
from draftsmith.inference.conversations import read_conversations
from draftsmith.inference.decode import generate
from draftsmith.inference.evaluate import spread
from draftsmith.inference.load_target import load
from draftsmith.inference.output import Seconds
from draftsmith.inference.records import Conversation, prompt_messages
from draftsmith.inference.rendering import prompt_ids
from draftsmith.inference.sampling import Sampler
from draftsmith.inference.target import Target
from draftsmith.train.answers import Settings
from draftsmith.train.regenerate import regenerate


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of regeneration against raw batched decoding.")
    parser.add_argument("--target", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--num-prompts", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--max-new", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", help="a file for the report")
    options = parser.parse_args()
    target = load(options.target, dtype=getattr(torch, options.dtype), device=options.device)
    everything = read_conversations(options.prompts)
    chosen = [everything[i] for i in spread(len(everything), options.num_prompts)]
    settings = Settings(sampler=Sampler(), max_new=options.max_new, batch_size=options.batch_size)
    prompts = sorted((prompt_ids(target.tokenizer, prompt_messages(c.messages), c.tools) for c in chosen), key=len)
    _regenerate(target, chosen[: options.batch_size], settings)
    rows, tokens = [], 0
    for repeat in range(options.repeats):
        raw, length = _raw(target, prompts, options.batch_size, options.max_new)
        tokens, seconds = _regenerate(target, chosen, settings)
        ideal, _ = _raw(target, prompts, options.batch_size, length, stop=False)
        rows.append((raw, ideal, tokens / seconds))
        print(
            f"{repeat + 1} of {options.repeats}: {', '.join(f'{rate:.0f}' for rate in rows[-1])} tokens/s",
            file=sys.stderr,
        )
    report = _report(options, tokens, rows)
    print(report)
    if options.out:
        write_text(Path(options.out), report)


def _regenerate(target: Target, chosen: list[Conversation], settings: Settings) -> tuple[int, float]:
    """New tokens and seconds."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        regenerate(target, chosen, Path(folder) / "out.jsonl", settings)
        elapsed = time.perf_counter() - start
        return int(json.loads((Path(folder) / "out.jsonl.meta.json").read_text())["tokens"]), elapsed


def _raw(
    target: Target, prompts: Sequence[list[int]], batch_size: int, max_new: int, *, stop: bool = True
) -> tuple[float, int]:
    """New tokens per second of the decode rounds (the first token of a row belongs to its prefill), and the length of answers whose
    tokens stand as far from the beginning, on average, as the tokens of these: E[L²] / E[L]."""
    seconds, lengths = Seconds(), list[int]()
    for begin in range(0, len(prompts), batch_size):
        batch = prompts[begin : begin + batch_size]
        outputs = generate(target, batch, max_new=max_new, sampler=Sampler(), stop_at_eos=stop, seconds=seconds)
        lengths += [len(output.ids) for output in outputs]
    rate = sum(length - 1 for length in lengths) / seconds.decode
    return rate, max(2, round(sum(length**2 for length in lengths) / sum(lengths)))


def _report(options: argparse.Namespace, tokens: int, rows: Sequence[tuple[float, float, float]]) -> str:
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers"))
    lines = [
        "# Speed of regeneration against raw batched decoding",
        "",
        f"{options.target}, {options.dtype}, {options.device}, {torch.get_num_threads()} threads, python "
        f"{platform.python_version()}, {versions}; {options.num_prompts} prompts of {Path(options.prompts).name}, batches of "
        f"{options.batch_size}, greedy, at most {options.max_new} tokens an answer: {tokens:,} in all. Raw: the same batches, "
        "decode rounds alone. Ideal: no row ever idle, no end, decode rounds alone. Regeneration: everything, wall time.",
        "",
        "| repeat | raw, tokens/s | ideal, tokens/s | regeneration, tokens/s | of raw | of ideal |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for number, (raw, ideal, rate) in enumerate(rows, start=1):
        lines.append(f"| {number} | {raw:.1f} | {ideal:.1f} | {rate:.1f} | {rate / raw:.3f} | {rate / ideal:.3f} |")
    median = statistics.median(rate / raw for raw, _, rate in rows)
    lines += ["", f"Regeneration reaches {median:.3f} of the raw rate (median)."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
