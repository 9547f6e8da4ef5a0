"""The feature store against the target, side by side in one run: tokens per second computed, and read back in training's order.

    python -m draftsmith.scripts.benchmark_features CONFIG [key=value ...] --out FILE.md

For each dtype: the target runs over the run's conversations and fills a store in a temporary folder (`compute`, writing included);
then random batches as training plans them are read, decoded and padded, once with a page cache that was told to forget the files
(`cold`, with the checksums of the first touch), and then `--repeats` times with what is in it (`warm`), the thread that reads ahead
off. Speeds are the medians.
"""

import argparse
import dataclasses
import importlib.metadata
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import torch

from draftsmith import drafters
from draftsmith.drafters.checkpoint import write_text
from draftsmith.train import encodings
from draftsmith.train.config import RunConfig, read
from draftsmith.train.data import plan_epoch
from draftsmith.train.features import FeatureStore
from draftsmith.train.run import load_target, load_training_sequences


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of the feature store beside that of the target.")
    parser.add_argument("words", nargs="+", metavar="CONFIG [key=value]")
    parser.add_argument("--conversations", type=int, default=None, metavar="N", help="the first N only")
    parser.add_argument("--dtypes", nargs="+", choices=get_args(encodings.Name), default=get_args(encodings.Name))
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="warm passes over the store")
    parser.add_argument(
        "--folder", default=None, metavar="DIR", help="where the stores are made (default: the temporary folder)"
    )
    parser.add_argument("--out", required=True, metavar="FILE.md")
    options = parser.parse_args()
    config = read(options.words[0], options.words[1:])
    rows = measure(config, options.dtypes, options.conversations, options.repeats, options.folder)
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers", "safetensors")
    )
    head = [
        f"# Reading the feature store against computing it, {time.strftime('%Y-%m-%d')}",
        "",
        "```bash",
        f"python -m draftsmith.scripts.benchmark_features {' '.join(sys.argv[1:])}",
        "```",
        "",
        f"Python {platform.python_version()}, {versions}; {torch.get_num_threads()} threads of {os.cpu_count()} cores; "
        f"{config.target.path} in {config.target.dtype}, {config.kind}.",
        "",
    ]
    write_text(Path(options.out), "\n".join([*head, *rows, ""]))
    print("\n".join(rows))


def measure(
    config: RunConfig, dtypes: Sequence[encodings.Name], conversations: int | None, repeats: int, place: str | None
) -> list[str]:
    """The table, a row per dtype."""
    target = load_target(config, torch.device("cpu"))
    sequences = load_training_sequences(config, target)[:conversations]
    layers = drafters.build(config.kind, config.drafter_settings, target.shape).feature_layers
    lengths = [len(sequence.ids) for sequence in sequences]
    plan = plan_epoch(lengths, config.loop.batch_size, 1, config.seed, 0, config.loop.batch_tokens)
    rows = [
        "stored as | bytes per token | tokens | compute, tokens/s | read cold, tokens/s | read warm, tokens/s | "
        "cold / compute | warm / compute",
        "--- | --- | --- | --- | --- | --- | --- | ---",
    ]
    for dtype in dtypes:
        with tempfile.TemporaryDirectory(dir=place) as folder:
            features = dataclasses.replace(config.features, store="disk", folder=folder, dtype=dtype, prefetch=0)
            store = FeatureStore(target, sequences, layers, features)
            start = time.perf_counter()
            store.fill()
            computed = sum(lengths) / (time.perf_counter() - start)
            for file in Path(folder).glob("*.bin"):
                with open(file, "rb") as handle:
                    os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            speeds = [_read(store, plan, lengths) for _ in range(1 + repeats)]
            cold, warm = speeds[0], statistics.median(speeds[1:])
        numbers = [
            store.bytes_per_token(),
            sum(lengths),
            *map(round, (computed, cold, warm, cold / computed, warm / computed)),
        ]
        rows.append(" | ".join([dtype, *(f"{number:,}" for number in numbers)]))
    return [f"| {row} |" for row in rows]


def _read(store: FeatureStore, plan: list[list[int]], lengths: list[int]) -> float:
    start = time.perf_counter()
    for indices in plan:
        store.batch(indices)
    return sum(lengths[index] for indices in plan for index in indices) / (time.perf_counter() - start)


if __name__ == "__main__":
    main()
