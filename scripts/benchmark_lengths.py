"""Training tokens a second against the length of the texts, packed to the same number of tokens.

    python -m draftsmith.scripts.benchmark_lengths [--kind eagle3] [--tokens 4096] [--lengths 512 1024 2048 4096] [--out FILE]

Forward and backward of a drafter for a target of SmolLM2's sizes with random weights (the time does not depend on them), bf16
autocast, a quarter of each text prompt. The lengths take turns and the best of the repeats counts. `--padded` adds texts of lengths
spread from a quarter of `length` up to it, packed and in rows of their own.
"""

import argparse
import datetime
import platform
import random
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from draftsmith import drafters
from draftsmith.drafters.base import TrainableDrafter, TrainingBatch
from draftsmith.drafters.layout import packed
from draftsmith.drafters.unpack import one_per_row
from draftsmith.inference.target import Target

SETTINGS = {"eagle3": {"draft_vocab_size": 12_288, "steps": 3}, "p_eagle": {"draft_vocab_size": 12_288}}


def main() -> None:
    parser = argparse.ArgumentParser(description="Training tokens a second against the length of the texts.")
    parser.add_argument("--kind", default="eagle3", choices=drafters.kinds())
    parser.add_argument("--tokens", type=int, default=4096, help="of a packed batch")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--padded", action="store_true", help="compare ragged texts, packed and padded")
    parser.add_argument("--out", type=Path, help="write a Markdown file, too")
    options = parser.parse_args()
    if min(options.lengths) < 8 or max(options.lengths) > options.tokens:
        print("benchmark_lengths: give --lengths from 8 to --tokens", file=sys.stderr)
        sys.exit(2)
    text = measure(options.kind, options.tokens, options.lengths, options.repeats, options.padded)
    print(text)
    if options.out is not None:
        command = f"`python -m draftsmith.scripts.benchmark_lengths {' '.join(sys.argv[1:])}`"
        day = datetime.date.today().isoformat()
        options.out.write_text(f"# Training speed against text length, {day}\n\n{command}\n\n{text}\n")


def measure(kind: str, tokens: int, lengths: list[int], repeats: int, padded: bool) -> str:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    drafter = make_drafter(kind, device)
    cases: dict[str, TrainingBatch] = {}
    for length in lengths:
        batch = make_batch(drafter, [length] * (tokens // length), device)
        cases[f"{length:,} | packed"] = batch
        if padded:
            ragged = make_batch(drafter, spread(length, tokens), device)
            cases[f"{length // 4:,} to {length:,} | packed"] = ragged
            cases[f"{length // 4:,} to {length:,} | padded"] = one_per_row(ragged)
    best = dict.fromkeys(cases, float("inf"))
    for repeat in range(repeats + 1):  # the first is a warm-up
        for name, batch in cases.items():
            seconds = step(drafter, batch)
            if repeat:
                best[name] = min(best[name], seconds)
    first = next(iter(cases))
    rows = ["| text length | layout | texts | tokens | tokens/s | beside the first |", "|---|---|---|---|---|---|"]
    speeds = {name: cases[name].layout.position_N.numel() / seconds for name, seconds in best.items()}
    for name, batch in cases.items():
        if name.endswith("padded"):  # padding is no work done
            speeds[name] = cases[name.replace("padded", "packed")].ids_BT.numel() / best[name]
        num = round(speeds[name] * best[name])
        rows.append(
            f"| {name} | {len(batch.layout.bounds)} | {num:,} | {speeds[name]:,.0f} | {speeds[name] / speeds[first]:.2f} |"
        )
    threads = f"{torch.get_num_threads()} threads" if device.type == "cpu" else torch.cuda.get_device_name()
    head = f"{kind}, SmolLM2's sizes, forward and backward, bf16 autocast, {threads}, torch {torch.__version__}"
    return f"{head}, {platform.machine()}; best of {repeats}.\n\n" + "\n".join(rows)


def step(drafter: TrainableDrafter, batch: TrainingBatch) -> float:
    """Seconds of forward and backward."""
    drafter.zero_grad()
    device = batch.ids_BT.device
    begin = time.perf_counter()
    with torch.autocast(device.type, torch.bfloat16):
        parts = drafter(batch)
    parts.sum.backward()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def make_drafter(kind: str, device: torch.device) -> TrainableDrafter:
    target = random_smollm2(8, device)
    drafter = drafters.build(kind, dict(SETTINGS.get(kind, {})), target.shape)
    drafter.initialise(target, torch.ones(target.shape.vocab_size, dtype=torch.int64))
    return drafter.to(device).train()


def random_smollm2(num_layers: int, device: torch.device) -> Target:
    """A target of SmolLM2's sizes with random weights in bf16, and so many layers."""
    config = LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=num_layers, num_attention_heads=9,
        num_key_value_heads=3, vocab_size=49_152, max_position_embeddings=8192, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    return Target(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to(device), None, "random weights")


def spread(length: int, tokens: int) -> list[int]:
    """Lengths from a quarter of `length` up to it that add up to about `tokens`."""
    draws = random.Random(0)
    out = [length]
    while (left := tokens - sum(out)) >= length // 4:
        out.append(min(left, draws.randint(length // 4, length)))
    return out


def make_batch(drafter: TrainableDrafter, lengths: list[int], device: torch.device) -> TrainingBatch:
    """Random texts, a quarter of each prompt, and a target that says anything."""
    generator = torch.Generator().manual_seed(0)
    shape = drafter.shape
    ids = [torch.randint(3, shape.vocab_size, (length,), generator=generator).tolist() for length in lengths]
    layout = packed(ids, [[place >= length // 4 for place in range(length)] for length in lengths])
    total = sum(lengths)

    def states(width: int) -> torch.Tensor:
        return torch.randn(1, total, width, generator=generator).to(device, torch.bfloat16)

    return TrainingBatch(
        ids_BT=layout.ids_BT.to(device),
        loss_mask_BT=layout.loss_mask_BT.to(device),
        features_BTF=states(len(drafter.feature_layers) * shape.hidden_size),
        last_BTD=states(shape.hidden_size),
        log_normaliser_BT=torch.full((1, total), 12.0, device=device),
        argmax_BT=torch.randint(0, shape.vocab_size, (1, total), generator=generator).to(device),
        layout=layout,
    )


if __name__ == "__main__":
    main()
