"""What no drafter's training loss may depend on: padding, how sequences share batches, and what the target says on prompts."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith import drafters
from draftsmith.drafters.base import TrainableDrafter, TrainingBatch
from draftsmith.drafters.unpack import one_per_row
from draftsmith.train.data import Sequence
from draftsmith.train.features import FeatureStore

SEQUENCES = [
    Sequence([5, 9, 3, 14, 8, 33, 2], [False, False, True, True, True, False, True]),
    Sequence([5, 9, 40, 12, 7, 21, 30, 11, 19, 2], [False] * 5 + [True] * 5),
    Sequence([4, 3, 60, 17], [False, True, True, True]),
]


@pytest.fixture(params=drafters.kinds())
def drafter(request: pytest.FixtureRequest, toy: SimpleNamespace) -> TrainableDrafter:
    """Every kind, fp64, with every weight random so that none of them hides anything."""
    model = toy.make_drafter(request.param, toy.make_target())
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def make_batch(drafter: TrainableDrafter, sequences: list[Sequence]) -> TrainingBatch:
    target: Any = drafter.target
    return one_per_row(FeatureStore(target, sequences, drafter.feature_layers).batch(range(len(sequences))))


def loss_and_gradients(drafter: TrainableDrafter, *batches: TrainingBatch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    drafter.zero_grad()
    total, count = torch.zeros((), dtype=torch.float64), torch.zeros(())
    for batch in batches:
        parts = drafter(batch)
        parts.sum.backward()
        total, count = total + parts.sum.detach(), count + parts.count
    gradients = {name: p.grad for name, p in drafter.named_parameters() if p.grad is not None}
    assert gradients and all(float(gradient.abs().sum()) > 0 for gradient in gradients.values())
    return total, count, gradients


def assert_same(ours: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)


def pad_with_garbage(batch: TrainingBatch, columns: int) -> TrainingBatch:
    """More padding, of values that would be seen; the mask alone says that it is padding."""
    generator = torch.Generator().manual_seed(5)

    def pad(tensor: Tensor) -> Tensor:
        shape = (tensor.shape[0], columns, *tensor.shape[2:])
        if tensor.dtype == torch.bool:
            garbage = torch.zeros(shape, dtype=torch.bool)
        elif tensor.dtype == torch.int64:
            garbage = torch.randint(0, 60, shape, generator=generator)
        else:
            garbage = torch.randn(shape, generator=generator, dtype=tensor.dtype) * 5
        return torch.cat([tensor, garbage], 1)

    fields = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    return TrainingBatch(**{name: pad(value) for name, value in fields.items() if isinstance(value, Tensor)})


@pytest.mark.parametrize("columns", [1, 7])
def test_padding_changes_neither_loss_nor_gradients(drafter: TrainableDrafter, columns: int) -> None:
    batch = make_batch(drafter, SEQUENCES)
    expected = loss_and_gradients(drafter, batch)
    assert_same(loss_and_gradients(drafter, pad_with_garbage(batch, columns)), expected)


def test_a_batch_is_the_sum_of_its_sequences_one_by_one(drafter: TrainableDrafter) -> None:
    together = loss_and_gradients(drafter, make_batch(drafter, SEQUENCES))
    alone = loss_and_gradients(drafter, *(make_batch(drafter, [sequence]) for sequence in SEQUENCES))
    assert_same(alone, together)


def teachers(batch: TrainingBatch) -> Tensor:
    """Where the target's law teaches: the position before each supervised token, the first token aside."""
    taught_BT = torch.zeros_like(batch.loss_mask_BT)
    taught_BT[:, 1:-1] = batch.loss_mask_BT[:, 2:]
    return taught_BT


def with_other_teachers(batch: TrainingBatch, where_BT: Tensor) -> TrainingBatch:
    """The batch with the target's law turned into another one at some positions."""
    return dataclasses.replace(
        batch,
        last_BTD=torch.where(where_BT[..., None], -3 * batch.last_BTD, batch.last_BTD),
        log_normaliser_BT=torch.where(where_BT, batch.log_normaliser_BT + 2, batch.log_normaliser_BT),
        argmax_BT=torch.where(where_BT, (batch.argmax_BT + 1) % 60, batch.argmax_BT),
    )


def test_what_the_target_would_say_on_prompt_tokens_has_no_influence(
    drafter: TrainableDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = make_batch(drafter, SEQUENCES)
    if (
        "last" in drafter.feature_layers and not drafter.adapts_target  # which reads its own states instead
    ):  # the same state is also an input there: keep the input, change the teacher only
        kept = batch.last_BTD
        plain = type(drafter).forward
        module = drafters.kind_module(type(drafter).__module__.rsplit(".", 1)[-1])
        original = module.distill

        def forward(self: TrainableDrafter, batch: TrainingBatch) -> Any:
            monkeypatch.setattr(module, "distill", lambda h, w, _b, *a, **k: original(h, w, batch, *a, **k))
            return plain(self, dataclasses.replace(batch, last_BTD=kept))

        monkeypatch.setattr(type(drafter), "forward", forward)
    loss, count, gradients = loss_and_gradients(drafter, batch)
    taught_BT = teachers(batch)
    prompt_changed = loss_and_gradients(drafter, with_other_teachers(batch, ~taught_BT))
    assert torch.equal(prompt_changed[0], loss) and torch.equal(prompt_changed[1], count)
    assert all(torch.equal(prompt_changed[2][name], gradient) for name, gradient in gradients.items())
    one_BT = torch.zeros_like(taught_BT)
    one_BT[0, 5] = True  # teaches the last token of the first sequence
    assert not torch.isclose(loss_and_gradients(drafter, with_other_teachers(batch, one_BT))[0], loss)
