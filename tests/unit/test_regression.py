"""The linear guess of later states against plain least squares, and what a Medusa head makes of it."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from draftsmith import drafters
from draftsmith.drafters.base import TrainingBatch
from draftsmith.drafters.regression import RIDGE, later_states
from draftsmith.train import run
from draftsmith.train.data import Sequence
from draftsmith.train.features import FeatureStore

WIDTH = 5
LENGTHS = (9, 6, 12)


def make_batch(states: list[Tensor], masks: list[list[bool]]) -> TrainingBatch:
    """A right-padded batch; padding is filled with large numbers that nothing may read."""
    longest = max(map(len, states))
    last_BTD = torch.full((len(states), longest, WIDTH), 1e4)
    mask_BT = torch.zeros(len(states), longest, dtype=torch.bool)
    for row, (state_TD, mask) in enumerate(zip(states, masks, strict=True)):
        last_BTD[row, : len(state_TD)], mask_BT[row, : len(mask)] = state_TD, torch.tensor(mask)
    zeros_BT = torch.zeros(len(states), longest)
    return TrainingBatch(zeros_BT.long(), mask_BT, last_BTD[..., :0], last_BTD, zeros_BT, zeros_BT.long())


def random_parts(seed: int = 0) -> tuple[list[Tensor], list[list[bool]]]:
    generator = torch.Generator().manual_seed(seed)
    states = [torch.randn(length, WIDTH, generator=generator) for length in LENGTHS]
    return states, [[False] * 3 + [True] * (length - 3) for length in LENGTHS]


def test_the_maps_are_those_of_plain_least_squares() -> None:
    """|A h_p - h_(p+k)|² over starts whose drafted token p + k + 1 is supervised, plus λ |A - 1|² as rows of its own."""
    states, masks = random_parts()
    maps = later_states([make_batch(states, masks)], 3, WIDTH)
    for k, map_DD in enumerate(maps, start=1):
        here, later = [], []
        for state_TD, mask in zip(states, masks, strict=True):
            for p in range(len(mask) - k - 1):
                if mask[p + k + 1]:
                    here.append(state_TD[p].double())
                    later.append(state_TD[p + k].double())
        x_nD, y_nD = torch.stack(here), torch.stack(later)
        pull = (RIDGE * x_nD.square().mean() * len(x_nD)).sqrt() * torch.eye(WIDTH, dtype=torch.float64)
        solution = torch.linalg.lstsq(torch.cat([x_nD, pull]), torch.cat([y_nD, pull])).solution
        torch.testing.assert_close(map_DD.double(), solution.T, rtol=1e-4, atol=1e-4)


def test_a_linear_world_is_found() -> None:
    generator = torch.Generator().manual_seed(1)
    turn_DD = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=generator)).Q  # h_(p+1) = turn · h_p
    states = []
    for _ in range(20):
        rows = [torch.randn(WIDTH, generator=generator)]
        for _ in range(9):
            rows.append(turn_DD @ rows[-1])
        states.append(torch.stack(rows))
    one, two = later_states([make_batch(states, [[True] * 10] * 20)], 2, WIDTH)
    torch.testing.assert_close(one, turn_DD, rtol=0, atol=5e-3)
    torch.testing.assert_close(two, turn_DD @ turn_DD, rtol=0, atol=5e-3)


def test_batches_padding_and_unsupervised_places_change_nothing() -> None:
    states, masks = random_parts()
    together = later_states([make_batch(states, masks)], 2, WIDTH)
    alone = later_states([make_batch([s], [m]) for s, m in zip(states, masks, strict=True)], 2, WIDTH)
    states[0][0] += 100  # no first-depth start: the token two places later is not supervised
    moved = later_states([make_batch(states, masks)], 2, WIDTH)
    for a, b in zip(together, alone, strict=True):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(together[0], moved[0])


def test_without_data_they_are_the_identity() -> None:
    nothing = make_batch([torch.randn(4, WIDTH)], [[False] * 4])
    for batches in ([], [nothing]):
        for map_DD in later_states(batches, 2, WIDTH):
            assert torch.equal(map_DD, torch.eye(WIDTH))


@pytest.mark.parametrize("own_head", [True, False])
def test_medusa_starts_behind_the_linear_guess(toy: SimpleNamespace, own_head: bool) -> None:
    target = toy.make_target(dtype=torch.float32)
    sequences = [Sequence([5, 6, 7, 8, 9, 10, 11, 12][: 8 - i], [False] * 2 + [True] * (6 - i)) for i in range(3)]
    counts_V = torch.arange(target.shape.vocab_size)
    losses = {}
    for start in ("regression", "target"):
        settings = {"num_heads": 3, "draft_vocab_size": 40, "own_head": own_head, "initialise_head": start}
        drafter = drafters.build("medusa", settings, target.shape)
        batch = FeatureStore(target, sequences, drafter.feature_layers).batch([0, 1, 2])
        drafter.initialise(target, counts_V, [batch])
        losses[start] = drafter(batch).sum.item()
        maps = later_states([batch], 3, target.shape.hidden_size)
        for head, map_DD in zip(drafter.lm_heads, maps, strict=False):
            rows_WD = target.head_weight()[drafter.token_ids_W]
            expected_WD = rows_WD @ map_DD if start == "regression" else rows_WD
            torch.testing.assert_close(head.weight.detach(), expected_WD.detach())
    if own_head:  # fitted on the very tokens: far better than a head that predicts the wrong place
        assert losses["regression"] < 0.8 * losses["target"]
    else:
        assert losses["regression"] == losses["target"]


def test_a_run_fits_to_the_first_batches_that_hold_enough_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    class Store:
        sequences = [Sequence([1] * 6, [False] * 2 + [True] * 4) for _ in range(10)]

        def batch(self, indices: list[int]) -> list[int]:
            return indices

    monkeypatch.setattr(run, "FITTED_TOKENS", 17)
    found: Iterator[object] = run.some_batches(Store(), [[4, 2], [0, 1], [3, 5], [6, 7]])  # type: ignore[arg-type]
    assert list(found) == [[4, 2], [0, 1], [3, 5]]  # eight tokens each
