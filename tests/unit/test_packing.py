"""Packing changes nothing: for every kind, texts one behind the other give the loss, the metrics and the gradients of texts padded
to rows of their own. And activation checkpointing changes nothing but the memory."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith import drafters
from draftsmith.drafters.base import LossParts, TrainableDrafter, TrainingBatch
from draftsmith.drafters.layout import Layout, rounded
from draftsmith.drafters.starts import Starts, element_numbers, start_numbers
from draftsmith.drafters.unpack import apart, one_per_row, together
from draftsmith.train import on_policy
from draftsmith.train.data import Sequence
from draftsmith.train.features import FeatureStore

TEXTS = [
    Sequence([5, 9, 3, 14, 8, 33, 2], [False, False, True, True, True, False, True]),
    Sequence([5, 9], [True, True]),
    Sequence([5, 9, 40, 12, 7, 21, 30, 11, 19, 2], [False] * 5 + [True] * 5),
    Sequence([7, 21, 30], [False, False, True]),
    Sequence([6, 6, 6, 6, 6], [False] * 5),
    Sequence([4, 3, 60, 17, 22, 9, 31, 8, 50, 12, 33, 41], [False] + [True] * 11),
]
THIN = {"loss": {"thin": 0.5}}
CASES: dict[str, tuple[str, dict[str, Any]]] = {kind: (kind, {}) for kind in drafters.kinds()} | {
    "eagle: noise, HASS, D-PACE": ("eagle", {"steps": 3, "noise": 0.3, "loss": {"weights": "dpace"}}),
    "eagle: thinned, detached": ("eagle", {"steps": 3, "detach": True, **THIN}),
    "eagle3: five steps, thinned": ("eagle3", {"steps": 5, "layers": [1, 2, 3], **THIN}),
    "eagle3: D-PACE": ("eagle3", {"steps": 3, "layers": [1, 2, 3], "loss": {"weights": "dpace"}}),
    "mtp: thinned": ("mtp", {"steps": 3, **THIN}),
    "p_eagle: deep, thinned": ("p_eagle", {"depth": 5, "num_layers": 3, "layers": [1, 2, 3], **THIN}),
    "dflash: few anchors": ("dflash", {"layers": [1, 2], "block_size": 4, "anchors": 3, "num_layers": 2}),
    "dflash: DSpark": (
        "dflash",
        {"layers": [1, 2], "block_size": 4, "anchor_predicts": True, "markov_rank": 4, "confidence_weight": 0.5},
    ),
    "hydra: prefix, D-PACE": ("hydra", {"prefix_attention": True, "loss": {"weights": "dpace"}}),
    "medusa: thinned": ("medusa", {"loss": {"thin": 0.8}}),
}


def make(toy: SimpleNamespace, kind: str, **changes: Any) -> TrainableDrafter:
    """fp64, with every weight random so that none of them hides anything."""
    model: TrainableDrafter = toy.make_drafter(kind, toy.make_target(), **changes)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.train()


def pack(drafter: TrainableDrafter, texts: list[Sequence] = TEXTS, epoch: int = 1) -> TrainingBatch:
    target: Any = drafter.target
    return FeatureStore(target, texts, drafter.feature_layers).batch(range(len(texts)), epoch)


def results(drafter: TrainableDrafter, batch: TrainingBatch) -> tuple[LossParts, dict[str, Tensor]]:
    drafter.zero_grad()
    parts = drafter(batch)
    parts.sum.backward()
    return parts, {name: p.grad.clone() for name, p in drafter.named_parameters() if p.grad is not None}


def assert_same(ours: tuple[LossParts, dict[str, Tensor]], expected: tuple[LossParts, dict[str, Tensor]]) -> None:
    (parts, gradients), (right, right_gradients) = ours, expected
    torch.testing.assert_close(parts.sum, right.sum, rtol=1e-10, atol=1e-10)
    assert float(right.sum.detach()) > 0 and torch.equal(parts.count, right.count)
    torch.testing.assert_close(parts.metrics, right.metrics, rtol=1e-10, atol=1e-10)
    assert gradients.keys() == right_gradients.keys() and len(gradients) > 0
    assert all(float(gradient.abs().sum()) > 0 for gradient in right_gradients.values())
    torch.testing.assert_close(gradients, right_gradients, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("case", CASES)
def test_packed_texts_train_as_padded_ones_do(toy: SimpleNamespace, case: str) -> None:
    kind, changes = CASES[case]
    drafter = make(toy, kind, **changes)
    packed = pack(drafter)
    padded = one_per_row(packed)
    assert packed.ids_BT.shape == (1, 39) and padded.ids_BT.shape == (6, 12)
    expected = results(drafter, padded)
    assert_same(results(drafter, packed), expected)
    assert_same(results(drafter, two_rows(packed)), expected)


def two_rows(packed: TrainingBatch) -> TrainingBatch:
    """The first three texts in one row, the others in another, with padding of rubbish behind them."""
    split = packed.layout.bounds[3][0]
    width = packed.ids_BT.shape[1] - split + 2

    def cut(tensor: Tensor) -> Tensor:
        rubbish = torch.ones_like(tensor[:, : width - split]) if tensor.dtype != torch.bool else tensor[:, :0]
        first = torch.cat([tensor[:, :split], rubbish], 1)
        second = torch.cat([tensor[:, split:], rubbish[:, :2]], 1)
        if tensor.dtype == torch.bool:
            first = torch.nn.functional.pad(tensor[:, :split], (0, width - split))
            second = torch.nn.functional.pad(tensor[:, split:], (0, 2))
        return torch.cat([first, second])

    changed = {
        field.name: cut(value)
        for field in dataclasses.fields(packed)
        if isinstance(value := getattr(packed, field.name), Tensor)
    }
    bounds = tuple(
        (begin, end) if end <= split else (begin + width - split, end + width - split)
        for begin, end in packed.layout.bounds
    )
    return TrainingBatch(
        **changed, epoch=packed.epoch, layout=Layout(changed["ids_BT"], changed["loss_mask_BT"], bounds)
    )


def test_tokens_chosen_by_a_reference_are_the_same(toy: SimpleNamespace, tmp_path: Path) -> None:
    target = toy.make_target()
    drafters.save(toy.make_drafter("draft_lm", target, seed=7), tmp_path / "reference")
    drafter = toy.make_drafter("draft_lm", target, reference=str(tmp_path / "reference"), keep=0.5).train()
    packed = pack(drafter)
    assert_same(results(drafter, packed), results(drafter, one_per_row(packed)))


def test_texts_that_the_draft_wrote_are_packed_too(toy: SimpleNamespace) -> None:
    drafter = make(toy, "draft_lm")
    texts = [text for text in TEXTS if sum(text.loss_mask[2:]) > 1]
    written = on_policy.write(drafter.eval(), drafter.target, texts, (0, 0, 0))
    packed = on_policy.batch(drafter.target, written, 0)
    assert packed.layout.bounds[-1][1] == sum(len(text.ids) for text in written)
    assert_same(results(drafter.train(), packed), results(drafter, one_per_row(packed)))


def test_what_is_drawn_for_a_text_does_not_depend_on_its_company(toy: SimpleNamespace) -> None:
    drafter = make(toy, "eagle3")
    packed, alone = pack(drafter), pack(drafter, TEXTS[2:3])
    begin, end = packed.layout.bounds[2]
    for numbers in (start_numbers, lambda batch: element_numbers(batch, 3)):
        # The last token's number depends on what follows it, and nothing is trained from there.
        assert torch.equal(numbers(packed)[:, begin : end - 1], numbers(alone)[:, :-1])


def test_texts_come_apart_and_together_again(toy: SimpleNamespace) -> None:
    batch = two_rows(pack(make(toy, "draft_lm")))
    values_BT = torch.arange(1.0, 1 + batch.ids_BT.numel()).view_as(batch.ids_BT)
    rows = apart(values_BT, batch)
    assert rows.shape == (6, 12) and (rows > 0).sum(1).tolist() == [len(text.ids) for text in TEXTS]
    assert torch.equal(together(rows, batch), values_BT * (batch.layout.text_N >= 0).view_as(values_BT))


@pytest.mark.parametrize("kind", drafters.kinds())
def test_activation_checkpointing_changes_no_bit_and_keeps_less(
    toy: SimpleNamespace, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = make(toy, kind)
    batch = pack(drafter, [Sequence(list(range(3, 43)), [False] * 3 + [True] * 37)] * 3)
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
    module = drafters.kind_module("medusa" if kind == "medusa2" else kind)
    distill = module.distill

    def outside(*arguments: Any, **named: Any) -> Any:  # what the loss keeps is the same either way
        hooks.__exit__()
        out = distill(*arguments, **named)
        hooks.__enter__()
        return out

    monkeypatch.setattr(module, "distill", outside)

    def run(recompute: bool) -> tuple[LossParts, dict[str, Tensor], int]:
        drafter.activation_checkpointing = recompute
        kept.clear()
        drafter.zero_grad()
        with hooks:
            parts = drafter(batch)
        parts.sum.backward()
        gradients = {name: p.grad.clone() for name, p in drafter.named_parameters() if p.grad is not None}
        return parts, gradients, sum(kept.values())

    plain, less = run(False), run(True)
    assert torch.equal(plain[0].sum, less[0].sum) and plain[1].keys() == less[1].keys()
    assert all(torch.equal(gradient, less[1][name]) for name, gradient in plain[1].items())
    assert less[2] < 0.9 * plain[2]


def test_products_on_a_cpu_have_few_sizes_and_little_more_work() -> None:
    assert [rounded(count) for count in (1, 64, 65, 600, 1024, 1025, 4000)] == [64, 64, 128, 640, 1024, 1152, 4096]
    sizes = [rounded(count) for count in range(1, 4097)]
    assert all(0 <= size - count < max(64, count / 8) for count, size in enumerate(sizes, 1))
    assert len(set(sizes)) == 8 + 8 * 3


def test_a_round_number_of_starts_repeats_the_last_one_and_each_is_found_among_them(toy: SimpleNamespace) -> None:
    batch = pack(make(toy, "eagle3"))
    active_BT = batch.layout.loss_mask_BT
    exact, filled = Starts.where(batch, active_BT), Starts.round_number(batch, active_BT)
    assert filled.count == 64 > exact.count and set(filled.place_n.tolist()) == set(exact.place_n.tolist())
    values_ND = torch.arange(39.0)[:, None].expand(-1, 2)
    assert torch.equal(exact.of(filled, filled.among_places(values_ND)), exact.among_places(values_ND))
    assert Starts.round_number(batch, torch.zeros_like(active_BT)).count == 0
