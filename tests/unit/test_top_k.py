"""`features.top_k`: the target's k likeliest tokens in place of its last state.

Letters: B sequences, T positions, k tokens, V vocabulary.
"""

import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from draftsmith import drafters
from draftsmith.drafters import losses
from draftsmith.drafters.base import TrainableDrafter, TrainingBatch
from draftsmith.drafters.losses import LossConfig
from draftsmith.drafters.unpack import one_per_row
from draftsmith.inference.target import Target
from draftsmith.train import captured, checks_costs, features, on_policy, run
from draftsmith.train.config import FeaturesConfig, read
from draftsmith.train.data import Sequence
from draftsmith.train.features import FeatureStore

LAYERS = (1, 3)
READ_LAST = {"eagle", "hydra", "medusa", "medusa2", "mtp"}


@pytest.fixture(scope="module")
def target(toy: SimpleNamespace) -> Target:
    found: Target = toy.make_target()
    return found


@pytest.fixture(scope="module")
def sequences(toy: SimpleNamespace) -> list[Sequence]:
    generator = torch.Generator().manual_seed(1)
    out = []
    for length in (9, 4, 17, 6, 12):
        ids = torch.randint(3, toy.VOCAB, (length,), generator=generator).tolist()
        out.append(Sequence(ids, [False] * 2 + [True] * (length - 3) + [False]))
    return out


def make_batch(target: Target, rows: list[Sequence], layers: tuple[Any, ...], top_k: int | None) -> TrainingBatch:
    return one_per_row(FeatureStore(target, rows, layers, FeaturesConfig(top_k=top_k)).batch(range(len(rows))))


def loss_and_gradients(drafter: TrainableDrafter, batch: TrainingBatch) -> list[Tensor]:
    drafter.zero_grad()
    parts = drafter(batch)
    parts.sum.backward()
    gradients = [p.grad.clone() for p in drafter.parameters() if p.grad is not None]
    assert gradients and all(bool(gradient.any()) for gradient in gradients[:1])
    return [parts.sum.detach(), *parts.metrics.values(), *gradients]


# ---- the loss -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft_vocab_size", [48, None])
@pytest.mark.parametrize("divergence", ["kl", "lk", "tv", "jsd", "nla", "ce"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])  # gemma2: soft-capped logits
def test_all_tokens_give_the_loss_metrics_and_gradients_of_the_last_state(
    family: str, divergence: str, draft_vocab_size: int | None, sequences: list[Sequence], toy: SimpleNamespace
) -> None:
    target = toy.make_target(family)
    loss = {"divergence": divergence, "top_k_weight": 0 if divergence == "ce" else 0.5}
    drafter = toy.make_drafter("eagle3", target, draft_vocab_size=draft_vocab_size, loss=loss)
    plain, sparse = (make_batch(target, sequences, drafter.feature_layers, k) for k in (None, toy.VOCAB))
    assert sparse.last_BTD.shape[2] == 0 and plain.top_ids_BTk is None
    for ours, expected in zip(*(loss_and_gradients(drafter, batch) for batch in (sparse, plain)), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    ("kept", "loss", "overlap", "gradient"),
    [
        # The target says .5 .3 .15 .05, of which two tokens are known; the draft says 1/4 each.
        (None, 0.8 * math.log(4), 0.25 + 0.25, [0.2 - 0.5, 0.2 - 0.3, 0.2, 0.2]),
        # The draft has tokens 1 and 3, and says 1/2 each: .3 is all that is known of them.
        ([1, 3], 0.3 * math.log(2), 0.3, [0.15 - 0.3, 0.15]),
    ],
    ids=["whole vocabulary", "reduced"],
)
def test_two_of_four_tokens_give_the_numbers_worked_by_hand(
    kept: list[int] | None, loss: float, overlap: float, gradient: list[float]
) -> None:
    """The head is the identity, so a hidden vector is its logits."""
    law_V = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    batch = TrainingBatch(
        ids_BT=torch.ones(1, 3, dtype=torch.int64),
        loss_mask_BT=torch.tensor([[False, False, True]]),
        features_BTF=torch.zeros(1, 3, 0),
        last_BTD=torch.zeros(1, 3, 0, dtype=torch.float64),
        log_normaliser_BT=torch.full((1, 3), 7.0, dtype=torch.float64),
        argmax_BT=torch.zeros(1, 3, dtype=torch.int64),
        top_ids_BTk=torch.tensor([0, 1], dtype=torch.int32).expand(1, 3, 2),
        top_logits_BTk=(law_V[:2].log() + 7).expand(1, 3, 2),
    )
    width = 4 if kept is None else len(kept)
    hidden_BTD = torch.zeros(1, 3, width, dtype=torch.float64, requires_grad=True)
    head: Any = SimpleNamespace(head_weight=lambda: torch.eye(4, dtype=torch.float64), adjust_logits=lambda x: x)
    ids_W = None if kept is None else torch.tensor(kept)
    weight_WD = torch.eye(width, dtype=torch.float64)
    found = losses.distill([hidden_BTD[:, 0]], [weight_WD], batch, head, ids_W, LossConfig())
    found.parts.sum.backward()
    assert float(found.parts.sum.detach()) == pytest.approx(loss)
    assert float(found.overlap_JBT.sum()) == pytest.approx(overlap)
    assert hidden_BTD.grad is not None
    torch.testing.assert_close(hidden_BTD.grad[0, 0], torch.tensor(gradient, dtype=torch.float64))
    assert not hidden_BTD.grad[0, 1:].any()


