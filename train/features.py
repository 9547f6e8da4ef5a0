"""What the frozen target says about the training sequences: features, last states, and its law's normaliser.

Four stores give the same batches: `online` runs the target in every step and keeps nothing; `memory` and `disk` run it once, ahead
of training; `hybrid` runs it where a batch first asks for a sequence, and keeps what it says on disk. With
`capture_batch: 1` the target reads every sequence by itself: its values then depend on nothing else, and all stores give
the same bits. With more they go through it in fixed groups of similar length (online: as they come), which changes their rounding.

A disk store is a folder of `shards` with an identity, shared by all kinds: a column for each layer, one for the last states, and
one for each k of likeliest tokens in their place. It is checked, resumed and extended by whoever needs more of it. Values that
are not finite are refused on their way in and out.

Letters: B sequences, T positions, F captured width, D width, k likeliest tokens, V vocabulary.
"""

import dataclasses
import functools
import hashlib
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.drafters.base import LayerId, TrainingBatch
from draftsmith.drafters.layout import packed
from draftsmith.inference.target import Target
from draftsmith.train import encodings
from draftsmith.train.captured import Captured, Key, capture, columns, finite, from_records, to_record
from draftsmith.train.config import FeaturesConfig
from draftsmith.train.data import Sequence, data_hash
from draftsmith.train.prefetch import Prefetch
from draftsmith.train.shards import Column, Shards

FORMAT = "draftsmith-features-1: layer i is the state that enters decoder layer i, last is behind the final norm"
NOT_COMPUTED_WITH = {"transformers_version", "_name_or_path", "dtype"}
"""Of a target's settings, those that say where it comes from; its dtype is named by itself."""


def collate(
    sequences: SequenceOf[Sequence],
    captured: SequenceOf[Captured],
    layers: SequenceOf[LayerId],
    dtype: torch.dtype,
    device: torch.device,
    epoch: int = 0,
) -> TrainingBatch:
    """A batch of one row, the texts one behind the other, with the given layers as features, in the target's dtype."""

    def row(tensors: Iterable[Tensor]) -> Tensor:
        return torch.cat(list(tensors))[None].to(device)

    layout = packed([sequence.ids for sequence in sequences], [sequence.loss_mask for sequence in sequences])
    lasts = [encodings.decode(c.last, dtype) for c in captured if c.last is not None]
    last_BTD = row(lasts) if lasts else torch.zeros(*layout.ids_BT.shape, 0, dtype=dtype, device=device)
    tops = [c.top for c in captured if c.top is not None]
    features = [
        last_BTD if layer == "last" else row(encodings.decode(c.layers[layer], dtype) for c in captured)
        for layer in layers
    ]
    return TrainingBatch(
        ids_BT=layout.ids_BT.to(device),
        loss_mask_BT=layout.loss_mask_BT.to(device),
        features_BTF=torch.cat(features, dim=-1) if features else last_BTD[..., :0],
        last_BTD=last_BTD,
        log_normaliser_BT=row(c.log_normaliser_T for c in captured),
        argmax_BT=row(c.argmax_T for c in captured).long(),
        epoch=epoch,
        top_ids_BTk=row(top.ids_Tk for top in tops) if tops else None,
        top_logits_BTk=row(top.logits_Tk for top in tops) if tops else None,
        layout=layout,
    )


