"""Decoding speed side by side in one run: this loop, transformers' generate (plain, assistant_model, prompt lookup) and flashspec.

    python -m draftsmith.scripts.benchmark_decoding --target T --prompts FILE --out FILE.md

Batch 1, greedy, the same prompts and token budget, each prompt decoded by all contenders one after the other in alternating order;
one prompt warms up and is not counted. All speculative contenders but the lookups share one draft model: the target with noise
added to its weights (`--noise`), so that acceptance is middling and equal; K is fixed, transformers' adaptive settings are off.
Wall time of the whole call, prefill included. A contender that is not installed is left out and named.
"""

import argparse
import copy
import importlib.metadata
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from draftsmith.drafters.checkpoint import write_text
from draftsmith.drafters.language_model import DraftLM
from draftsmith.drafters.ngram import NGram
from draftsmith.drafters.tree import chain
from draftsmith.inference import metrics
from draftsmith.inference.conversations import read_conversations
from draftsmith.inference.decode import generate
from draftsmith.inference.evaluate import spread
from draftsmith.inference.load_target import load
from draftsmith.inference.output import Seconds
from draftsmith.inference.records import prompt_messages
from draftsmith.inference.rendering import prompt_ids
from draftsmith.inference.sampling import Sampler
from draftsmith.inference.speculation import Speculation
from draftsmith.inference.target import Target