@pytest.mark.parametrize("divergence", ["kl", "tv"])
def test_more_tokens_come_closer_to_the_last_state(
    divergence: str, target: Target, sequences: list[Sequence], toy: SimpleNamespace
) -> None:
    """The loss and α are sums over tokens of one sign, so each further token brings them nearer."""
    drafter = toy.make_drafter("eagle3", target, loss={"divergence": divergence})

    def look(top_k: int | None) -> tuple[float, float]:
        parts = drafter(make_batch(target, sequences, drafter.feature_layers, top_k))
        return float(parts.sum.detach()), float(parts.metrics["overlap"].sum())

    loss, overlap = look(None)
    steps = [look(k) for k in (1, 2, 4, 16, toy.VOCAB)]
    for name, distances in (("loss", [abs(loss - a) for a, _ in steps]), ("α", [overlap - b for _, b in steps])):
        assert all(near < far for far, near in zip(distances, distances[1:], strict=False)), name
        assert abs(distances[-1]) < 1e-9 < distances[0] / 100, name


@pytest.mark.parametrize("kind", sorted(set(drafters.kinds()) - READ_LAST))
def test_what_is_given_at_prompt_tokens_changes_neither_loss_nor_gradients_to_the_last_bit(
    kind: str, target: Target, sequences: list[Sequence], toy: SimpleNamespace
) -> None:
    drafter = toy.make_drafter(kind, target)
    rows = [*sequences, Sequence(sequences[2].ids, [i % 5 > 1 for i in range(17)])]
    batch = make_batch(target, rows, drafter.feature_layers, 5)
    own_ids_BTk, own_logits_BTk = batch.top_ids_BTk, batch.top_logits_BTk
    assert own_ids_BTk is not None and own_logits_BTk is not None
    teaches_BT = torch.zeros_like(batch.loss_mask_BT)
    teaches_BT[:, 1:-1] = batch.loss_mask_BT[:, 2:]
    generator = torch.Generator().manual_seed(1)
    noise_BTk = torch.randn(own_ids_BTk.shape, generator=generator, dtype=torch.float64)
    ids_BTk = torch.randint(0, toy.VOCAB, noise_BTk.shape, generator=generator, dtype=torch.int32)

    def changed(where_BT: Tensor) -> list[Tensor]:
        other = dataclasses.replace(
            batch,
            top_ids_BTk=torch.where(where_BT[..., None], ids_BTk, own_ids_BTk),
            top_logits_BTk=torch.where(where_BT[..., None], noise_BTk, own_logits_BTk),
        )
        return loss_and_gradients(drafter, other)

    plain = loss_and_gradients(drafter, batch)
    assert all(map(torch.equal, changed(~teaches_BT), plain))
    first_BT = torch.zeros_like(teaches_BT)  # the same change where the first answer token is taught is seen
    first_BT[0, int(teaches_BT[0].nonzero()[0])] = True
    assert not torch.equal(changed(first_BT)[0], plain[0])


# ---- the store ------------------------------------------------------------------------------------------------------


