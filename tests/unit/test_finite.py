"""Losses, gradients and features that are not finite: what stops a run, what is written aside, and what it costs a step."""

import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from accelerate import Accelerator
from torch.utils._python_dispatch import TorchDispatchMode

from draftsmith.drafters.base import TrainingBatch
from draftsmith.train.config import FeaturesConfig
from draftsmith.train.data import Sequence
from draftsmith.train.features import FeatureStore
from draftsmith.train.finite import Finite

SEQUENCES = [Sequence(list(range(5, 5 + n)), [i > 1 for i in range(n)]) for n in (6, 9, 12)]


@pytest.fixture
def store(toy: SimpleNamespace) -> FeatureStore:
    return FeatureStore(toy.make_target(), SEQUENCES, (1, "last"), FeaturesConfig())


@pytest.fixture
def finite(tmp_path: Path) -> Finite:
    return Finite(Accelerator(cpu=True), tmp_path)


def see(
    finite: Finite, store: FeatureStore, step: int, indices: list[int], loss: float, spoil: Any = None
) -> TrainingBatch:
    """A micro-batch as the loop shows it; `spoil` changes its features."""

    def make() -> TrainingBatch:
        batch = store.batch(indices)
        if spoil is not None:
            features_BTF = batch.features_BTF.clone()
            spoil(features_BTF)
            batch = dataclasses.replace(batch, features_BTF=features_BTF)
        return batch

    batch = make()
    finite.micro_batch(step, indices, [SEQUENCES[i] for i in indices], batch, torch.tensor(loss), make)
    return batch


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((folder / "bad-batch").glob("*.json"))]


def test_the_first_micro_batch_whose_loss_is_not_finite_is_written_aside(
    finite: Finite, store: FeatureStore, tmp_path: Path
) -> None:
    for step, indices, loss in ((7, [0], 1.0), (8, [1], 2.0), (8, [2, 0], math.nan), (9, [1], math.nan)):
        batch = see(finite, store, step, indices, loss)
        if indices == [2, 0]:
            bad = batch
        finite.stepped(step, torch.tensor(1.0 if step < 8 else math.nan))
    with pytest.raises(ValueError, match="the loss of step 8 is not finite.*lower optim.learning_rate"):
        finite.check()
    (record,) = records(tmp_path)
    assert (record["step"], record["micro_batch"], record["conversations"]) == (8, 2, [2, 0])
    assert record["ids"] == [SEQUENCES[2].ids, SEQUENCES[0].ids] and record["loss"] == "nan"
    assert record["features_finite"] and record["not_finite"] == {}
    (file,) = (tmp_path / "bad-batch").glob("*.safetensors")
    saved = safetensors.torch.load_file(file)
    for field in dataclasses.fields(bad):
        if isinstance(value := getattr(bad, field.name), torch.Tensor):
            assert torch.equal(saved[field.name], value), field.name


def test_features_that_are_not_finite_are_named_with_their_places(
    finite: Finite, store: FeatureStore, tmp_path: Path
) -> None:
    def spoil(features_BTF: torch.Tensor) -> None:
        features_BTF[0, 3, 5] = math.inf
        features_BTF[0, 4, 0] = math.nan

    see(finite, store, 3, [1], 1.0, spoil)  # the loss may be finite all the same: behind the last supervised token
    with pytest.raises(
        ValueError, match=r"the target's own values are not finite there \(features_BTF\).*target.dtype"
    ):
        finite.check()
    (record,) = records(tmp_path)
    assert record["not_finite"] == {"features_BTF": {"count": 2, "first": [[0, 3, 5], [0, 4, 0]]}}


def test_a_gradient_alone_stops_the_run_with_all_micro_batches_of_the_step(
    finite: Finite, store: FeatureStore, tmp_path: Path
) -> None:
    see(finite, store, 4, [0], 1.0)
    finite.stepped(4, 1.0)
    for indices in ([1], [2]):
        see(finite, store, 5, indices, 1.0)
    finite.stepped(5, torch.tensor(math.inf))
    with pytest.raises(ValueError, match="the gradient's norm of step 5 is not finite"):
        finite.check()
    assert [record["conversations"] for record in records(tmp_path)] == [[1], [2]]


def test_what_is_finite_passes_and_is_forgotten(finite: Finite, store: FeatureStore, tmp_path: Path) -> None:
    finite.check()
    for step in (1, 2):
        see(finite, store, step, [step], 3.0)
        finite.stepped(step, torch.tensor(0.5))
        finite.check()
    see(finite, store, 3, [0], math.nan)
    with pytest.raises(ValueError, match="step 3"):
        finite.check()
    assert not list(tmp_path.glob("bad-batch/step-00000002*"))


class Reads(TorchDispatchMode):
    """Counts what waits for a device: a scalar or an index that goes to the host."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        self.count += any(part in name for part in ("_local_scalar_dense", "nonzero", "is_nonzero", "equal"))
        return func(*args, **(kwargs or {}))


def test_nothing_is_read_from_the_device_before_the_check(finite: Finite, store: FeatureStore) -> None:
    batch, loss, norm = store.batch([0, 1]), torch.tensor(1.0), torch.tensor(2.0)
    with Reads() as reads:
        for step in range(1, 6):
            finite.micro_batch(step, [0, 1], SEQUENCES[:2], batch, loss, lambda: batch)
            finite.stepped(step, norm)
        assert reads.count == 0
        float(loss)
        assert reads.count == 1  # it does count
    finite.check()
