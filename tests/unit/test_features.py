"""Feature stores: all of them give the same batches, and a disk store survives kills but no change of its inputs."""

import dataclasses
import functools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftsmith.drafters.base import TrainingBatch
from draftsmith.drafters.unpack import one_per_row
from draftsmith.inference.target import Target
from draftsmith.train import captured, features
from draftsmith.train.config import FeaturesConfig
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
    fields = ((field.name, getattr(batch, field.name)) for field in dataclasses.fields(batch))
    return ((name, value) for name, value in fields if isinstance(value, torch.Tensor))


def assert_batches(ours: TrainingBatch, expected: TrainingBatch, *, exact: bool) -> None:
    for (name, a), (_, b) in zip(tensors(ours), tensors(expected), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape, name
        if exact or not a.is_floating_point():
            assert torch.equal(a, b), name
        else:  # the residual stream grows to tens: its rounding, not the value's, is what is left
            assert float((a - b).abs().max()) <= 1e-6 * max(1.0, float(b.abs().max())), name


def filled(target: Target, sequences: list[Sequence], layers: tuple[Any, ...] = LAYERS, **changes: Any) -> FeatureStore:
    store = FeatureStore(target, sequences, layers, FeaturesConfig(**changes))
    store.fill()
    return store


def on_disk(folder: Path, **changes: Any) -> dict[str, Any]:
    return {"store": "disk", "folder": str(folder), **changes}


PICKS = [[0], [2, 1], [7, 0, 4], [3, 5, 6, 2]]


@pytest.mark.parametrize("dtype", ["target", "float8", "int8"])
def test_all_stores_give_the_same_bits(dtype: str, target: Target, sequences: list[Sequence], tmp_path: Path) -> None:
    online = filled(target, sequences, dtype=dtype)
    memory = filled(target, sequences, store="memory", dtype=dtype)
    disk = filled(target, sequences, **on_disk(tmp_path / "disk", dtype=dtype))
    hybrid = filled(target, sequences, store="hybrid", folder=str(tmp_path / "hybrid"), dtype=dtype)
    for pick in PICKS:
        expected = online.batch(pick)
        for store in (memory, disk, hybrid, hybrid):  # the second time it is there
            assert_batches(store.batch(pick), expected, exact=True)


def test_sequences_captured_together_differ_in_rounding_only(
    target: Target, sequences: list[Sequence], tmp_path: Path
) -> None:
    memory = filled(target, sequences, store="memory", capture_batch=3)
    disk = filled(target, sequences, **on_disk(tmp_path / "disk", capture_batch=3))
    hybrid = filled(target, sequences, store="hybrid", folder=str(tmp_path / "hybrid"), capture_batch=3)
    alone, online = filled(target, sequences), filled(target, sequences, capture_batch=3)
    for pick in PICKS:
        assert_batches(memory.batch(pick), disk.batch(pick), exact=True)
        assert_batches(hybrid.batch(pick), disk.batch(pick), exact=True)
        assert_batches(online.batch(pick), alone.batch(pick), exact=False)
        assert_batches(disk.batch(pick), alone.batch(pick), exact=False)


def test_a_batch_holds_what_the_model_says_about_each_sequence_alone(target: Target, sequences: list[Sequence]) -> None:
    """Against the Hugging Face model itself, without padding; `hidden_states[i]` enters layer i."""
    batch = one_per_row(filled(target, sequences).batch([0, 2, 1]))
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
    monkeypatch.setattr(captured, "LOGIT_ELEMENTS", 5 * target.shape.vocab_size)
    assert_batches(filled(target, sequences).batch([0, 2]), whole, exact=False)


def test_sequences_without_a_supervised_token_make_a_batch_that_teaches_nothing(
    target: Target, sequences: list[Sequence]
) -> None:
    batch = filled(target, sequences).batch([7, 7])
    assert batch.features_BTF.shape == (1, 6, 4 * 32) and not batch.loss_mask_BT.any()


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by the number of sequences whenever the target is run over some."""
    calls: list[int] = []
    plain = features.capture

    def counting(target: Target, sequences: list[Sequence], *arguments: Any, **settings: Any) -> Any:
        calls.append(len(sequences))
        return plain(target, sequences, *arguments, **settings)

    monkeypatch.setattr(features, "capture", counting)
    return calls


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_a_store_that_was_cut_short_by_an_error_continues_and_ends_with_the_same_bytes(
    target: Target, sequences: list[Sequence], tmp_path: Path, captures: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = filled(target, sequences, **on_disk(tmp_path / "straight", capture_batch=2))
    assert captures == [2, 2, 2, 2]
    counting = features.capture

    def fails_at_the_third(*arguments: Any, **settings: Any) -> Any:
        if len(captures) == 6:
            raise RuntimeError("out of memory")
        return counting(*arguments, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(features, "capture", fails_at_the_third)
        with pytest.raises(RuntimeError, match="out of memory"):
            filled(target, sequences, **on_disk(tmp_path / "cut", capture_batch=2))
    store = filled(target, sequences, **on_disk(tmp_path / "cut", capture_batch=2))
    assert captures == [2] * 8  # each group once for each folder
    assert contents(tmp_path / "cut") == contents(tmp_path / "straight")
    for pick in PICKS:
        assert_batches(store.batch(pick), straight.batch(pick), exact=True)


def test_two_that_fill_one_folder_at_once_share_the_work(
    toy: SimpleNamespace, sequences: list[Sequence], tmp_path: Path, captures: list[int]
) -> None:
    """Two threads with a target each; the locks are the same between processes. What one has done, the other does not."""
    many = sequences * 200
    targets = [toy.make_target(dtype=torch.float32) for _ in range(3)]
    straight = filled(targets[2], many, (1,), **on_disk(tmp_path / "straight", shard_mb=1, capture_batch=16))
    assert len(straight.shards.shards) == 2
    captures.clear()
    fill = functools.partial(
        filled, sequences=many, layers=(1,), **on_disk(tmp_path / "f", shard_mb=1, capture_batch=16)
    )
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(fill, targets[:2]))
    assert sum(captures) == len(many)
    assert contents(tmp_path / "f") == contents(tmp_path / "straight")


def test_only_a_file_that_was_deleted_is_made_again(
    target: Target, sequences: list[Sequence], tmp_path: Path, captures: list[int]
) -> None:
    filled(target, sequences, **on_disk(tmp_path))
    before = contents(tmp_path)
    times = {file: file.stat().st_mtime_ns for file in tmp_path.glob("*.bin")}
    assert sorted(file.name for file in times) == [
        f"{name}-target-00000.bin" for name in ("last", "layer1", "layer3", "layer4")
    ]
    (tmp_path / "layer3-target-00000.bin").unlink()
    captures.clear()
    filled(target, sequences, **on_disk(tmp_path))
    assert captures == [1] * 8 and contents(tmp_path) == before
    changed = [file.name for file, time in times.items() if file.stat().st_mtime_ns != time]
    assert changed == ["layer3-target-00000.bin"]


def test_a_store_of_several_shards_gives_what_one_shard_gives(
    toy: SimpleNamespace, sequences: list[Sequence], tmp_path: Path
) -> None:
    target = toy.make_target(dtype=torch.float32, vocab_size=toy.VOCAB)
    many = sequences * 1200  # 78,000 tokens of 128 bytes
    small = FeatureStore(target, many, (1,), FeaturesConfig(**on_disk(tmp_path, shard_mb=1)))
    assert len(small.shards.shards) == 10
    picks = [[0, 5000, 9599], [8000, 17, 4, 9000]]
    hybrid = FeatureStore(target, many, (1,), FeaturesConfig(store="hybrid", folder=str(tmp_path), shard_mb=1))
    hybrid.fill()
    for pick in picks:
        assert_batches(hybrid.batch(pick), filled(target, many, (1,)).batch(pick), exact=True)
    assert len(list(tmp_path.glob("layer1-target-*.bin"))) < 8  # only those that were asked for


def test_a_disk_store_serves_fewer_layers_and_is_extended_for_more(
    target: Target, sequences: list[Sequence], tmp_path: Path, captures: list[int]
) -> None:
    filled(target, sequences, (1, 3), **on_disk(tmp_path))
    before = contents(tmp_path)
    captures.clear()
    fewer = filled(target, sequences, ("last", 3), **on_disk(tmp_path))
    assert captures == []
    assert_batches(fewer.batch([0, 2]), filled(target, sequences, ("last", 3)).batch([0, 2]), exact=True)
    more = filled(target, sequences, (1, 2), **on_disk(tmp_path))
    assert_batches(more.batch([0, 2]), filled(target, sequences, (1, 2)).batch([0, 2]), exact=True)
    eight_bits = filled(target, sequences, (1,), **on_disk(tmp_path, dtype="int8"))  # beside the others
    assert_batches(eight_bits.batch([0, 2]), filled(target, sequences, (1,), dtype="int8").batch([0, 2]), exact=True)
    assert before.items() <= contents(tmp_path).items()


def test_a_disk_store_of_another_target_or_other_data_is_refused(
    target: Target, sequences: list[Sequence], toy: SimpleNamespace, tmp_path: Path
) -> None:
    filled(target, sequences, **on_disk(tmp_path))
    before = contents(tmp_path)
    scaled = {"rope_type": "linear", "factor": 4.0, "rope_theta": target.shape.rope_theta}  # in no shape, and no weight
    flipped = [Sequence(sequences[0].ids, [not m for m in sequences[0].loss_mask]), *sequences[1:]]
    others: list[tuple[Target, list[Sequence], dict[str, Any], str]] = [
        (toy.make_target(dtype=torch.float32, seed=1), sequences, {}, "fingerprint"),
        (toy.make_target(dtype=torch.float32, rope_theta=500.0), sequences, {}, "config"),  # the same weights
        (toy.make_target(dtype=torch.float32, rope_parameters=scaled), sequences, {}, "config"),
        (toy.make_target(dtype=torch.float64), sequences, {}, "dtype"),
        (target, sequences[:-1], {}, "sequences"),
        (target, flipped, {}, "sequences"),
        (target, sequences[::-1], {}, "sequences"),
        (target, sequences, {"capture_batch": 2}, "capture_batch"),
        (target, sequences, {"shard_mb": 1}, "shard_mb"),
    ]
    for other_target, other_sequences, changes, message in others:
        with pytest.raises(ValueError, match=rf"was made with other .*{message}.*; give another features.folder"):
            filled(other_target, other_sequences, **on_disk(tmp_path, **changes))
    assert contents(tmp_path) == before


def test_a_value_that_is_not_finite_is_refused_with_its_conversation(
    toy: SimpleNamespace, sequences: list[Sequence], tmp_path: Path
) -> None:
    target = toy.make_target(dtype=torch.float32)
    with torch.no_grad():
        target.embed(torch.tensor([0]))  # the embedding's own row
        target.model.get_input_embeddings().weight[sequences[4].ids[1]] = float("inf")
    bad = [index for index, sequence in enumerate(sequences) if sequences[4].ids[1] in sequence.ids]
    good = [index for index in range(len(sequences)) if index not in bad]
    for together in (1, 8):
        store = filled(target, sequences, capture_batch=together)
        store.batch(good)
        with pytest.raises(ValueError, match=rf"not finite for the conversation of 12 tokens .*{sequences[4].ids[0]}"):
            store.batch([*good, 4])


def test_a_disk_that_is_too_small_is_noticed_before_the_target_runs(
    target: Target, sequences: list[Sequence], tmp_path: Path, captures: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SimpleNamespace(free=20_000)
    monkeypatch.setattr(features.shutil, "disk_usage", lambda folder: disk)
    with pytest.raises(ValueError, match="needs another 0.00 GB and the disk has 0.00 GB; free some space"):
        filled(target, sequences, **on_disk(tmp_path))
    assert captures == []
    disk.free = 50_000
    filled(target, sequences, **on_disk(tmp_path))
    disk.free = 0  # what is there needs no more
    filled(target, sequences, **on_disk(tmp_path))


def test_an_online_store_keeps_nothing(target: Target, sequences: list[Sequence], captures: list[int]) -> None:
    store = filled(target, sequences)
    assert captures == []
    store.batch([0, 1])
    store.batch([0, 1])
    assert captures == [2, 2]


def test_the_announced_size_is_what_the_files_take(
    target: Target, sequences: list[Sequence], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    many = sequences * 20
    tokens = sum(len(sequence.ids) for sequence in many)
    for dtype, per_state in (("target", 4 * 32), ("float8", 32 + 4), ("int8", 32 + 4)):
        store = filled(target, many, **on_disk(tmp_path / dtype, dtype=dtype, capture_batch=16))
        sizes = [file.stat().st_size for file in (tmp_path / dtype).glob("*.bin")]
        columns = list(store.columns.values())
        assert store.shards.sizes(columns) == (sum(sizes), sum(sizes))
        assert store.bytes_per_token() == 4 * per_state + 8  # four states, normaliser and argmax
        assert 0 <= sum(sizes) - tokens * store.bytes_per_token() <= 4 * len(many) * (8 + 7)  # checksums, rounding up
        assert f"features: {store.bytes_per_token():,} bytes per token" in capsys.readouterr().err


def test_announced_batches_come_in_any_order_that_is_asked_for(
    target: Target, sequences: list[Sequence], tmp_path: Path
) -> None:
    online = filled(target, sequences)
    store = filled(target, sequences, **on_disk(tmp_path, prefetch=3))
    store.announce(PICKS, 7)
    for pick in (
        PICKS[0],
        PICKS[2],
        [6, 6],
        PICKS[3],
        PICKS[1],
    ):  # one is left out, one was not announced, one comes late
        batch = store.batch(pick, 7)
        assert batch.epoch == 7
        assert_batches(batch, online.batch(pick, 7), exact=True)


def test_a_damaged_file_is_reported_from_the_thread_that_reads_ahead(
    target: Target, sequences: list[Sequence], tmp_path: Path
) -> None:
    store = filled(target, sequences, **on_disk(tmp_path))
    file = tmp_path / "layer3-target-00000.bin"
    damaged = bytearray(file.read_bytes())
    damaged[-9] ^= 1
    file.write_bytes(damaged)
    last = store.shards.shards[0][-1]
    store.announce([[0], [last]], 0)
    store.batch([0], 0)
    with pytest.raises(
        ValueError, match=r"layer3-target-00000\.bin is damaged: its bytes .*; delete this file and run"
    ):
        store.batch([last], 0)


@pytest.mark.parametrize("dtype", ["float8", "int8"])
def test_the_law_of_states_in_eight_bits_is_a_law_and_the_likeliest_token_is_the_targets_own(
    dtype: str, target: Target, sequences: list[Sequence]
) -> None:
    exact, coarse = filled(target, sequences).batch([2, 4]), filled(target, sequences, dtype=dtype).batch([2, 4])
    taught_BT = exact.log_normaliser_BT != 0
    laws_nV = (target.unembed(coarse.last_BTD) - coarse.log_normaliser_BT[..., None]).exp()[taught_BT]
    torch.testing.assert_close(laws_nV.sum(1), torch.ones(len(laws_nV)))
    mixed_nV = (target.unembed(coarse.last_BTD) - exact.log_normaliser_BT[..., None]).exp()[taught_BT]
    assert float(mixed_nV.sum(1).max()) > 1.001  # what the exact normaliser would have made of them
    assert torch.equal(coarse.argmax_BT, exact.argmax_BT)
    assert not torch.equal(coarse.last_BTD, exact.last_BTD)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_single_value_that_is_not_finite_is_seen(dtype: torch.dtype, value: float) -> None:
    states = torch.randn(2, 37, 33).to(dtype)
    assert captured.finite(states) and captured.finite(states[..., :0])
    states[1, 30, 7] = value
    assert not captured.finite(states)


def test_a_stored_value_that_is_not_finite_is_refused_when_it_is_read(
    target: Target, sequences: list[Sequence], tmp_path: Path
) -> None:
    """As another program, or memory that failed before the checksum was taken, could have written it."""
    store = filled(target, sequences, **on_disk(tmp_path))
    column = store.columns[3]
    record = store.shards.read(column, 2)
    assert record is not None
    record["codes"][4, 7] = float("nan")  # of the mapped copy only
    store.shards.write(column, 2, record)
    store = filled(target, sequences, **on_disk(tmp_path))
    assert store.batch([0, 1]).features_BTF.isfinite().all()
    with pytest.raises(ValueError, match="holds values that are not finite for one of the conversations 0, 2"):
        store.batch([0, 2])
