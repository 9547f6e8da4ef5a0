"""The distillation loss against its plain definition, written out token by token in fp64, and against numbers worked by hand.

Letters: J depths, B sequences, T positions, D width, V target vocabulary, W draft vocabulary.
"""

import dataclasses
import itertools
import math
import typing
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.drafters import fused, losses, starts
from draftsmith.drafters.base import TrainingBatch
from draftsmith.drafters.divergences import Name
from draftsmith.drafters.losses import LossConfig

WIDTH, VOCAB = 6, 11
KEPT_W = torch.tensor([0, 2, 3, 7, 10])


class Head:
    """A target that is a head alone; `cap` is Gemma's soft-capping."""

    def __init__(self, weight_VD: Tensor, cap: float | None = None) -> None:
        self.weight, self.cap = weight_VD, cap

    def head_weight(self) -> Tensor:
        return self.weight

    def adjust_logits(self, logits: Tensor) -> Tensor:
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)

    def logits(self, last: Tensor) -> Tensor:
        return self.adjust_logits(last @ self.weight.T)


def random_batch(head: Head, mask: list[list[bool]], seed: int = 0) -> TrainingBatch:
    generator = torch.Generator().manual_seed(seed)
    shape = (len(mask), len(mask[0]))
    last_BTD = torch.randn(*shape, WIDTH, dtype=torch.float64, generator=generator) * 2
    logits_BTV = head.logits(last_BTD)
    return TrainingBatch(
        ids_BT=torch.randint(0, VOCAB, shape, generator=generator),
        loss_mask_BT=torch.tensor(mask),
        features_BTF=torch.zeros(*shape, 0),
        last_BTD=last_BTD,
        log_normaliser_BT=logits_BTV.logsumexp(-1),
        argmax_BT=logits_BTV.argmax(-1),
    )


def distill(
    hidden: list[Tensor], heads: list[Tensor], batch: TrainingBatch, *rest: Any, **options: Any
) -> losses.Distilled:
    """`losses.distill` of states on a grid (B, T, D)."""
    config = next(value for value in rest if isinstance(value, LossConfig))
    trained_JBT = starts.trained_starts(batch, len(hidden), config.thin)
    rows = [grid_BTD[trained_BT] for grid_BTD, trained_BT in zip(hidden, trained_JBT, strict=True)]
    return losses.distill(rows, heads, batch, *rest, **options)


def definition(config: LossConfig, target_V: Tensor, draft_V: Tensor) -> Tensor:
    """One row's loss from both laws over the whole vocabulary, as the papers write it; the draft's is 0 where it cannot go."""

    def log(probs_V: Tensor) -> Tensor:
        return torch.where(probs_V > 0, probs_V.clamp_min(1e-300), 1.0).log()

    def divergence(p_V: Tensor, q_V: Tensor) -> Tensor:
        return (p_V * (log(p_V) - log(q_V))).sum()

    alpha, middle_V = torch.minimum(target_V, draft_V).sum(), (target_V + draft_V) / 2
    cross = -(target_V * log(draft_V)).sum()
    share = torch.exp(-config.eta * alpha.detach())
    inside_V = torch.where(draft_V > 0, target_V, 0.0)
    best_k = inside_V.topk(config.top_k).indices
    return {
        "kl": cross,
        "ce": cross,
        "reverse_kl": divergence(draft_V, target_V),
        "jsd": (divergence(target_V, middle_V) + divergence(draft_V, middle_V)) / 2,
        "tv": (target_V - draft_V).abs().sum() / 2,
        "nla": -alpha.log(),
        "lk": share * cross + (1 - share) * (1 - alpha),
    }[config.divergence] - config.top_k_weight * (target_V[best_k] * log(draft_V[best_k])).sum()


