"""The doctor's look at what the run will cost and where it will write: lengths, time, disk, memory, versions, folders.

Estimates come from this run's own rows and, for time and on a GPU for memory, from some steps that are really taken.
"""

import importlib.metadata
import math
import os
import re
import shutil
import time
from pathlib import Path

import torch
from transformers.utils.versions import require_version

from draftsmith.drafters.fused import rows_per_chunk
from draftsmith.inference.evaluate import spread
from draftsmith.train import checkpoints
from draftsmith.train.checks import Finding, Subject, judge
from draftsmith.train.features import FeatureStore
from draftsmith.train.optim import make_optimizers
from draftsmith.train.run import begun, load_training_sequences, mixed_precision
from draftsmith.train.shards import differences

TIMED_STEPS = 3
LEAST_FREE = 1 << 30
"""Bytes that should stay free for checkpoints and logs."""


def lengths(subject: Subject) -> Finding:
    """Training reaches as far as serving, and neither goes beyond the target's positions."""
    positions, cut = subject.target.shape.max_positions, subject.config.data.max_length
    longest = max(len(row.cut.ids) for row in subject.rows)
    wanted = subject.serving_length
    beyond = [
        f"{name} {n:,}" for name, n in (("data.max_length", longest), ("serving length", wanted or 0)) if n > positions
    ]
    said = "not given (--serving-length N)" if wanted is None else f"{wanted:,}"
    return judge(
        f"trained up to {longest:,} tokens (max_length {cut:,}), served up to {said}, the target has {positions:,} positions"
        + (f"; beyond them: {', '.join(beyond)}" if beyond else ""),
        "keep within the target's positions"
        if beyond
        else f"acceptance falls behind the training length: add rows of up to {wanted} tokens and raise data.max_length",
        fail=bool(beyond),
        warn=wanted is not None and wanted > longest,
        figures={"trained": longest, "max_length": cut, "served": wanted, "positions": positions},
    )


