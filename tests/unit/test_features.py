"""Feature stores: three of them give the same batches, and a disk store survives kills but no change of its inputs."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftsmith.drafters.base import TrainingBatch
from draftsmith.inference.target import Target
from draftsmith.train import features
from draftsmith.train.data import Sequence
from draftsmith.train.features import FeatureStore

LAYERS = (1, 3, "last", 4)


@pytest.fixture(scope="module")
def target(toy: SimpleNamespace) -> Target:
    found: Target = toy.make_target(dtype=torch.float32)
    return found


@pytest.fixture(scope="module")
def sequences(toy: SimpleNamespace) -> list[Sequence]:
    generator = torch.Generator().manual_seed(1)
    out = []
    for length in (9, 4, 17, 6, 12, 5, 9):
        ids = torch.randint(3, toy.VOCAB, (length,), generator=generator).tolist()
        out.append(Sequence(ids, [False] * 2 + [True] * (length - 3) + [False]))
    return [*out, Sequence([5, 6, 7], [False] * 3)]


def tensors(batch: TrainingBatch) -> Iterator[tuple[str, torch.Tensor]]:
    fields = (field.name for field in dataclasses.fields(batch) if field.name != "epoch")
    return ((name, getattr(batch, name)) for name in fields)


def assert_batches(ours: TrainingBatch, expected: TrainingBatch, *, exact: bool) -> None:
    for (name, a), (_, b) in zip(tensors(ours), tensors(expected), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape, name
        if exact or not a.is_floating_point():
            assert torch.equal(a, b), name
        else:  # the residual stream grows to tens: its rounding, not the value's, is what is left
            assert float((a - b).abs().max()) <= 1e-6 * max(1.0, float(b.abs().max())), name


def filled(target: Target, sequences: list[Sequence], layers: tuple[Any, ...] = LAYERS, **changes: Any) -> FeatureStore:
    store = FeatureStore(target, sequences, layers, **changes)
    store.fill()
    return store


PICKS = [[0], [2, 1], [7, 0, 4], [3, 5, 6, 2]]


def test_memory_disk_and_online_give_the_same_batches(
    target: Target, sequences: list[Sequence], tmp_path: Path
) -> None:
    memory = filled(target, sequences, store="memory", capture_batch=3)
    disk = filled(target, sequences, store="disk", folder=tmp_path / "f", capture_batch=3)
    online = filled(target, sequences)
    for pick in PICKS:
        assert_batches(memory.batch(pick), disk.batch(pick), exact=True)
        assert_batches(online.batch(pick), memory.batch(pick), exact=False)


def test_a_batch_holds_what_the_model_says_about_each_sequence_alone(target: Target, sequences: list[Sequence]) -> None:
    """Against the Hugging Face model itself, without padding; `hidden_states[i]` enters layer i."""
    batch = filled(target, sequences).batch([0, 2, 1])
    final_norm_input = {}
    hook = target.model.model.norm.register_forward_pre_hook(lambda _, args: final_norm_input.update(x=args[0]))  # type: ignore[operator, union-attr]
    for row, index in enumerate([0, 2, 1]):
        sequence = sequences[index]
        length = len(sequence.ids)
        with torch.no_grad():
            out = target.model(torch.tensor([sequence.ids]), output_hidden_states=True)
        states = out.hidden_states
        expected = torch.cat([states[1], states[3], states[-1], final_norm_input["x"]], -1)[0]  # states[-1] is normed
        torch.testing.assert_close(batch.features_BTF[row, :length], expected, atol=1e-4, rtol=1e-5)
        torch.testing.assert_close(batch.last_BTD[row, :length], states[-1][0], atol=1e-4, rtol=1e-5)
        assert batch.ids_BT[row].tolist() == sequence.ids + [0] * (17 - length)
        assert batch.loss_mask_BT[row].tolist() == sequence.loss_mask + [False] * (17 - length)
        for m in range(length - 1):
            if sequence.loss_mask[m + 1]:
                logits_V = out.logits[0, m]
                assert float(batch.log_normaliser_BT[row, m]) == pytest.approx(float(logits_V.logsumexp(0)), abs=1e-4)
                assert int(batch.argmax_BT[row, m]) == int(logits_V.argmax())
        assert not batch.features_BTF[row, length:].any() and not batch.log_normaliser_BT[row, length:].any()
    hook.remove()


def test_logits_taken_in_chunks_give_the_same_law(
    target: Target, sequences: list[Sequence], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = filled(target, sequences).batch([0, 2])
    monkeypatch.setattr(features, "LOGIT_ELEMENTS", 5 * target.shape.vocab_size)
    assert_batches(filled(target, sequences).batch([0, 2]), whole, exact=False)


def test_sequences_without_a_supervised_token_make_a_batch_that_teaches_nothing(
    target: Target, sequences: list[Sequence]
) -> None:
    batch = filled(target, sequences).batch([7, 7])
    assert batch.features_BTF.shape == (2, 3, 4 * 32) and not batch.loss_mask_BT.any()


def test_an_interrupted_disk_store_computes_only_what_it_lacks(
    target: Target, sequences: list[Sequence], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "f"
    complete = filled(target, sequences, store="disk", folder=folder, capture_batch=2)
    expected = [complete.batch(pick) for pick in PICKS]
    files = sorted(folder.glob("group-*.safetensors"))
    assert len(files) == 4
    times = {file: file.stat().st_mtime_ns for file in files}
    files[1].unlink()
    files[3].rename(files[3].with_suffix(".writing"))  # as a kill during the write leaves it
    captured: list[int] = []
    plain = features.capture
    monkeypatch.setattr(features, "capture", lambda t, s, layers: captured.append(len(s)) or plain(t, s, layers))
    again = filled(target, sequences, store="disk", folder=folder, capture_batch=2)
    assert captured == [2, 2]
    for pick, batch in zip(PICKS, expected, strict=True):
        assert_batches(again.batch(pick), batch, exact=True)
    assert all(file.stat().st_mtime_ns == times[file] for file in (files[0], files[2]))
    assert not list(folder.glob("*.writing"))


def test_a_store_that_was_cut_short_by_an_error_continues(
    target: Target, sequences: list[Sequence], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, calls = features.capture, 0

    def fails_at_the_third(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("out of memory")
        return plain(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(features, "capture", fails_at_the_third)
        with pytest.raises(RuntimeError, match="out of memory"):
            filled(target, sequences, store="disk", folder=tmp_path / "f", capture_batch=2)
    assert len(list((tmp_path / "f").glob("group-*"))) == 2
    store = filled(target, sequences, store="disk", folder=tmp_path / "f", capture_batch=2)
    straight = filled(target, sequences, store="memory", capture_batch=2)
    for pick in PICKS:
        assert_batches(store.batch(pick), straight.batch(pick), exact=True)


def test_a_disk_store_serves_fewer_layers_and_is_extended_for_more(
    target: Target, sequences: list[Sequence], tmp_path: Path
) -> None:
    filled(target, sequences, (1, 3), store="disk", folder=tmp_path / "f")
    fewer = filled(target, sequences, ("last", 3), store="disk", folder=tmp_path / "f")
    assert_batches(
        fewer.batch([0, 2]), filled(target, sequences, ("last", 3), store="memory").batch([0, 2]), exact=True
    )
    more = filled(target, sequences, (1, 2), store="disk", folder=tmp_path / "f")
    assert_batches(more.batch([0, 2]), filled(target, sequences, (1, 2), store="memory").batch([0, 2]), exact=True)


def test_a_disk_store_of_another_target_or_other_data_is_refused(
    target: Target, sequences: list[Sequence], toy: SimpleNamespace, tmp_path: Path
) -> None:
    folder = tmp_path / "f"
    filled(target, sequences, store="disk", folder=folder)
    files = {file: file.read_bytes() for file in folder.iterdir()}
    flipped = [Sequence(sequences[0].ids, [not m for m in sequences[0].loss_mask]), *sequences[1:]]
    others: list[tuple[Target, list[Sequence], dict[str, Any], str]] = [
        (toy.make_target(dtype=torch.float32, seed=1), sequences, {}, "fingerprint"),
        (toy.make_target(dtype=torch.float64), sequences, {}, "dtype"),
        (target, sequences[:-1], {}, "sequences"),
        (target, flipped, {}, "sequences"),
        (target, sequences[::-1], {}, "sequences"),
        (target, sequences, {"capture_batch": 2}, "group"),
    ]
    for other_target, other_sequences, changes, message in others:
        with pytest.raises(ValueError, match=rf"was made with other .*{message}.*; give another features.folder"):
            filled(other_target, other_sequences, store="disk", folder=folder, **changes)
    assert {file: file.read_bytes() for file in folder.iterdir()} == files


def test_an_online_store_keeps_nothing(
    target: Target, sequences: list[Sequence], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FeatureStore(target, sequences, LAYERS)
    calls: list[int] = []
    plain = features.capture
    monkeypatch.setattr(features, "capture", lambda t, s, layers: calls.append(len(s)) or plain(t, s, layers))
    store.fill()
    assert calls == []
    store.batch([0, 1])
    store.batch([0, 1])
    assert calls == [2, 2]


def test_the_announced_size_is_about_what_the_files_take(
    target: Target, sequences: list[Sequence], tmp_path: Path
) -> None:
    many = sequences * 20
    store = filled(target, many, store="disk", folder=tmp_path / "f", capture_batch=200)
    (file,) = (tmp_path / "f").glob("group-*.safetensors")
    header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    announced = store.bytes_per_token() * sum(len(sequence.ids) for sequence in many)
    assert file.stat().st_size - header == announced