Run = Callable[[list[int]], tuple[list[int], int]]
"""From a prompt to the new tokens and the number of target forwards."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Decoding speed of this loop, transformers and flashspec side by side."
    )
    parser.add_argument("--target", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--num-prompts", type=int, default=12)
    parser.add_argument("--max-new", type=int, default=64)
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--noise", type=float, default=0.06, help="of a weight, in its tensor's standard deviations")
    parser.add_argument("--layers", type=int, default=None, help="keep so many of the draft's first layers")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    target, draft = load(options.target, dtype=dtype), load(options.target, dtype=dtype)
    _add_noise(draft.model, options.noise)
    if options.layers is not None:
        draft = _cut(draft, options.layers)
    conversations = read_conversations(options.prompts)
    assert target.tokenizer is not None
    prompts = [
        prompt_ids(target.tokenizer, prompt_messages(conversations[i].messages), conversations[i].tools)
        for i in spread(len(conversations), options.num_prompts + 1)
    ]
    seconds = {name: Seconds() for name in ("draftsmith, draft model", "draftsmith, n-gram", "draftsmith, plain")}
    runs, missing = _contenders(target, draft, options, seconds)
    counts: dict[str, list[tuple[int, float, int]]] = {name: [] for name in runs}  # tokens, seconds, target forwards
    texts: dict[str, list[list[int]]] = {name: [] for name in runs}
    for number, prompt in enumerate(prompts):
        if number == 1:
            seconds |= {name: Seconds() for name in seconds}  # the warm-up does not count
        for name in sorted(runs, reverse=number % 2 == 0):
            start = time.perf_counter()
            ids, forwards = runs[name](prompt)
            elapsed = time.perf_counter() - start
            if number:
                counts[name].append((len(ids), elapsed, forwards))
                texts[name].append(ids)
        print(f"prompt {number} of {options.num_prompts}", file=sys.stderr)
    write_text(Path(options.out), _report(options, counts, texts, seconds, missing))
    print(Path(options.out).read_text())


def _contenders(
    target: Target, draft: Target, options: argparse.Namespace, seconds: dict[str, Seconds]
) -> tuple[dict[str, Run], list[str]]:
    k, max_new = options.k, options.max_new

    def ours(name: str, speculation: Speculation | None) -> Run:
        def run(prompt: list[int]) -> tuple[list[int], int]:
            output = generate(
                target, [prompt], max_new=max_new, sampler=Sampler(), speculation=speculation, seconds=seconds[name]
            )[0]
            return output.ids, 1 + len(output.rounds)

        return run

    model, forwards = target.model, [0]
    model.register_forward_pre_hook(lambda *_: forwards.__setitem__(0, forwards[0] + 1))
    assistant = draft.model
    assistant.generation_config.num_assistant_tokens = k
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.0

    def theirs(**arguments: Any) -> Run:
        def run(prompt: list[int]) -> tuple[list[int], int]:
            forwards[0] = 0
            ids = torch.tensor([prompt])
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_new,
                pad_token_id=target.eos_ids[0], **arguments,
            )  # fmt: skip
            return out[0, len(prompt) :].tolist(), forwards[0]

        return run

    runs: dict[str, Run] = {
        "draftsmith, plain": ours("draftsmith, plain", None),
        "transformers, plain": theirs(),
        "draftsmith, draft model": ours("draftsmith, draft model", Speculation(DraftLM(draft), chain(k))),
        "transformers, assistant_model": theirs(assistant_model=assistant),
        "draftsmith, n-gram": ours("draftsmith, n-gram", Speculation(NGram(), chain(k))),
        "transformers, prompt lookup": theirs(prompt_lookup_num_tokens=k, max_matching_ngram_size=3),
    }
    try:
        runs["flashspec, draft model"] = _flashspec(target, draft, options)
    except ImportError as error:
        return runs, [f"flashspec is not installed ({error})"]
    return runs, []


def _flashspec(target: Target, draft: Target, options: argparse.Namespace) -> Run:
    from flashspec import BanditConfig, FlashSpecConfig, SamplingConfig, SpeculativeEngine  # type: ignore[import-not-found]
    from flashspec.engine import HuggingFaceDrafter, TargetModel  # type: ignore[import-not-found]

    device, dtype = torch.device("cpu"), target.dtype
    # It drives the models itself; copies keep our hooks and settings out of its way.
    drafter = HuggingFaceDrafter(options.target, device, dtype=dtype, temperature=0.0, model=copy.deepcopy(draft.model))
    verifier = TargetModel(options.target, device, dtype=dtype, model=copy.deepcopy(target.model))
    engine = SpeculativeEngine(
        FlashSpecConfig(
            device="cpu",
            drafter_strategy="bandit",
            bandit=BanditConfig(n_arms=1),
            sampling=SamplingConfig(temperature=0.0, gamma=options.k),
        ),
        [drafter],
        verifier,
    )

    def run(prompt: list[int]) -> tuple[list[int], int]:
        out = engine.generate(torch.tensor([prompt]), max_new_tokens=options.max_new, eos_token_ids=target.eos_ids)
        return out.output_ids[0, : out.n_tokens_generated].tolist(), len(out.arm_steps)

    return run


def _add_noise(model: torch.nn.Module, share: float) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.add_(share * parameter.std() * torch.randn_like(parameter))


def _cut(draft: Target, layers: int) -> Target:
    """The first layers of a model, with its embedding, last norm and head."""
    del draft.layers[layers:]
    draft.model.config.num_hidden_layers = layers
    return Target(draft.model, draft.tokenizer, f"{draft.name}, {layers} layers")


def _report(
    options: argparse.Namespace,
    counts: dict[str, list[tuple[int, float, int]]],
    texts: dict[str, list[list[int]]],
    seconds: dict[str, Seconds],
    missing: list[str],
) -> str:
    def ratio(name: str, base: str) -> str:
        pairs = [(*a, *b) for a, b in zip(counts[name], counts[base], strict=True)]

        def statistic(chosen: Any) -> float:
            a_tokens, a_seconds, _, b_tokens, b_seconds, _ = (sum(column) for column in zip(*chosen, strict=True))
            return float((a_tokens / a_seconds) / (b_tokens / b_seconds))

        value = metrics.pooled(pairs, statistic)
        return f"{value['value']:.2f} [{value['low']:.2f}, {value['high']:.2f}]"

    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}"
        for name in ("torch", "transformers", "flashspec")
        if _installed(name)
    )
    lines = [
        "# Decoding speed side by side",
        "",
        f"{options.target}, {options.dtype}, {torch.get_num_threads()} threads, python {platform.python_version()}, {versions}; "
        f"batch 1, greedy, {options.num_prompts} prompts, {options.max_new} tokens each, K = {options.k}; the draft model is the "
        f"target with noise of {options.noise:g} standard deviations{_layers(options)}. Whole calls, prefill included.",
        "",
        "| contender | tokens/s | of draftsmith plain [95 %] | tokens per target forward | same tokens as transformers plain |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, rows in counts.items():
        tokens, elapsed, forwards = (sum(column) for column in zip(*rows, strict=True))
        per_forward = f"{tokens / forwards:.2f}" if forwards else "-"
        same = sum(a == b for a, b in zip(texts[name], texts["transformers, plain"], strict=True))
        speed = f"{tokens / elapsed:.1f} | {ratio(name, 'draftsmith, plain')}"
        lines.append(f"| {name} | {speed} | {per_forward} | {same} of {len(rows)} |")
    lines += ["", "| ours | against | ratio of tokens/s [95 %] |", "| --- | --- | --- |"]
    for name, base in (
        ("draftsmith, plain", "transformers, plain"),
        ("draftsmith, draft model", "transformers, assistant_model"),
        ("draftsmith, draft model", "flashspec, draft model"),
        ("draftsmith, n-gram", "transformers, prompt lookup"),
    ):
        if base in counts:
            lines.append(f"| {name} | {base} | {ratio(name, base)} |")
    lines += ["", "| where a round's time goes | draft | verify | loop itself |", "| --- | --- | --- | --- |"]
    for name, total in seconds.items():
        parts = [f"{part / total.decode:.1%}" for part in (total.draft, total.verify, total.other)]
        lines.append(f"| {name} | {' | '.join(parts)} |")
    return "\n".join([*lines, "", *missing, ""])


def _layers(options: argparse.Namespace) -> str:
    return f", cut to its first {options.layers} layers" if options.layers is not None else ""


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    main()