def time_of_training(subject: Subject) -> Finding:
    """Some steps of this run, timed, and how long all of them will take on one process."""
    config, drafter = subject.config, subject.drafter
    sequences = [subject.rows[i].cut for i in spread(len(subject.rows), _per_batch(subject))]
    optimizers = make_optimizers(drafter, config.optim)
    device = subject.target.device
    half = mixed_precision(config.loop) == "bf16" and subject.target.dtype != torch.float64
    drafter.train()
    seconds = []
    for _ in range(TIMED_STEPS):
        begin = _now(device)
        batch = subject.batch(drafter, sequences)
        captured = _now(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            parts = drafter(batch)
        (parts.sum / parts.count.clamp_min(1)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if not bool(parts.sum.isfinite()):
            return judge(
                "the loss of a first step is not finite",
                "look for bad values in the data, or lower optim.learning_rate",
                fail=True,
            )
        seconds.append((captured - begin, _now(device) - captured))
    capture, step = (min(column) for column in zip(*seconds, strict=True))
    batches = math.ceil(_num_rows(subject) / len(sequences)) * config.loop.epochs
    passes = batches if config.features.store == "online" else batches / config.loop.epochs
    estimate = batches * step + passes * capture
    limit = math.inf if config.loop.max_minutes is None else 60 * config.loop.max_minutes
    tokens = sum(len(sequence.ids) for sequence in sequences)
    return judge(
        f"{tokens / step:,.0f} tokens/s in training and {tokens / capture:,.0f} through the target; about "
        f"{_span(min(estimate, limit))} for {config.loop.epochs:g} epochs of {_num_rows(subject):,} rows on one process, "
        "measurements not counted" + (" (loop.max_minutes)" if estimate > limit else ""),
        "more than a week: take fewer rows, more processes, or set loop.max_minutes",
        warn=min(estimate, limit) > 7 * 86400,
        figures={
            "step_seconds": step,
            "capture_seconds": capture,
            "batch_tokens": tokens,
            "estimate_seconds": estimate,
        },
    )


def disk(subject: Subject) -> Finding:
    """Room for the feature store and the run folder."""
    features, need = subject.config.features, 0
    if features.store in ("disk", "hybrid"):
        assert features.folder is not None
        store = FeatureStore(subject.target, [], subject.layers, features)
        need = max(0, _store_bytes(subject) - _size(Path(features.folder), [c.name for c in store.columns.values()]))
    folder = _existing(Path(features.folder or subject.config.output))
    free = free_bytes(folder)
    short = need + LEAST_FREE > free
    return judge(
        f"features.store is {features.store}: {_bytes(need)} to be written, {_bytes(free)} free",
        "store less (a kind with fewer layers, a smaller data.max_length), put features.folder on a larger disk, or use "
        "features.store=online, which keeps nothing",
        fail=need > free,
        warn=short,
        figures={"need": need, "free": free},
    )


def memory(subject: Subject) -> Finding:
    """Weights, optimizer, features, activations and logits of one process, against what the device has."""
    parts = memory_parts(subject)
    devices = {parameter.device for parameter in subject.target.model.parameters()}  # several with a device map
    need, total = sum(parts.values()), sum(map(memory_bytes, devices))
    largest = ", ".join(
        f"{name} {_bytes(size)}" for name, size in sorted(parts.items(), key=lambda item: -item[1]) if size
    )
    return judge(
        f"about {_bytes(need)} of {_bytes(total)} on {subject.target.device.type}: {largest}",
        "lower loop.batch_size or loop.batch_tokens (and raise loop.accumulation), data.max_length or draft_vocab_size; "
        "features.store=memory keeps all features",
        fail=need > total,
        warn=need > 0.85 * total,
        figures={"need": need, "total": total} | parts,
    )


def versions(subject: Subject) -> Finding:
    """The installed packages are those that this one was written for."""
    try:
        required = importlib.metadata.requires("draftsmith") or []
    except importlib.metadata.PackageNotFoundError:
        return judge(
            "draftsmith itself is not installed", "pip install . in its folder, so that versions are checked", warn=True
        )
    wrong, found = [], {}
    for requirement in (line for line in required if "extra ==" not in line):
        name = re.split(r"[\s<>=!~;\[(]", requirement)[0]
        found[name] = importlib.metadata.version(name)
        try:
            require_version(requirement.split(";")[0].strip())
        except ImportError:
            wrong.append(f"{name} {found[name]} ({requirement})")
    return judge(
        ", ".join(f"{name} {version}" for name, version in found.items())
        + (f"; not as required: {', '.join(wrong)}" if wrong else ""),
        "install the versions that pyproject.toml asks for: pip install .",
        warn=bool(wrong),
        figures={"installed": found, "wrong": wrong},
    )


def feature_folder(subject: Subject) -> Finding:
    """A store's folder can be written, and what is there already belongs to this target and these data."""
    features = subject.config.features
    if features.store not in ("disk", "hybrid"):
        return judge(f"features.store is {features.store}; no folder", figures={"store": features.store})
    assert features.folder is not None
    folder = Path(features.folder)
    writable = os.access(_existing(folder), os.W_OK) and _existing(folder).is_dir()
    differing = _other_identity(subject, folder)
    return judge(
        f"{folder} {'is there' if folder.exists() else 'will be made'}"
        + ("" if writable else ", but cannot be written")
        + (f", of other {', '.join(differing)}" if differing else ""),
        "give another features.folder, or delete this one",
        fail=not writable or bool(differing),
        figures={"exists": folder.exists(), "writable": writable, "differing": differing},
    )


def output_folder(subject: Subject) -> Finding:
    """The run folder is free, or holds this very run."""
    config = subject.config
    folder = Path(config.output)
    if not os.access(_existing(folder), os.W_OK):
        return judge(f"{folder} cannot be written", "give another output", fail=True)
    there = begun(folder, config)  # ValueError if it holds another run
    found = checkpoints.complete(folder / "checkpoints")
    done = (folder / "finished.json").exists()
    return judge(
        f"{folder} holds this run, finished: train would do nothing"
        if done
        else f"{folder} holds this run; it continues from {found[-1].name if found else 'the beginning'}"
        if there
        else f"{folder} is free",
        "delete it or give another output to train again",
        warn=done,
        figures={"begun": there, "finished": done, "checkpoints": len(found)},
    )


# ---- helpers --------------------------------------------------------------------------------------------------------


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def memory_bytes(device: torch.device) -> int:
    """All memory of a device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _per_batch(subject: Subject) -> int:
    """Conversations of a micro-batch, on average."""
    loop, rows = subject.config.loop, subject.rows
    if loop.batch_tokens is None:
        return loop.batch_size or 1
    return max(1, round(loop.batch_tokens * len(rows) / sum(len(row.cut.ids) for row in rows)))


def memory_parts(subject: Subject) -> dict[str, int]:
    """Estimated bytes by what they are for."""
    config, target, drafter = subject.config, subject.target, subject.drafter
    shape, itemsize = target.shape, target.dtype.itemsize
    trained = sum(p.numel() for p in drafter.parameters() if p.requires_grad)
    longest = max(len(row.cut.ids) for row in subject.rows)
    loop = config.loop
    tokens = max(longest, loop.batch_tokens) if loop.batch_tokens is not None else (loop.batch_size or 1) * longest
    top_k = config.features.top_k
    widths = (len(drafter.feature_layers) + (top_k is None)) * shape.hidden_size
    per_depth = 8 * shape.hidden_size + 4 * shape.intermediate_size  # what a layer keeps for its backward pass
    vocab = shape.vocab_size if drafter.token_ids_W is None else len(drafter.token_ids_W)
    layers = 2 if config.features.store == "online" else 0  # of the target, alive at once without gradients
    return {
        "target": sum(p.numel() * p.element_size() for p in target.model.parameters()),
        "drafter": 4 * sum(p.numel() for p in drafter.parameters()),
        "gradients and optimizer": trained * (4 + (8 if config.optim.name == "adamw" else 4)),
        "average": 0 if config.optim.ema is None else 4 * trained,
        "features of a batch": tokens * (widths * itemsize + (top_k or 0) * (4 + itemsize)),
        "activations": tokens * (4 * per_depth * drafter.training_depth + layers * per_depth * itemsize),
        "logits": 2 * 4 * vocab * rows_per_chunk(vocab, shape.hidden_size),
        "feature store": _store_bytes(subject) if config.features.store == "memory" else 0,
    }


def _now(device: torch.device) -> float:
    """The time when everything that was asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _num_rows(subject: Subject) -> int:
    """Rows that training will take: as many per conversation as those that were rendered give, up to `max_answer_tokens`."""
    total, rows = len(subject.gathered.conversations), subject.rows
    number = total * len(rows) / min(total, subject.num_rows)
    if (most := subject.config.data.max_answer_tokens) is not None:
        number = min(number, most * len(rows) / sum(row.cut.num_answer_tokens for row in rows))
    return math.ceil(number)


def _store_bytes(subject: Subject) -> int:
    """What the features of all rows take."""
    mean = sum(len(row.cut.ids) for row in subject.rows) / len(subject.rows)
    config = subject.config.features
    store = FeatureStore(subject.target, [subject.rows[0].cut], subject.layers, config)
    return round(store.bytes_per_token() * mean * _num_rows(subject))


def _other_identity(subject: Subject, folder: Path) -> list[str]:
    """In what a store differs from this run; what depends on all rows is compared only if all were rendered."""
    if not (folder / "identity.json").exists():
        return []
    # As training reads them: of several sources it takes what they share once.
    sequences = load_training_sequences(subject.config, subject.target) if subject.complete else []
    identity = FeatureStore(subject.target, sequences, subject.layers, subject.config.features).identity()
    return differences(folder, {k: v for k, v in identity.items() if subject.complete or k != "sequences"})


def _existing(path: Path) -> Path:
    """The path or the nearest folder above it that exists."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def _size(folder: Path, columns: list[str]) -> int:
    """Of the files of these columns; a folder may hold those of other kinds too."""
    return sum(file.stat().st_size for name in columns for file in folder.glob(f"{name}-*.bin"))


def _bytes(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.1f} TB"


def _span(seconds: float) -> str:
    if seconds < 5400:
        return f"{seconds / 60:.1f} minutes"
    return f"{seconds / 3600:.1f} hours" if seconds < 172800 else f"{seconds / 86400:.1f} days"