class FeatureStore:
    """Gives training batches; see the module's docstring for the four kinds of store."""

    def __init__(
        self,
        target: Target,
        sequences: SequenceOf[Sequence],
        layers: SequenceOf[LayerId],
        config: FeaturesConfig | None = None,
    ) -> None:
        self.target, self.sequences, self.layers = target, sequences, tuple(layers)
        self.config = config = FeaturesConfig() if config is None else config
        _check_top_k(config.top_k, self.layers, target.shape.vocab_size)
        together = config.capture_batch
        order = sorted(range(len(sequences)), key=lambda index: (len(sequences[index].ids), index))
        self.groups = [order[begin : begin + together] for begin in range(0, len(order), together)]
        self._group = {index: g for g, group in enumerate(self.groups) for index in group}
        self._memory: dict[int, Captured] = {}
        ahead = config.prefetch if config.store in ("disk", "hybrid") else 0
        self._prefetch: Prefetch[tuple[list[int], int], TrainingBatch | None] = Prefetch(self._stored_batch, ahead)

    def fill(self) -> None:
        """Makes the store ready: what it lacks is computed (hybrid: when it is asked for). Says what it takes, shows progress.

        Processes that fill one folder share the work, each a shard at a time.

        Raises:
            ValueError: the folder belongs to other data or another target, the disk is too small, or processes that fill it at
                their own pace hold the target together.
        """
        config = self.config
        if config.store in ("disk", "hybrid") and self.target.lockstep is not None:
            self._refuse_lockstep()
        if config.store == "memory":
            size = self.bytes_per_token() * sum(len(sequence.ids) for sequence in self.sequences)
            _say(f"features: {self.bytes_per_token():,} bytes per token, {size / 1e9:.2f} GB in memory")
            progress = _Progress(self.sequences, self.groups)
            for group in self.groups:
                self._memory |= {index: self._on_cpu(captured) for index, captured in self._capture(group).items()}
                progress.add(group)
        elif config.store in ("disk", "hybrid"):
            self._announce_size()
            if config.store == "disk":
                self._fill_shards()

    def announce(self, plan: Iterable[SequenceOf[int]], epoch: int) -> None:
        """Which batches come next, in order, so that they can be read ahead."""
        self._prefetch.announce((list(indices), epoch) for indices in plan)

    def batch(self, indices: SequenceOf[int], epoch: int = 0) -> TrainingBatch:
        """The training batch of the given sequences, on the target's device."""
        device = self.target.device
        if self.config.store == "online":
            captured = self._capture(indices)
            return self._collate(indices, [captured[index] for index in indices], device, epoch)
        ready = self._prefetch.take((list(indices), epoch))
        if ready is None:  # some of it is not stored yet
            for group in {self._group[index] for index in indices}:
                self._complete(self.groups[group])
            ready = self._stored_batch((list(indices), epoch))
            assert ready is not None
        return _each(ready, lambda tensor: tensor.to(device, non_blocking=True))

    def bytes_per_token(self) -> int:
        """What a stored token takes."""
        return sum(column.bytes_per_token for column in self.columns.values())

    @functools.cached_property
    def columns(self) -> dict[Key, Column]:
        """What is stored of each layer that is asked for, and of the last states or the likeliest tokens."""
        config, width = self.config, self.target.shape.hidden_size
        return columns(self.layers, config.dtype, width, self.target.dtype, config.top_k)

    def identity(self) -> dict[str, str | int]:
        """What a stored value, or its place, depends on; which layers a store has, and how, is seen from its files."""
        # Settings at their defaults are left out: another version of transformers may have more of them.
        settings = {k: v for k, v in self.target.config.to_diff_dict().items() if k not in NOT_COMPUTED_WITH}
        return {
            "format": FORMAT,
            "fingerprint": self.target.shape.fingerprint,  # of the weights: model and revision
            "config": _digest(settings),  # for what is not a weight: RoPE, norms, windows, soft-capping
            "dtype": str(self.target.dtype),
            "sequences": data_hash(self.sequences),  # tokenizer, template and data at once
            "capture_batch": self.config.capture_batch,
            "shard_mb": self.config.shard_mb,
            **self.target.form.rounding(),  # where it lies changes nothing
        }

    @functools.cached_property
    def shards(self) -> Shards:
        """The folder, opened."""
        assert self.config.folder is not None
        per_shard = self.config.shard_mb * 1_000_000 // (self.target.shape.hidden_size * self.target.dtype.itemsize)
        shards: list[list[int]] = [[]]
        tokens = 0
        for group in self.groups:
            more = sum(len(self.sequences[index].ids) for index in group)
            if shards[-1] and tokens + more > per_shard:
                shards.append([])
                tokens = 0
            shards[-1] += group
            tokens += more
        lengths = [len(sequence.ids) for sequence in self.sequences]
        return Shards(Path(self.config.folder), self.identity(), lengths, shards)

    def _capture(self, indices: SequenceOf[int]) -> dict[int, Captured]:
        chosen = [self.sequences[index] for index in indices]
        config = self.config
        captured = capture(
            self.target, chosen, self.layers, encoding=config.dtype, together=config.capture_batch, top_k=config.top_k
        )
        return dict(zip(indices, captured, strict=True))

    def _collate(
        self, indices: SequenceOf[int], captured: SequenceOf[Captured], device: torch.device, epoch: int
    ) -> TrainingBatch:
        chosen = [self.sequences[index] for index in indices]
        return collate(chosen, captured, self.layers, self.target.dtype, device, epoch)

    def _announce_size(self) -> None:
        whole, taken = self.shards.sizes(list(self.columns.values()))
        free = shutil.disk_usage(self.shards.folder).free
        _say(
            f"features: {self.bytes_per_token():,} bytes per token, {whole / 1e9:.2f} GB in {self.config.folder} "
            f"({taken / 1e9:.2f} GB are there), {free / 1e9:.1f} GB free"
        )
        if self.config.dtype != "target":
            _say(f"features: stored as {self.config.dtype}; {encodings.MEASURED}")
        if whole - taken > free:
            raise ValueError(
                f"{self.config.folder} needs another {(whole - taken) / 1e9:.2f} GB and the disk has {free / 1e9:.2f} GB; free "
                "some space, give another features.folder, a smaller features.dtype (float8, int8), features.top_k, fewer "
                "conversations, or store: online"
            )

    def _refuse_lockstep(self) -> None:
        """ValueError if a sharded target would have to run, for processes fill a folder each at its own pace."""
        if any(self._lacking(shard) for shard in range(len(self.shards.shards))):
            raise ValueError(
                f"features.store is {self.config.store} and {self.config.folder} is not complete, but a sharded target "
                "cannot fill it: each process does so at its own pace, and the target needs all of them for every pass. Fill it "
                "first (draftsmith cache CONFIG target.placement=device_map), or give features.store: online or memory"
            )

    def _fill_shards(self) -> None:
        lacking = {s: groups for s in range(len(self.shards.shards)) if (groups := self._lacking(s))}
        progress = _Progress(self.sequences, [group for groups in lacking.values() for group in groups])
        taken = []  # by other processes
        for shard in lacking:
            with self.shards.lock(shard, wait=False) as mine:
                if mine:
                    self._fill_shard(shard, progress)
                else:
                    taken.append(shard)
        for shard in taken:
            _say(f"features: another process fills shard {shard} of {self.config.folder}; waiting for it")
            with self.shards.lock(shard):
                self._fill_shard(shard, progress)

    def _fill_shard(self, shard: int, progress: "_Progress") -> None:
        for group in self._lacking(shard):
            self._write(group)
            progress.add(group)
        for column in self.columns.values():
            self.shards.sync(column, shard)

    def _lacking(self, shard: int) -> list[list[int]]:
        """The groups of a shard in which a sequence lacks a column."""
        missing = set().union(*(self.shards.missing(column, shard) for column in self.columns.values()))
        return [self.groups[group] for group in sorted({self._group[index] for index in missing})]

    def _complete(self, group: list[int]) -> None:
        """Computes a group that is not stored yet (hybrid)."""
        shard = self.shards.shard_of(group[0])
        with self.shards.lock(shard):
            if group in self._lacking(shard):
                self._write(group)

    def _write(self, group: list[int]) -> None:
        """Runs the target over a group and stores what of it is not there; the lock of its shard must be held."""
        shard = self.shards.shard_of(group[0])
        missing = {layer: self.shards.missing(column, shard) for layer, column in self.columns.items()}
        for index, captured in self._capture(group).items():
            for layer, column in self.columns.items():
                if index in missing[layer]:
                    self.shards.write(column, index, to_record(captured, layer))

    def _stored_batch(self, key: tuple[list[int], int]) -> TrainingBatch | None:
        """The batch on the CPU, pinned for a GPU; None where some of it is not stored yet. Runs in the thread, too."""
        indices, epoch = key
        captured = [self._stored(index) for index in indices]
        there = [c for c in captured if c is not None]
        if len(there) < len(captured):
            return None
        batch = self._collate(indices, there, torch.device("cpu"), epoch)
        stored = (batch.features_BTF, batch.last_BTD, batch.top_logits_BTk)
        if not all(finite(values) for values in stored if values is not None):
            raise ValueError(
                f"the feature store {self.config.folder} holds values that are not finite for one of the conversations "
                f"{', '.join(map(str, indices))} (counted from 0); delete the folder and fill it again"
            )
        return _each(batch, Tensor.pin_memory) if self.target.device.type == "cuda" else batch

    def _stored(self, index: int) -> Captured | None:
        if self.config.store == "memory":
            return self._memory[index]
        records = {layer: self.shards.read(column, index) for layer, column in self.columns.items()}
        found = {layer: record for layer, record in records.items() if record is not None}
        return from_records(found) if len(found) == len(records) else None

    def _on_cpu(self, captured: Captured) -> Captured:
        return from_records({layer: to_record(captured, layer) for layer in self.columns})


