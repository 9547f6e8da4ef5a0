"""The distillation loss that all kinds share: draft states through draft heads against the target's laws (`divergences`).

Here is which draft state learns from which of the target's laws, and with which weight; `fused` computes it.

Where a draft position lives: the draft state at start p and depth j predicts token p + 2 + j. Its teacher is the target's
law at m = p + 1 + j, and it counts where the target itself generated token m + 1 (`starts`).

Depth j weighs `decay ** j`, or as much as acceptance depends on it (D-PACE). Deeper depths may be thinned: depth j is trained on a
share `thin ** j` of the starts with weights `1 / thin ** j`: the same expected gradient, at a fraction of the work.

Letters: J depths, B rows, T places of a row, N = B T, n places m of a teacher, r those of them that a depth is trained on, D width,
W draft vocabulary.
"""

import dataclasses
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from draftsmith.drafters import divergences
from draftsmith.drafters.base import LossParts, TargetHead, TrainingBatch
from draftsmith.drafters.fused import Teacher, fused
from draftsmith.drafters.layout import sent
from draftsmith.drafters.starts import Starts, supervised_rows, trained_starts


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LossConfig:
    divergence: divergences.Name = "kl"
    """How far the draft's law is from the target's (`drafters.divergences`). With ce the target's law is its likeliest token alone,
    for the overlap α as well."""
    eta: float = 3.0
    """Of lk: how soon acceptance itself takes over from KL (LK losses: 3, for Medusa 10)."""
    top_k_weight: float = 0.0
    """Weight of a further term on the target's `top_k` most likely tokens (HASS: 1)."""
    top_k: int = 10
    """Of that term."""
    weights: Literal["decay", "dpace"] = "decay"
    """decay: depth j weighs decay ** j. dpace: as much as the expected number of accepted tokens depends on it (D-PACE, arXiv
    2605.18810, with the overlap α in place of one token's probability)."""
    decay: float = 0.8
    """Of the weights decay."""
    smoothing: float = 0.5
    """Of dpace: a in (1 - a) α + a, so that depths behind a poor one are trained too."""
    thin: float = 1.0
    """Share of one depth's starts that the next depth is trained on: less work, the same expected gradient; 1 means all."""

    def __post_init__(self) -> None:
        for name in ("decay", "thin"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give a value above 0, at most 1")
        if not 0 <= self.smoothing <= 1:
            raise ValueError(f"smoothing is {self.smoothing}; give a value from 0 to 1")
        if not (self.eta >= 0 and self.top_k_weight >= 0 and self.top_k >= 1):
            raise ValueError("eta and top_k_weight must not be negative, top_k must be 1 or more")
        if self.divergence == "ce" and self.top_k_weight:
            raise ValueError(
                "top_k_weight adds nothing to divergence: ce, whose target is one token; give another divergence, or 0"
            )


class Distilled(NamedTuple):
    """What `distill` gives.

    Attributes:
        parts: sum, count and metrics; the metrics are J sums each: loss, correct, overlap, supervised, survived, starts.
        loss_JBT: the unweighted loss at every start and depth, 0 where there is none; without gradient.
        overlap_JBT: α there.
        weight_JBT: what each of these losses weighs in the sum, for terms of a kind's own; without gradient.
    """

    parts: LossParts
    loss_JBT: Tensor
    overlap_JBT: Tensor
    weight_JBT: Tensor


def distill(
    hidden: list[Tensor],
    heads: list[Tensor],
    batch: TrainingBatch,
    target: TargetHead,
    draft_to_target_W: Tensor | None,
    config: LossConfig,
    weight_JBT: Tensor | None = None,
    scale_JBT: Tensor | None = None,
    adjust_draft: bool = False,
) -> Distilled:
    """The loss of J draft depths against one frozen target.

    Args:
        hidden: J tensors (n_j, D), what goes into the draft head at the starts where depth j is trained, in order.
        heads: J weights (W, D), or one weight for all depths.
        batch: the training texts.
        target: whose law is learned; the rows of its head that belong to the draft vocabulary are read.
        draft_to_target_W: target id of each draft id; None if the vocabularies are the same.
        config: divergence and weights.
        weight_JBT: a further weight for every start and depth, 0 where it is not trained, on the host; None means those of
            `trained_starts`, thinned as the config says.
        scale_JBT: yet another one, which may be 0, on the device: for weights that are known only there.
        adjust_draft: the draft's logits are scaled and soft-capped as the target's are (its states stand for the target's).
    """
    depth, device, shape = len(hidden), batch.ids_BT.device, batch.ids_BT.shape
    if weight_JBT is None:
        weight_JBT = (
            trained_starts(batch, depth, config.thin) * config.thin ** -torch.arange(depth)[:, None, None].double()
        )
    starts = [Starts.where(batch, weight_BT > 0) for weight_BT in weight_JBT]
    teacher_n = supervised_rows(batch)
    rows = [torch.searchsorted(teacher_n, at.place_n + 1 + j) for j, at in enumerate(starts)]
    weights = [
        sent(weight_BT.flatten()[at.place_n].double(), device) for at, weight_BT in zip(starts, weight_JBT, strict=True)
    ]
    if scale_JBT is not None:
        weights = [at.pick(scale_BT) * w for at, scale_BT, w in zip(starts, scale_JBT, weights, strict=True)]

    def at_teachers(values_BTX: Tensor) -> Tensor:
        return values_BTX.flatten(0, 1).index_select(0, teacher_index_n)

    teacher_index_n = sent(teacher_n, device)
    head_VD = target.head_weight()
    teacher = Teacher(
        at_teachers(batch.last_BTD),
        at_teachers(batch.log_normaliser_BT),
        head_VD if draft_to_target_W is None else head_VD[draft_to_target_W],
        target.adjust_logits,
        _draft_ids(at_teachers(batch.argmax_BT), draft_to_target_W),
        _few_tokens(batch, at_teachers, draft_to_target_W, config.divergence == "ce"),
        adjust_draft,
    )
    diverge = divergences.choose(config.divergence, config.eta, config.top_k, config.top_k_weight)

    def grid(values: list[Tensor]) -> Tensor:
        """From the rows of each depth to starts."""
        return torch.stack([at.over_places(values_r) for at, values_r in zip(starts, values, strict=True)])

    if not torch.is_grad_enabled():  # else the gradients would be taken all the same
        hidden, heads = [x_rD.detach() for x_rD in hidden], [head.detach() for head in heads]
    if config.weights == "dpace":
        apart = [head.detach() for head in heads]
        _, first = fused([x_rD.detach() for x_rD in hidden], rows, weights, teacher, diverge, apart)
        importance_JN = _importance(grid(first["overlap"]), grid(weights), config.smoothing)
        weights = [at.among_places(x_N) * (w > 0) for at, x_N, w in zip(starts, importance_JN, weights, strict=True)]
    else:
        weights = [weight_r * config.decay**j for j, weight_r in enumerate(weights)]
    total, stats = fused(hidden, rows, weights, teacher, diverge, heads)
    trained_JN = (weight_JBT > 0).flatten(1).cumprod(0)
    alive_JN = grid(stats["correct"]).cumprod(0)

    def counts(values: list[int]) -> Tensor:
        return sent(torch.tensor(values, dtype=torch.float32), device)

    metrics = {
        "loss": torch.stack([loss_r.sum() for loss_r in stats["loss"]]),
        "correct": torch.stack([correct_r.sum() for correct_r in stats["correct"]]).float(),
        "overlap": torch.stack([overlap_r.sum() for overlap_r in stats["overlap"]]),
        "supervised": counts([at.count for at in starts]),
        "survived": alive_JN.sum(1).float(),
        "starts": counts(trained_JN.sum(1).tolist()),
    }
    count = torch.full((), float(len(teacher_n)), device=device)
    grids = (grid(values).unflatten(1, shape) for values in (stats["loss"], stats["overlap"], weights))
    return Distilled(LossParts(total, count, metrics), *grids)


def summarise(sums: dict[str, Tensor]) -> dict[str, float]:
    """Readable numbers from the metric sums of any number of batches.

    `accuracy/i` and `overlap_alpha/i` are teacher-forced (never called acceptance); `predicted_tau` is
    1 + Σ_i `survived/i`, the share of starts at which depths 0 to i are all right. Names that only some kinds have are J sums,
    reported as means.
    """
    further = sorted(sums.keys() - {"loss", "correct", "overlap", "supervised", "survived", "starts", "adapted_kl"})
    supervised_J, starts_J = sums["supervised"].clamp_min(1), sums["starts"].clamp_min(1)
    out = {"predicted_tau": 1 + float((sums["survived"] / starts_J).sum())}
    if "adapted_kl" in sums:  # kinds that adapt the target: how far it is from the original
        out["adapted_kl"] = float(sums["adapted_kl"] / supervised_J[0])
    for j in range(len(supervised_J)):
        out[f"loss/{j}"] = float(sums["loss"][j] / supervised_J[j])
        out[f"accuracy/{j}"] = float(sums["correct"][j] / supervised_J[j])
        out[f"overlap_alpha/{j}"] = float(sums["overlap"][j] / supervised_J[j])
        out[f"survived/{j}"] = float(sums["survived"][j] / starts_J[j])
        out |= {f"{name}/{j}": float(sums[name][j] / supervised_J[j]) for name in further}
    return out


def _draft_ids(target_ids: Tensor, draft_to_target_W: Tensor | None) -> Tensor:
    """Draft id of each target id, -1 where the draft vocabulary lacks it (the map is ascending)."""
    if draft_to_target_W is None:
        return target_ids
    index = torch.searchsorted(draft_to_target_W, target_ids).clamp_max(len(draft_to_target_W) - 1)
    return torch.where(draft_to_target_W[index] == target_ids, index, -1)


def _few_tokens(
    batch: TrainingBatch, at_teachers: Callable[[Tensor], Tensor], draft_to_target_W: Tensor | None, hard: bool
) -> tuple[Tensor, Tensor] | None:
    """Draft ids and log-probabilities (n, k) of the only tokens that the target's law is on; None if it is on all."""
    if hard:
        ids_nk = at_teachers(batch.argmax_BT)[:, None]
        return _draft_ids(ids_nk, draft_to_target_W), torch.zeros_like(ids_nk, dtype=batch.log_normaliser_BT.dtype)
    if batch.top_ids_BTk is None or batch.top_logits_BTk is None:
        return None
    log_probs_nk = at_teachers(batch.top_logits_BTk) - at_teachers(batch.log_normaliser_BT)[:, None]
    return _draft_ids(at_teachers(batch.top_ids_BTk).long(), draft_to_target_W), log_probs_nk


def _importance(overlap_JN: Tensor, weight_JN: Tensor, smoothing: float) -> Tensor:
    """D-PACE's weights (J, N): Σ_{m ≥ j} w_m Π_{i ≤ m} a_i over trained depths, with a = (1 - smoothing) α + smoothing. The w_m
    are 1, or more where depths are thinned: the sum is then right on average."""
    chance_JN = torch.where(weight_JN > 0, (1 - smoothing) * overlap_JN + smoothing, 1.0)
    return (chance_JN.cumprod(0) * weight_JN).flip(0).cumsum(0).flip(0)