def plain_loss(
    hidden: list[Tensor],
    heads: list[Tensor],
    batch: TrainingBatch,
    head: Head,
    kept: list[int],
    config: LossConfig,
    adjust_draft: bool = False,
) -> tuple[Tensor, Tensor]:
    """One token at a time: token m + 1 is learned from start p = m - 1 - j. The loss, and α of every start and depth."""
    rows: dict[tuple[int, int, int], Tensor] = {}
    alpha_JBT = torch.zeros(len(hidden), *batch.ids_BT.shape, dtype=torch.float64)
    for b, t in itertools.product(*map(range, batch.ids_BT.shape)):
        for j in range(len(hidden)):
            m, p = t - 1, t - 2 - j
            if not batch.loss_mask_BT[b, t] or p < 0:
                continue
            target_V = torch.softmax(head.logits(batch.last_BTD[b, m]), -1)
            if config.divergence == "ce":
                target_V = torch.nn.functional.one_hot(target_V.argmax(), VOCAB).double()
            logits_W = (heads[j] if len(heads) > 1 else heads[0]) @ hidden[j][b, p]
            draft_W = torch.softmax(head.adjust_logits(logits_W) if adjust_draft else logits_W, -1)
            draft_V = torch.zeros(VOCAB, dtype=torch.float64).index_copy(0, torch.tensor(kept), draft_W)
            rows[j, b, p] = definition(config, target_V, draft_V)
            alpha_JBT[j, b, p] = torch.minimum(target_V, draft_V).sum().detach()
    total = torch.zeros((), dtype=torch.float64)
    for (j, b, p), loss in rows.items():
        weight = config.decay**j
        if config.weights == "dpace":
            weight = 0.0
            for m in range(j, len(hidden)):
                if (m, b, p) in rows:
                    before = [i for i in range(m + 1) if (i, b, p) in rows]
                    weight += math.prod(
                        (1 - config.smoothing) * float(alpha_JBT[i, b, p]) + config.smoothing for i in before
                    )
        total = total + weight * loss
    return total, alpha_JBT


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"decay": 0.0}, "decay is 0.0; give a value above 0, at most 1"),
        ({"smoothing": 1.5}, "smoothing is 1.5; give a value from 0 to 1"),
        ({"top_k": 0}, "top_k must be 1 or more"),
        ({"divergence": "ce", "top_k_weight": 0.1}, "top_k_weight adds nothing to divergence: ce"),
    ],
    ids=str,
)
def test_a_setting_that_cannot_work_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LossConfig(**settings)


def test_dpace_s_weights_are_right_on_average_over_which_depths_are_thinned_away() -> None:
    """Depth m is trained at a share thin ** m of the starts, nested, and weighs thin ** -m there."""
    thin, overlap_J11 = 0.5, torch.tensor([0.7, 0.4, 0.9], dtype=torch.float64)[:, None, None]
    everywhere_J11 = torch.ones_like(overlap_J11)
    full_J = losses._importance(overlap_J11, everywhere_J11, 0.2)[:, 0, 0]
    mean_J = torch.zeros(3, dtype=torch.float64)
    for depths in (1, 2, 3):  # how many of them a start keeps
        chance = thin ** (depths - 1) * (1 - thin if depths < 3 else 1)
        weight_J11 = (
            everywhere_J11 * thin ** -torch.arange(3.0)[:, None, None] * (torch.arange(3) < depths)[:, None, None]
        )
        kept_J = (weight_J11 > 0)[:, 0, 0]
        mean_J += chance * losses._importance(overlap_J11, weight_J11, 0.2)[:, 0, 0] * kept_J
    torch.testing.assert_close(mean_J, full_J, rtol=1e-12, atol=0)


CONFIGS = [
    *(LossConfig(divergence=name, decay=0.75) for name in typing.get_args(Name)),
    LossConfig(top_k_weight=0.7, top_k=3),
    LossConfig(divergence="lk", eta=10.0, top_k_weight=0.3, top_k=2),
    LossConfig(weights="dpace"),
    LossConfig(divergence="ce", weights="dpace", smoothing=0.2),
]