def test_all_stores_give_the_same_bits_and_they_are_the_models_likeliest_tokens(
    toy: SimpleNamespace, sequences: list[Sequence], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = toy.make_target(dtype=torch.bfloat16)
    monkeypatch.setattr(captured, "LOGIT_ELEMENTS", 5 * toy.VOCAB)  # several chunks
    settings: list[dict[str, Any]] = [
        {"store": "online"},
        {"store": "memory"},
        {"store": "disk", "folder": str(tmp_path / "disk")},
        {"store": "hybrid", "folder": str(tmp_path / "hybrid")},
    ]
    stores = [FeatureStore(target, sequences, LAYERS, FeaturesConfig(top_k=3, **setting)) for setting in settings]
    for store in stores:
        store.fill()
    for pick in ([2, 1], [0, 3, 4], [2, 1]):
        online, *others = [store.batch(pick) for store in stores]
        for field in dataclasses.fields(TrainingBatch):
            for other in others:
                a, b = getattr(other, field.name), getattr(online, field.name)
                if field.name == "layout":
                    assert a.bounds == b.bounds
                else:
                    assert a == b if isinstance(b, int) else a.dtype == b.dtype and torch.equal(a, b), field.name
    online = one_per_row(online)
    assert online.top_ids_BTk is not None and online.top_logits_BTk is not None
    assert online.top_logits_BTk.dtype == torch.bfloat16
    for row, index in enumerate(pick):
        sequence = sequences[index]
        logits_TV = target.model(torch.tensor([sequence.ids])).logits[0].detach()
        for m in range(online.ids_BT.shape[1]):
            ids_k, logits_k = online.top_ids_BTk[row, m].long(), online.top_logits_BTk[row, m]
            if m + 1 < len(sequence.ids) and sequence.loss_mask[m + 1]:
                assert len(set(ids_k.tolist())) == 3
                assert torch.equal(logits_k, logits_TV[m].sort(descending=True).values[:3])
                assert torch.equal(logits_k, logits_TV[m, ids_k])
                assert float(online.log_normaliser_BT[row, m]) == pytest.approx(
                    float(logits_TV[m].float().logsumexp(0)), abs=1e-5
                )
            else:
                assert not ids_k.any() and not logits_k.any()


@pytest.mark.parametrize(("dtype", "per_state"), [("target", 2 * 32), ("int8", 32 + 4)])
def test_the_announced_size_is_what_the_files_take_and_each_k_has_a_file_of_its_own(
    dtype: Any, per_state: int, toy: SimpleNamespace, sequences: list[Sequence], tmp_path: Path
) -> None:
    target = toy.make_target(dtype=torch.bfloat16)
    many, folder = sequences * 20, str(tmp_path)

    def fill(top_k: int | None) -> FeatureStore:
        store = FeatureStore(
            target, many, LAYERS, FeaturesConfig(store="disk", folder=folder, dtype=dtype, top_k=top_k)
        )
        store.fill()
        return store

    store = fill(5)
    assert store.bytes_per_token() == 2 * per_state + 5 * (4 + 2) + 8  # two layers; ids and logits; normaliser, argmax
    size = sum(file.stat().st_size for file in tmp_path.glob("*.bin"))
    tokens = sum(len(sequence.ids) for sequence in many)
    assert 0 <= size - tokens * store.bytes_per_token() <= 3 * len(many) * (8 + 7)  # checksums, rounding up
    before = {file.name: file.read_bytes() for file in tmp_path.glob("*.bin")}
    more, last = fill(7).batch([0, 1]), fill(None).batch([0, 1])
    assert torch.equal(more.features_BTF, last.features_BTF) and last.top_ids_BTk is None
    assert more.top_ids_BTk is not None and more.top_ids_BTk.shape[2] == 7 and last.last_BTD.shape[2] == 32
    names = {f"layer1-{dtype}", f"layer3-{dtype}", f"last-{dtype}", "top5", "top7"}
    after = {file.name: file.read_bytes() for file in tmp_path.glob("*.bin")}
    assert {name.removesuffix("-00000.bin") for name in after} == names and before.items() <= after.items()


def test_the_doctor_counts_the_tokens_instead_of_the_state(healthy: SimpleNamespace) -> None:
    """Three layers of 32 fp32 numbers, and the last state or 7 ids and logits; normaliser and argmax are stored with them."""
    memory = ("features.store=memory", "features.folder=null")
    plain, sparse = healthy.subject(*memory), healthy.subject(*memory, "features.top_k=7")
    parts, fewer = (checks_costs.memory_parts(subject) for subject in (plain, sparse))
    tokens = 4 * max(len(row.cut.ids) for row in plain.rows)
    assert parts["features of a batch"] - fewer["features of a batch"] == tokens * (32 * 4 - 7 * 8)
    all_tokens = sum(len(row.cut.ids) for row in plain.rows)
    assert fewer["feature store"] == pytest.approx(all_tokens * (3 * 32 * 4 + 7 * 8 + 8), rel=1e-3)
    assert sparse.batch(sparse.drafter, [plain.rows[0].cut]).top_ids_BTk is not None


# ---- the run --------------------------------------------------------------------------------------------------------


def train(healthy: SimpleNamespace, folder: Path, *overrides: str) -> dict[str, Tensor]:
    run.train(read(healthy.config, ["optim.learning_rate=3e-3", f"output={folder}", *overrides]))
    return safetensors.torch.load_file(folder / "drafter" / "model.safetensors")


def test_a_run_learns_from_a_few_tokens_and_with_all_of_them_ends_as_with_the_last_state(
    healthy: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    online = ["features.store=online", "features.folder=null"]
    last = train(healthy, tmp_path / "last", *online)
    whole = train(healthy, tmp_path / "all", *online, "features.top_k=320")
    few = train(healthy, tmp_path / "few", *online, "features.top_k=4")
    disk = train(healthy, tmp_path / "disk", f"features.folder={tmp_path / 'features'}", "features.top_k=4")
    assert all(torch.equal(disk[name], few[name]) for name in few)
    floating = [name for name, tensor in last.items() if tensor.is_floating_point()]
    assert max(float((whole[n] - last[n]).abs().max() / last[n].abs().max()) for n in floating) < 1e-3
    assert max(float((few[n] - last[n]).abs().max() / last[n].abs().max()) for n in floating) > 1e-2
    metrics = [json.loads(line) for line in (tmp_path / "few" / "metrics.jsonl").read_text().splitlines()]
    assert max(line.get("accuracy/0", 0.0) for line in metrics) > 0


def test_batches_that_the_drafter_writes_are_captured_the_same_way(target: Target, sequences: list[Sequence]) -> None:
    ours = on_policy.batch(target, sequences, 3, 5)
    stored = FeatureStore(target, sequences, (), FeaturesConfig(top_k=5)).batch(range(len(sequences)), 3)
    for field in dataclasses.fields(TrainingBatch):
        a, b = getattr(ours, field.name), getattr(stored, field.name)
        if field.name == "layout":
            assert a.bounds == b.bounds
        else:
            assert a == b if isinstance(b, int) else torch.equal(a, b), field.name


def test_an_on_policy_run_trains_with_a_few_tokens(
    healthy: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    seen: list[int] = []
    plain = on_policy.batch

    def noting(*arguments: Any) -> TrainingBatch:
        batch = plain(*arguments)
        assert batch.top_ids_BTk is not None
        seen.append(batch.top_ids_BTk.shape[2])
        return batch

    monkeypatch.setattr(on_policy, "batch", noting)
    drafter = "drafter={kind: draft_lm, layers: [1], on_policy: 1.0}"
    train(healthy, tmp_path / "run", drafter, "features.store=online", "features.folder=null", "features.top_k=4")
    assert set(seen) == {4}


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", drafters.kinds())
def test_kinds_that_read_the_last_state_refuse_it_before_the_target_runs(
    kind: str, target: Target, sequences: list[Sequence], toy: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = toy.make_drafter(kind, target).feature_layers
    if kind not in READ_LAST:
        FeatureStore(target, sequences, layers, FeaturesConfig(top_k=4)).batch([0])
        return
    monkeypatch.setattr(features, "capture", lambda *_, **__: pytest.fail("the target ran"))
    with pytest.raises(ValueError, match="features.top_k is 4 .* last state, which this kind of drafter reads; leave"):
        make_batch(target, sequences, layers, 4)


def test_settings_that_cannot_work_are_refused(
    healthy: SimpleNamespace, target: Target, sequences: list[Sequence]
) -> None:
    with pytest.raises(ValueError, match="top_k is 0; give 1 or more"):
        FeaturesConfig(top_k=0)
    with pytest.raises(ValueError, match="features.top_k is 65 and the target has 64 tokens; give at most that many"):
        make_batch(target, sequences, LAYERS, 65)
    with pytest.raises(ValueError, match="features.top_k .* reverse_kl .*; leave top_k out, or give another diverg"):
        read(healthy.config, ["features.top_k=8", "drafter.loss={divergence: reverse_kl}"])
