"""Distillation loss shared by all kinds: soft cross-entropy between the target's and the draft's next-token laws.

    loss = - Σ_rows Σ_{v in draft vocabulary} target_probs(v) · log draft_probs(v)

`target_probs` are normalised over the *whole* target vocabulary, so target mass outside the draft vocabulary pulls at
nothing and simply counts as a miss (EAGLE-3, Li et al. 2025, arXiv 2503.01840, renormalises and masks instead).

Neither model's logits exist for all positions at once: rows are handled in chunks, hidden → head → loss → gradient, and
the gradient is taken in the forward pass (the idea of Liger kernels, Hsu et al. 2024, arXiv 2410.10989).

Where a draft position lives: the draft state at start p and depth j predicts token p + 2 + j. Its teacher is the target's
law at m = p + 1 + j, and it counts where the target itself generated token m + 1.

Letters: J depths, B sequences, T positions, n supervised rows (b, m), D width, W draft vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from draftsmith.drafters.base import LossParts, TargetHead, TrainingBatch

CHUNK_ELEMENTS = 1 << 22
"""Rows per chunk are this many logits divided by W: small enough to stay in cache, large enough for the matrix units (of
2**20 to 2**24 the fastest on two CPU cores at W = 8,192 and 12,288)."""


def distill(
    hidden: list[Tensor],
    heads: list[Tensor],
    batch: TrainingBatch,
    target: TargetHead,
    draft_to_target_W: Tensor | None,
    decay: float,
    hard: bool = False,
) -> LossParts:
    """The loss of J draft depths against one frozen target.

    Args:
        hidden: J tensors (B, T, D), what goes into the draft head at start p (entries past the end are ignored).
        heads: J weights (W, D), or one weight for all depths.
        batch: the training sequences.
        target: whose law is learned; the rows of its head that belong to the draft vocabulary are read.
        draft_to_target_W: target id of each draft id; None if the vocabularies are the same.
        decay: depth j weighs decay ** j.
        hard: train towards the target's most likely token instead of its whole law.

    Returns:
        sum, count and metrics; the metrics are J sums each: loss, correct, overlap, supervised, survived, starts.
    """
    rows_n, columns_n = supervised_rows(batch)
    depth = len(hidden)
    starts_Jn = columns_n - 1 - torch.arange(depth, device=columns_n.device)[:, None]
    valid_Jn = starts_Jn >= 0
    picked_JnD = torch.stack([hidden[j][rows_n, starts_Jn[j].clamp_min(0)] for j in range(depth)])
    weight_Jn = valid_Jn * decay ** torch.arange(depth, device=columns_n.device)[:, None]

    argmax_n = batch.argmax_BT[rows_n, columns_n]
    head_VD = target.head_weight()
    total, stats = _Distill.apply(
        picked_JnD,
        weight_Jn.to(torch.float32),
        batch.last_BTD[rows_n, columns_n],
        batch.log_normaliser_BT[rows_n, columns_n],
        head_VD if draft_to_target_W is None else head_VD[draft_to_target_W],
        target.adjust_logits,
        _draft_ids(argmax_n, draft_to_target_W),
        hard,
        *heads,
    )
    loss_J, overlap_J, correct_Jn = stats["loss"], stats["overlap"], stats["correct"]
    survived_J, starts_J = _survival(correct_Jn, valid_Jn, rows_n, starts_Jn, batch.ids_BT.shape)
    metrics = {
        "loss": loss_J,
        "correct": correct_Jn.sum(1).float(),
        "overlap": overlap_J,
        "supervised": valid_Jn.sum(1).float(),
        "survived": survived_J,
        "starts": starts_J,
    }
    return LossParts(total, torch.tensor(float(len(rows_n)), device=total.device), metrics)


def supervised_rows(batch: TrainingBatch) -> tuple[Tensor, Tensor]:
    """Rows b and columns m (int64, n each) at which the target generated token m + 1; m = 0 has no draft start."""
    rows_n, columns_n = batch.loss_mask_BT[:, 2:].nonzero(as_tuple=True)
    return rows_n, columns_n + 1


def summarise(sums: dict[str, Tensor]) -> dict[str, float]:
    """Readable numbers from the metric sums of any number of batches.

    `accuracy/i` and `overlap_alpha/i` are teacher-forced (never called acceptance); `predicted_tau` is
    1 + Σ_i share of starts at which depths 0 to i are all right.
    """
    supervised_J, starts_J = sums["supervised"].clamp_min(1), sums["starts"].clamp_min(1)
    out = {"predicted_tau": 1 + float((sums["survived"] / starts_J).sum())}
    for j in range(len(supervised_J)):
        out[f"loss/{j}"] = float(sums["loss"][j] / supervised_J[j])
        out[f"accuracy/{j}"] = float(sums["correct"][j] / supervised_J[j])
        out[f"overlap_alpha/{j}"] = float(sums["overlap"][j] / supervised_J[j])
    return out


def _draft_ids(target_ids_n: Tensor, draft_to_target_W: Tensor | None) -> Tensor:
    """Draft id of each target id, -1 where the draft vocabulary lacks it (the map is ascending)."""
    if draft_to_target_W is None:
        return target_ids_n
    index_n = torch.searchsorted(draft_to_target_W, target_ids_n).clamp_max(len(draft_to_target_W) - 1)
    return torch.where(draft_to_target_W[index_n] == target_ids_n, index_n, -1)


def _survival(
    correct_Jn: Tensor, valid_Jn: Tensor, rows_n: Tensor, starts_Jn: Tensor, shape: torch.Size
) -> tuple[Tensor, Tensor]:
    """Per depth, the number of starts still alive (all depths so far right) and the number of starts (both J)."""
    grid_JBT = torch.zeros(2, len(correct_Jn), *shape, dtype=torch.bool, device=correct_Jn.device)
    for j, (correct_n, valid_n) in enumerate(zip(correct_Jn, valid_Jn, strict=True)):
        place = (rows_n[valid_n], starts_Jn[j][valid_n])  # distinct places, so the order of writes does not matter
        grid_JBT[0, j][place] = True
        grid_JBT[1, j][place] = correct_n[valid_n]
    starts_JBT, alive_JBT = grid_JBT.cumprod(dim=1)
    return (alive_JBT * starts_JBT).sum((1, 2)).float(), starts_JBT.sum((1, 2)).float()


class _Distill(torch.autograd.Function):
    """Chunked loss with the gradient taken in forward; the plain definition is its reference in the tests."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_JnD: Tensor,
        weight_Jn: Tensor,
        last_nD: Tensor,
        log_normaliser_n: Tensor,
        teacher_head_WD: Tensor,
        adjust_logits: Callable[[Tensor], Tensor],
        argmax_n: Tensor,
        hard: bool,
        *heads: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        depth, num_rows, _ = hidden_JnD.shape
        exact = hidden_JnD.dtype if hidden_JnD.dtype == torch.float64 else torch.float32
        heads_J = list(heads) * depth if len(heads) == 1 else list(heads)
        wide = [head.to(hidden_JnD.dtype) for head in heads]
        wide_J = wide * depth if len(heads) == 1 else wide
        teacher_head_WD = teacher_head_WD.to(last_nD.dtype)
        loss_J = torch.zeros(depth, dtype=exact, device=hidden_JnD.device)
        overlap_J = torch.zeros_like(loss_J)
        correct_Jn = torch.zeros(depth, num_rows, dtype=torch.bool, device=hidden_JnD.device)
        total = torch.zeros((), dtype=exact, device=hidden_JnD.device)
        with_grad = any(ctx.needs_input_grad)
        grad_hidden_JnD = torch.zeros_like(hidden_JnD) if with_grad else None
        grad_heads = [torch.zeros(head.shape, dtype=exact, device=head.device) for head in heads] if with_grad else []

        step = max(1, CHUNK_ELEMENTS // teacher_head_WD.shape[0])
        for begin in range(0, num_rows, step):
            chunk = slice(begin, begin + step)
            inside_c, argmax_c1 = argmax_n[chunk] >= 0, argmax_n[chunk].clamp_min(0)[:, None]
            if hard:
                target_probs_cW = torch.zeros(
                    len(inside_c), len(teacher_head_WD), dtype=exact, device=hidden_JnD.device
                ).scatter_(1, argmax_c1, inside_c[:, None].to(exact))
            else:
                logits_cW = adjust_logits(last_nD[chunk] @ teacher_head_WD.T).to(exact)
                target_probs_cW = logits_cW.sub_(log_normaliser_n[chunk, None].to(exact)).exp_()
            mass_c = target_probs_cW.sum(1)
            for j in range(depth):
                logits_cW = (hidden_JnD[j, chunk] @ wide_J[j].T).to(exact)
                weight_c, valid_c = weight_Jn[j, chunk].to(exact), weight_Jn[j, chunk] > 0
                # Right if the target's choice has the largest logit: cheaper than an argmax over the vocabulary.
                largest_c1 = logits_cW.amax(1, keepdim=True)
                right_c = (logits_cW.gather(1, argmax_c1) == largest_c1)[:, 0]
                correct_Jn[j, chunk] = right_c & inside_c & valid_c
                # -Σ p log q = mass · logsumexp(z) - p · z, which needs no log-probability per token.
                dot_c = torch.linalg.vecdot(target_probs_cW, logits_cW)
                draft_probs_cW = logits_cW.sub_(largest_c1).exp_()
                sum_c1 = draft_probs_cW.sum(1, keepdim=True)
                row_loss_c = mass_c * (sum_c1.log() + largest_c1)[:, 0] - dot_c
                loss_J[j] += row_loss_c[valid_c].sum()
                total += (row_loss_c * weight_c).sum()
                draft_probs_cW.div_(sum_c1)
                overlap_J[j] += torch.minimum(draft_probs_cW, target_probs_cW).sum(1)[valid_c].sum()
                if grad_hidden_JnD is not None:
                    grad_cW = draft_probs_cW.mul_(mass_c[:, None]).sub_(target_probs_cW).mul_(weight_c[:, None])
                    narrow_cW = grad_cW.to(hidden_JnD.dtype)
                    grad_hidden_JnD[j, chunk] = narrow_cW @ wide_J[j]
                    grad_heads[j % len(heads)] += narrow_cW.T @ hidden_JnD[j, chunk]
        ctx.grad_hidden, ctx.grad_heads = grad_hidden_JnD, grad_heads
        ctx.head_dtypes = [head.dtype for head in heads_J[: len(heads)]]
        stats = {"loss": loss_J.float(), "overlap": overlap_J.float(), "correct": correct_Jn}
        return total, stats

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, _stats: Any) -> tuple[Tensor | None, ...]:
        heads = [(grad_total * grad).to(dtype) for grad, dtype in zip(ctx.grad_heads, ctx.head_dtypes, strict=True)]
        return (ctx.grad_hidden * grad_total, None, None, None, None, None, None, None, *heads)
