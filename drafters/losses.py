"""The distillation loss that all kinds share: draft states through draft heads against the target's laws (`divergences`).

Neither model's logits exist for all positions at once: rows are handled in chunks, hidden → head → loss → gradient, and
the gradient is taken in the forward pass (the idea of Liger kernels, Hsu et al. 2024, arXiv 2410.10989).

Where a draft position lives: the draft state at start p and depth j predicts token p + 2 + j. Its teacher is the target's
law at m = p + 1 + j, and it counts where the target itself generated token m + 1 (`starts`).

Depth j weighs `decay ** j`, or as much as acceptance depends on it (D-PACE). Deeper depths may be thinned: depth j is trained on a
share `thin ** j` of the starts with weights `1 / thin ** j`: the same expected gradient, at a fraction of the work.

Letters: J depths, B sequences, T positions, n supervised rows (b, m), c rows of a chunk, r those of them that a depth is trained
on, D width, W draft vocabulary.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from draftsmith.drafters import divergences
from draftsmith.drafters.base import LossParts, TargetHead, TrainingBatch
from draftsmith.drafters.divergences import Divergence, Laws
from draftsmith.drafters.starts import supervised_rows, trained_starts

CHUNK_ELEMENTS = 1 << 23
"""Rows per chunk are this many logits divided by W: bounds the memory, and large enough that adding up the gradient of a head
costs little (on two CPU cores at W = 8,192 twice this is as fast, half of it slower where each depth has its own head)."""


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
    adjust_draft: bool = False,
) -> Distilled:
    """The loss of J draft depths against one frozen target.

    Args:
        hidden: J tensors (B, T, D), what goes into the draft head at start p (untrained starts are ignored).
        heads: J weights (W, D), or one weight for all depths.
        batch: the training sequences.
        target: whose law is learned; the rows of its head that belong to the draft vocabulary are read.
        draft_to_target_W: target id of each draft id; None if the vocabularies are the same.
        config: divergence and weights.
        weight_JBT: a further weight for every start and depth, 0 where it is not trained; None means those of `trained_starts`,
            thinned as the config says.
        adjust_draft: the draft's logits are scaled and soft-capped as the target's are (its states stand for the target's).
    """
    rows_n, columns_n = supervised_rows(batch)
    depth, device = len(hidden), columns_n.device
    depth_J1 = torch.arange(depth, device=device)[:, None]
    starts_Jn = (columns_n - 1 - depth_J1).clamp_min(0)
    if weight_JBT is None:
        scale_J11 = config.thin ** -depth_J1[..., None].double()
        weight_JBT = trained_starts(batch, depth, config.thin) * scale_J11
    weight_Jn = weight_JBT[depth_J1, rows_n, starts_Jn].double() * (columns_n > depth_J1)
    valid_Jn = weight_Jn > 0
    flat_Jn = rows_n * batch.ids_BT.shape[1] + starts_Jn
    picked_JnD = torch.stack([hidden[j].flatten(0, 1).index_select(0, flat_Jn[j]) for j in range(depth)])

    argmax_n = batch.argmax_BT[rows_n, columns_n]
    head_VD = target.head_weight()
    teacher = _Teacher(
        batch.last_BTD[rows_n, columns_n],
        batch.log_normaliser_BT[rows_n, columns_n],
        head_VD if draft_to_target_W is None else head_VD[draft_to_target_W],
        target.adjust_logits,
        _draft_ids(argmax_n, draft_to_target_W),
        _few_tokens(batch, rows_n, columns_n, draft_to_target_W, config.divergence == "ce"),
        adjust_draft,
    )
    diverge = divergences.choose(config.divergence, config.eta, config.top_k, config.top_k_weight)

    def grid(values_Jn: Tensor) -> Tensor:
        """From rows to starts; those that are not valid all write to (0, 0), so they go first and as 0."""
        out_JBT = values_Jn.new_zeros(depth, *batch.ids_BT.shape)
        for j in range(depth):
            keep = valid_Jn[j]
            out_JBT[j, rows_n[keep], starts_Jn[j, keep]] = values_Jn[j, keep]
        return out_JBT

    if not torch.is_grad_enabled():  # else the gradients would be taken all the same
        picked_JnD, heads = picked_JnD.detach(), [head.detach() for head in heads]
    if config.weights == "dpace":
        apart = [head.detach() for head in heads]
        _, first = _Distill.apply(picked_JnD.detach(), weight_Jn, teacher, diverge, *apart)
        importance_JBT = _importance(grid(first["overlap"]), grid(weight_Jn), config.smoothing)
        weight_Jn = importance_JBT[depth_J1, rows_n, starts_Jn] * valid_Jn
    else:
        weight_Jn = weight_Jn * config.decay ** depth_J1.double()
    total, stats = _Distill.apply(picked_JnD, weight_Jn, teacher, diverge, *heads)
    starts_JBT, alive_JBT = torch.stack([grid(valid_Jn), grid(stats["correct"] & valid_Jn)]).cumprod(1)
    metrics = {
        "loss": stats["loss"].sum(1),
        "correct": stats["correct"].sum(1).float(),
        "overlap": stats["overlap"].sum(1),
        "supervised": valid_Jn.sum(1).float(),
        "survived": (alive_JBT * starts_JBT).sum((1, 2)).float(),
        "starts": starts_JBT.sum((1, 2)).float(),
    }
    count = torch.tensor(float(len(rows_n)), device=device)
    return Distilled(LossParts(total, count, metrics), grid(stats["loss"]), grid(stats["overlap"]), grid(weight_Jn))


def summarise(sums: dict[str, Tensor]) -> dict[str, float]:
    """Readable numbers from the metric sums of any number of batches.

    `accuracy/i` and `overlap_alpha/i` are teacher-forced (never called acceptance); `predicted_tau` is
    1 + Σ_i share of starts at which depths 0 to i are all right. Names that only some kinds have are J sums, reported as means.
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
        out |= {f"{name}/{j}": float(sums[name][j] / supervised_J[j]) for name in further}
    return out


def _draft_ids(target_ids: Tensor, draft_to_target_W: Tensor | None) -> Tensor:
    """Draft id of each target id, -1 where the draft vocabulary lacks it (the map is ascending)."""
    if draft_to_target_W is None:
        return target_ids
    index = torch.searchsorted(draft_to_target_W, target_ids).clamp_max(len(draft_to_target_W) - 1)
    return torch.where(draft_to_target_W[index] == target_ids, index, -1)


def _few_tokens(
    batch: TrainingBatch, rows_n: Tensor, columns_n: Tensor, draft_to_target_W: Tensor | None, hard: bool
) -> tuple[Tensor, Tensor] | None:
    """Draft ids and log-probabilities (n, k) of the only tokens that the target's law is on; None if it is on all."""
    if hard:
        ids_nk = batch.argmax_BT[rows_n, columns_n, None]
        return _draft_ids(ids_nk, draft_to_target_W), torch.zeros_like(ids_nk, dtype=batch.log_normaliser_BT.dtype)
    if batch.top_ids_BTk is None or batch.top_logits_BTk is None:
        return None
    log_probs_nk = batch.top_logits_BTk[rows_n, columns_n] - batch.log_normaliser_BT[rows_n, columns_n, None]
    return _draft_ids(batch.top_ids_BTk[rows_n, columns_n].long(), draft_to_target_W), log_probs_nk


def _importance(overlap_JBT: Tensor, weight_JBT: Tensor, smoothing: float) -> Tensor:
    """D-PACE's weights (J, B, T): Σ_{m ≥ j} w_m Π_{i ≤ m} a_i over trained depths, with a = (1 - smoothing) α + smoothing. The w_m
    are 1, or more where depths are thinned: the sum is then right on average."""
    chance_JBT = torch.where(weight_JBT > 0, (1 - smoothing) * overlap_JBT + smoothing, 1.0)
    return (chance_JBT.cumprod(0) * weight_JBT).flip(0).cumsum(0).flip(0)


class _Teacher(NamedTuple):
    """What the target says at n rows, by draft ids, -1 where the draft vocabulary lacks the token."""

    last_nD: Tensor
    log_normaliser_n: Tensor
    head_WD: Tensor
    adjust_logits: Callable[[Tensor], Tensor]
    argmax_n: Tensor
    few: tuple[Tensor, Tensor] | None
    adjust_draft: bool

    def law(self, chunk: slice, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Its probabilities inside the draft vocabulary (c, W) and their sums (c)."""
        if self.few is not None:
            ids_ck, log_probs_ck = (values_nk[chunk] for values_nk in self.few)
            inside_ck = log_probs_ck.to(dtype).exp() * (ids_ck >= 0)
            law_cW = torch.zeros(len(ids_ck), len(self.head_WD), dtype=dtype, device=ids_ck.device)
            return law_cW.scatter_add_(1, ids_ck.clamp_min(0), inside_ck), inside_ck.sum(1)
        logits_cW = self.adjust_logits(self.last_nD[chunk] @ self.head_WD.to(self.last_nD.dtype).T).to(dtype)
        law_cW = logits_cW.sub_(self.log_normaliser_n[chunk, None].to(dtype)).exp_()
        return law_cW, law_cW.sum(1)


class _Distill(torch.autograd.Function):
    """Chunked loss with the gradient taken in forward; the plain definition is its reference in the tests."""

    @staticmethod
    def forward(
        ctx: Any, hidden_JnD: Tensor, weight_Jn: Tensor, teacher: _Teacher, diverge: Divergence, *heads: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        depth, num_rows, _ = hidden_JnD.shape
        exact = hidden_JnD.dtype if hidden_JnD.dtype == torch.float64 else torch.float32
        wide = [head.to(hidden_JnD.dtype) for head in heads]
        wide_J = wide * depth if len(heads) == 1 else wide
        loss_Jn = torch.zeros(depth, num_rows, dtype=exact, device=hidden_JnD.device)
        overlap_Jn = torch.zeros_like(loss_Jn)
        correct_Jn = torch.zeros(depth, num_rows, dtype=torch.bool, device=hidden_JnD.device)
        with_grad = any(ctx.needs_input_grad)
        grad_hidden_JnD = torch.zeros_like(hidden_JnD) if with_grad else None
        trained = ctx.needs_input_grad[-len(heads) :]  # a shared head is frozen
        grad_heads = [
            torch.zeros(head.shape, dtype=exact, device=head.device) if needed else None
            for head, needed in zip(heads, trained, strict=True)
        ]

        step = max(1, CHUNK_ELEMENTS // len(teacher.head_WD))
        for begin in range(0, num_rows, step):
            chunk = slice(begin, begin + step)
            inside_c, argmax_c1 = teacher.argmax_n[chunk] >= 0, teacher.argmax_n[chunk].clamp_min(0)[:, None]
            law_cW, mass_c = teacher.law(chunk, exact)
            for j in range(depth):
                # Only the rows that this depth is trained on; all of them unless it is thinned.
                index_r = weight_Jn[j, chunk].nonzero()[:, 0]
                place_r = begin + index_r
                law_rW = law_cW if len(index_r) == len(law_cW) else law_cW[index_r]
                hidden_rD = hidden_JnD[j, place_r]
                logits_rW = (hidden_rD @ wide_J[j].T).to(exact)
                if teacher.adjust_draft:
                    logits_rW, pull_back = torch.func.vjp(teacher.adjust_logits, logits_rW)  # type: ignore[misc]
                # Right if the target's choice has the largest logit: cheaper than an argmax over the vocabulary.
                right_r = logits_rW.gather(1, argmax_c1[index_r])[:, 0] == logits_rW.amax(1)
                correct_Jn[j, place_r] = right_r & inside_c[index_r]
                laws = Laws(logits_rW, *_softmax(logits_rW), law_rW, mass_c[index_r])
                overlap_Jn[j, place_r] = divergences.overlap(laws)
                loss_Jn[j, place_r], grad_rW = diverge(laws)
                if grad_hidden_JnD is not None:
                    scale_r1 = weight_Jn[j, place_r, None].to(exact)
                    if teacher.adjust_draft:
                        (grad_rW,) = pull_back(grad_rW)
                    narrow_rW = grad_rW.to(hidden_JnD.dtype)
                    grad_hidden_JnD[j, place_r] = ((narrow_rW @ wide_J[j]) * scale_r1).to(hidden_JnD.dtype)
                    if (grad_head_WD := grad_heads[j % len(heads)]) is not None:
                        grad_head_WD += narrow_rW.T @ (hidden_rD * scale_r1).to(hidden_JnD.dtype)
        ctx.grad_hidden, ctx.grad_heads = grad_hidden_JnD, grad_heads
        ctx.head_dtypes = [head.dtype for head in heads]
        stats = {"loss": loss_Jn, "overlap": overlap_Jn, "correct": correct_Jn}
        return (loss_Jn * weight_Jn.to(exact)).sum(), stats

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, _stats: Any) -> tuple[Tensor | None, ...]:
        heads = [
            None if grad is None else (grad_total * grad).to(dtype)
            for grad, dtype in zip(ctx.grad_heads, ctx.head_dtypes, strict=True)
        ]
        return (ctx.grad_hidden * grad_total, None, None, None, *heads)


def _softmax(logits_rW: Tensor) -> tuple[Tensor, Tensor]:
    """Log-sum-exp (r) and probabilities (r, W); one exponential per element."""
    probs_rW = torch.softmax(logits_rW, 1)
    return logits_rW.amax(1) - probs_rW.amax(1).log(), probs_rW