@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize(
    "config", CONFIGS, ids=lambda config: f"{config.divergence}-{config.weights}-{config.top_k_weight}"
)
@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("num_heads", [1, 3])
@pytest.mark.parametrize("rows_per_chunk", [1, 3, 1000])
def test_loss_and_gradients_equal_the_plain_definition(
    monkeypatch: pytest.MonkeyPatch,
    cap: float | None,
    config: LossConfig,
    reduced: bool,
    num_heads: int,
    rows_per_chunk: int,
) -> None:
    torch.manual_seed(1)
    head = Head(torch.randn(VOCAB, WIDTH, dtype=torch.float64), cap)
    kept_W = KEPT_W if reduced else torch.arange(VOCAB)
    monkeypatch.setattr(fused, "CHUNK_ELEMENTS", rows_per_chunk * len(kept_W))
    batch = random_batch(head, [[False, True, True, False, True, True, True], [True] * 3 + [False] * 4])
    hidden = [torch.randn(2, 7, WIDTH, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    heads = [torch.randn(len(kept_W), WIDTH, dtype=torch.float64, requires_grad=True) for _ in range(num_heads)]

    parts, loss_JBT, overlap_JBT, weight_JBT = distill(hidden, heads, batch, head, kept_W if reduced else None, config)
    got = torch.autograd.grad(3.0 * parts.sum, [*hidden, *heads])  # times 3: the incoming gradient is used
    expected_sum, alpha_JBT = plain_loss(hidden, heads, batch, head, kept_W.tolist(), config)
    expected = torch.autograd.grad(3.0 * expected_sum, [*hidden, *heads])

    torch.testing.assert_close(parts.sum, expected_sum, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(overlap_JBT, alpha_JBT, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close((loss_JBT * weight_JBT).sum(), expected_sum.detach(), rtol=1e-11, atol=1e-11)
    for ours, plain in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-11, atol=1e-11)
    assert float(parts.count) == 5  # tokens 2, 4, 5, 6 of the first sequence and 2 of the second


@pytest.mark.parametrize("config", [CONFIGS[0], LossConfig(divergence="lk", weights="dpace")], ids=["kl", "lk"])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_draft_behind_the_targets_own_head_is_soft_capped_as_the_target_is(config: LossConfig, frozen: bool) -> None:
    torch.manual_seed(1)
    head = Head(torch.randn(VOCAB, WIDTH, dtype=torch.float64), 1.5)
    batch = random_batch(head, [[False, True, True, False, True, True, True], [True] * 3 + [False] * 4])
    hidden = [torch.randn(2, 7, WIDTH, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    shared_WD = head.weight[KEPT_W].requires_grad_(not frozen)
    trained = hidden if frozen else [*hidden, shared_WD]

    parts = distill(hidden, [shared_WD], batch, head, KEPT_W, config, adjust_draft=True).parts
    expected_sum, _ = plain_loss(hidden, [shared_WD], batch, head, KEPT_W.tolist(), config, adjust_draft=True)
    torch.testing.assert_close(parts.sum, expected_sum, rtol=1e-11, atol=1e-11)
    for ours, plain in zip(
        torch.autograd.grad(parts.sum, trained), torch.autograd.grad(expected_sum, trained), strict=True
    ):
        torch.testing.assert_close(ours, plain, rtol=1e-11, atol=1e-11)
    uncapped = distill(hidden, [shared_WD], batch, head, KEPT_W, config).parts
    assert not torch.isclose(uncapped.sum, parts.sum)


def test_loss_in_half_precision_heads_stays_close_to_the_plain_definition() -> None:
    torch.manual_seed(1)
    weight_VD = torch.randn(VOCAB, WIDTH).bfloat16()
    head = Head(weight_VD.double())
    batch = random_batch(head, [[False, False, True, True, True]])
    batch = TrainingBatch(
        batch.ids_BT,
        batch.loss_mask_BT,
        batch.features_BTF,
        batch.last_BTD.bfloat16(),
        head.logits(batch.last_BTD.bfloat16().double()).logsumexp(-1).float(),
        batch.argmax_BT,
    )
    hidden = [torch.randn(1, 5, WIDTH, requires_grad=True)]
    trained_WD = torch.randn(VOCAB, WIDTH, requires_grad=True)
    parts = distill(hidden, [trained_WD], batch, Head(weight_VD), None, LossConfig(decay=1.0)).parts
    wide = TrainingBatch(
        batch.ids_BT,
        batch.loss_mask_BT,
        batch.features_BTF,
        batch.last_BTD.double(),
        batch.log_normaliser_BT,
        batch.argmax_BT,
    )
    expected = plain_loss(
        [hidden[0].double()], [trained_WD.double()], wide, head, list(range(VOCAB)), LossConfig(decay=1.0)
    )[0]
    assert parts.sum.dtype == torch.float32
    assert float(parts.sum.detach()) == pytest.approx(float(expected.detach()), rel=0.02)


# Two turns, positions 0 to 6: prompt 0 and 1, answer 2, 3 and 4, prompt 5, answer 6.
TWO_TURNS = [False, False, True, True, True, False, True]
SUPERVISED_STARTS = {0: {0, 1, 2, 4}, 1: {0, 1, 3}, 2: {0, 2}}
"""By hand: start p at depth j predicts token p + 2 + j, so depth 0 learns 2, 3, 4, 6 from 0, 1, 2, 4, and so on."""


def test_supervised_positions_are_those_written_by_hand_for_two_turns() -> None:
    torch.manual_seed(2)
    head = Head(torch.randn(VOCAB, WIDTH, dtype=torch.float64))
    batch = random_batch(head, [TWO_TURNS])
    hidden = [torch.randn(1, 7, WIDTH, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    parts = distill(
        hidden, [torch.randn(VOCAB, WIDTH, dtype=torch.float64)], batch, head, None, LossConfig(decay=0.8)
    ).parts
    parts.sum.backward()
    touched = {j: {p for p in range(7) if h.grad[0, p].abs().sum() > 0} for j, h in enumerate(hidden)}
    assert touched == SUPERVISED_STARTS
    assert parts.metrics["supervised"].tolist() == [4, 3, 2]


def hand_example(decay: float = 1.0) -> tuple[Any, TrainingBatch, list[Tensor], Tensor]:
    """Four tokens; the head is the identity, so a hidden vector is its logits. The target says .7 for token 1, .1 else."""
    law = torch.tensor([0.1, 0.7, 0.1, 0.1], dtype=torch.float64)
    head = Head(torch.eye(4, dtype=torch.float64))
    batch = TrainingBatch(
        ids_BT=torch.ones(1, 7, dtype=torch.int64),
        loss_mask_BT=torch.tensor([TWO_TURNS]),
        features_BTF=torch.zeros(1, 7, 0),
        last_BTD=law.log().expand(1, 7, 4),
        log_normaliser_BT=torch.zeros(1, 7, dtype=torch.float64),
        argmax_BT=torch.ones(1, 7, dtype=torch.int64),
    )
    right, wrong = torch.tensor([0.0, 1.0, 0.0, 0.0]), torch.tensor([1.0, 0.0, 0.0, 0.0])
    hidden = [wrong.double().repeat(1, 7, 1) for _ in range(3)]
    for j, p in [(0, 0), (0, 1), (0, 4), (1, 0), (1, 3), (2, 0), (2, 2)]:  # the starts at which the draft is right
        hidden[j][0, p] = right.double()
    return head, batch, hidden, torch.eye(4, dtype=torch.float64)


def test_metrics_are_those_counted_by_hand() -> None:
    head, batch, hidden, weight = hand_example()
    metrics = distill(hidden, [weight], batch, head, None, LossConfig(decay=1.0)).parts.metrics
    assert metrics["correct"].tolist() == [3, 2, 2]
    # Starts whose depths 0 to j are all supervised: {0, 1, 2, 4}, {0, 1}, {0}; of these still right: {0, 1, 4}, {0}, {0}.
    assert metrics["starts"].tolist() == [4, 2, 1]
    assert metrics["survived"].tolist() == [3, 1, 1]
    assert losses.summarise(metrics)["predicted_tau"] == pytest.approx(1 + 3 / 4 + 1 / 2 + 1)
    assert losses.summarise(metrics)["accuracy/1"] == pytest.approx(2 / 3)

    likely, other = (
        math.e / (math.e + 3),
        1 / (math.e + 3),
    )  # the draft's law: softmax of (1, 0, 0, 0), about .475 and .175
    right = min(likely, 0.7) + 3 * min(other, 0.1)
    wrong = min(likely, 0.1) + min(other, 0.7) + 2 * min(other, 0.1)
    assert metrics["overlap"].tolist() == pytest.approx([3 * right + wrong, 2 * right + wrong, 2 * right])
    entropy = {
        True: -0.7 * math.log(likely) - 0.3 * math.log(other),
        False: -0.1 * math.log(likely) - 0.9 * math.log(other),
    }
    expected = [3 * entropy[True] + entropy[False], 2 * entropy[True] + entropy[False], 2 * entropy[True]]
    assert metrics["loss"].tolist() == pytest.approx(expected)


def test_a_guess_in_a_reduced_vocabulary_is_right_only_if_the_map_leads_to_the_targets_token() -> None:
    head = Head(torch.eye(4, dtype=torch.float64))
    batch = hand_example()[1]
    kept_W = torch.tensor([1, 3])
    hidden = [
        torch.tensor([2.0, 0.0], dtype=torch.float64).repeat(1, 7, 1)
    ]  # draft id 0 is token 1, the target's choice
    metrics = distill(
        hidden, [torch.eye(2, dtype=torch.float64)], batch, head, kept_W, LossConfig(decay=1.0)
    ).parts.metrics
    assert metrics["correct"].tolist() == [4]
    hidden = [torch.tensor([0.0, 2.0], dtype=torch.float64).repeat(1, 7, 1)]  # draft id 1 is token 3
    metrics = distill(
        hidden, [torch.eye(2, dtype=torch.float64)], batch, head, kept_W, LossConfig(decay=1.0)
    ).parts.metrics
    assert metrics["correct"].tolist() == [0]


@pytest.mark.parametrize("mask", [[False] * 5, [True, True, False, False, False]])
def test_a_batch_without_supervised_tokens_gives_a_zero_loss_that_still_backpropagates(mask: list[bool]) -> None:
    head = Head(torch.randn(VOCAB, WIDTH, dtype=torch.float64))
    batch = random_batch(head, [mask])
    hidden = [torch.randn(1, 5, WIDTH, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    weight = torch.randn(VOCAB, WIDTH, dtype=torch.float64, requires_grad=True)
    parts = distill(hidden, [weight], batch, head, None, LossConfig(decay=0.8)).parts
    parts.sum.backward()
    assert float(parts.sum.detach()) == 0 and float(parts.count) == 0
    assert all(torch.equal(t.grad, torch.zeros_like(t)) for t in [*hidden, weight])
    assert all(math.isfinite(value) for value in losses.summarise(parts.metrics).values())


def test_a_sequence_of_one_token_has_nothing_to_learn_and_does_not_fail() -> None:
    head = Head(torch.randn(VOCAB, WIDTH, dtype=torch.float64))
    batch = random_batch(head, [[True]])
    hidden = [torch.randn(1, 1, WIDTH, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    parts = distill(
        hidden, [torch.randn(VOCAB, WIDTH, dtype=torch.float64)], batch, head, None, LossConfig(decay=0.8)
    ).parts
    parts.sum.backward()
    assert float(parts.sum.detach()) == 0 and float(parts.count) == 0


def test_metric_sums_of_two_batches_summarise_like_one() -> None:
    head, batch, hidden, weight = hand_example()
    once = distill(hidden, [weight], batch, head, None, LossConfig(decay=1.0)).parts.metrics
    twice = {name: value + value for name, value in once.items()}
    assert losses.summarise(twice) == pytest.approx(losses.summarise(once))


def thin_batch(head: Head) -> TrainingBatch:
    return random_batch(head, [[False, False] + [True] * 28, [False] * 10 + [True] * 12 + [False] * 8])


def test_thinned_depths_are_nested_shares_of_the_starts() -> None:
    head = Head(torch.randn(VOCAB, WIDTH, dtype=torch.float64))
    batch = random_batch(head, [[False, False] + [True] * 998] * 4)
    full_JBT, thin_JBT = starts.trained_starts(batch, 3), starts.trained_starts(batch, 3, 0.5)
    assert torch.equal(full_JBT[0], thin_JBT[0])
    assert not (thin_JBT & ~full_JBT).any()
    assert not (thin_JBT[2, :, :-3] & ~thin_JBT[1, :, :-3]).any()
    for j, share in enumerate((1.0, 0.5, 0.25)):
        assert float(thin_JBT[j].sum() / full_JBT[j].sum()) == pytest.approx(share, abs=0.03)
    other_JBT = starts.trained_starts(dataclasses.replace(batch, epoch=1), 3, 0.5)
    assert float((other_JBT & thin_JBT)[1].sum() / thin_JBT[1].sum()) == pytest.approx(0.5, abs=0.05)


def test_a_thinned_loss_is_the_plain_one_over_the_kept_starts_with_larger_weights() -> None:
    torch.manual_seed(3)
    head = Head(torch.randn(VOCAB, WIDTH, dtype=torch.float64))
    batch, thin, decay = thin_batch(head), 0.5, 0.8
    hidden = [torch.randn(2, 30, WIDTH, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    weight_WD = torch.randn(VOCAB, WIDTH, dtype=torch.float64, requires_grad=True)
    parts = distill(hidden, [weight_WD], batch, head, None, LossConfig(decay=decay, thin=thin)).parts
    total = torch.zeros((), dtype=torch.float64)
    for j, b, p in starts.trained_starts(batch, 3, thin).nonzero().tolist():
        target_probs_V = torch.softmax(head.logits(batch.last_BTD[b, p + 1 + j]), -1)
        log_probs_V = torch.log_softmax(weight_WD @ hidden[j][b, p], -1)
        total = total - (decay / thin) ** j * (target_probs_V * log_probs_V).sum()
    torch.testing.assert_close(parts.sum, total, rtol=1e-12, atol=1e-12)
    got, expected = (torch.autograd.grad(value, [*hidden, weight_WD]) for value in (parts.sum, total))
    for ours, plain in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-11, atol=1e-12)
    assert parts.metrics["supervised"].tolist() == starts.trained_starts(batch, 3, thin).sum((1, 2)).tolist()


def test_starts_find_what_stands_at_them_in_whatever_order_it_is_kept() -> None:
    active_BT = torch.tensor([[False, True, True, False, True], [False, False, False, True, False]])
    batch = random_batch(Head(torch.randn(VOCAB, WIDTH, dtype=torch.float64)), [[True] * 5] * 2)
    some = starts.Starts.where(batch, active_BT)
    x_BTD = torch.randn(2, 5, 3)
    picked_nD = some.pick(x_BTD)
    assert torch.equal(picked_nD, x_BTD[active_BT])
    assert torch.equal(some.over_places(picked_nD).view_as(x_BTD), x_BTD * active_BT[..., None])
    assert some.position_n.tolist() == [1, 2, 4, 3]
    assert torch.equal(some.ids_at(-1), batch.ids_BT[:, :-1][active_BT[:, 1:]])
    fewer = starts.Starts.where(batch, active_BT & torch.tensor([True, True, False, True, True]))
    assert torch.equal(fewer.of(some, picked_nD), fewer.pick(x_BTD))