class _Progress:
    """A line on stderr every ten seconds, and one at the end."""

    def __init__(self, sequences: SequenceOf[Sequence], groups: SequenceOf[SequenceOf[int]]) -> None:
        self._lengths = [len(sequence.ids) for sequence in sequences]
        self._total = sum(self._lengths[index] for group in groups for index in group)
        self._start, self._tokens, self._shown = time.perf_counter(), 0, 0.0

    def add(self, group: SequenceOf[int]) -> None:
        self._tokens += sum(self._lengths[index] for index in group)
        elapsed = time.perf_counter() - self._start
        if elapsed - self._shown > 10 or self._tokens == self._total:
            self._shown = elapsed
            rate = self._tokens / elapsed
            left = (self._total - self._tokens) / rate / 60
            _say(f"features: {self._tokens:,} of {self._total:,} tokens, {rate:.0f} tokens/s, {left:.1f} min left")


def _each(batch: TrainingBatch, change: Callable[[Tensor], Tensor]) -> TrainingBatch:
    """The batch with a change to each of its tensors."""
    changed: dict[str, Any] = {}
    for field in dataclasses.fields(batch):
        value = getattr(batch, field.name)
        changed[field.name] = change(value) if isinstance(value, Tensor) else value
    return TrainingBatch(**changed)


def _check_top_k(top_k: int | None, layers: tuple[LayerId, ...], vocab_size: int) -> None:
    if top_k is not None and "last" in layers:
        raise ValueError(
            f"features.top_k is {top_k} and keeps the target's likeliest tokens instead of its last state, which this kind of "
            "drafter reads; leave top_k out, or give a kind that reads other states (eagle3, p_eagle, dflash, draft_lm)"
        )
    if top_k is not None and top_k > vocab_size:
        raise ValueError(f"features.top_k is {top_k} and the target has {vocab_size} tokens; give at most that many")


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
