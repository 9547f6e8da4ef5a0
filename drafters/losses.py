"""Distillation loss shared by all kinds: soft cross-entropy between the target's and the draft's next-token laws.

    loss = - Σ_rows Σ_{v in draft vocabulary} target_probs(v) · log draft_probs(v)

`target_probs` are normalised over the *whole* target vocabulary, so target mass outside the draft vocabulary pulls at
nothing and simply counts as a miss (EAGLE-3, Li et al. 2025, arXiv 2503.01840, renormalises and masks instead).

Neither model's logits exist for all positions at once: rows are handled in chunks, hidden → head → loss → gradient, and
the gradient is taken in the forward pass (the idea of Liger kernels, Hsu et al. 2024, arXiv 2410.10989).

Where a draft position lives: the draft state at start p and depth j predicts token p + 2 + j. Its teacher is the target's
law at m = p + 1 + j, and it counts where the target itself generated token m + 1.

Deeper depths matter less and may be thinned: depth j is then trained on a share `thin ** j` of the starts, nested and chosen
by a hash of text and epoch, with weights `1 / thin ** j`. The expected gradient is the same, at a fraction of the work.

Letters: J depths, B sequences, T positions, n supervised rows (b, m) or starts (b, p), A starts of one sequence,
c rows of a chunk, r those of them that a depth is trained on, D width, W draft vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.drafters.base import LossParts, TargetHead, TrainingBatch

CHUNK_ELEMENTS = 1 << 23
"""Rows per chunk are this many logits divided by W: bounds the memory, and large enough that adding up the gradient of a head
costs little (on two CPU cores at W = 8,192 twice this is as fast, half of it slower where each depth has its own head)."""


def distill(
    hidden: list[Tensor],
    heads: list[Tensor],
    batch: TrainingBatch,
    target: TargetHead,
    draft_to_target_W: Tensor | None,
    decay: float,
    hard: bool = False,
    thin: float = 1.0,
) -> LossParts:
    """The loss of J draft depths against one frozen target.

    Args:
        hidden: J tensors (B, T, D), what goes into the draft head at start p (untrained starts are ignored).
        heads: J weights (W, D), or one weight for all depths.
        batch: the training sequences.
        target: whose law is learned; the rows of its head that belong to the draft vocabulary are read.
        draft_to_target_W: target id of each draft id; None if the vocabularies are the same.
        decay: depth j weighs decay ** j.
        hard: train towards the target's most likely token instead of its whole law.
        thin: share of one depth's starts that the next depth is trained on; 1 means all.

    Returns:
        sum, count and metrics; the metrics are J sums each: loss, correct, overlap, supervised, survived, starts.
    """
    rows_n, columns_n = supervised_rows(batch)
    depth = len(hidden)
    depth_J1 = torch.arange(depth, device=columns_n.device)[:, None]
    starts_Jn = (columns_n - 1 - depth_J1).clamp_min(0)
    valid_Jn = trained_starts(batch, depth, thin)[depth_J1, rows_n, starts_Jn] & (columns_n > depth_J1)
    flat_Jn = rows_n * batch.ids_BT.shape[1] + starts_Jn
    picked_JnD = torch.stack([hidden[j].flatten(0, 1).index_select(0, flat_Jn[j]) for j in range(depth)])
    weight_Jn = valid_Jn * (decay / thin) ** depth_J1.double()

    argmax_n = batch.argmax_BT[rows_n, columns_n]
    head_VD = target.head_weight()
    total, stats = _Distill.apply(
        picked_JnD,
        weight_Jn,
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


def trained_starts(batch: TrainingBatch, depth: int, thin: float = 1.0) -> Tensor:
    """Where the draft state at start p and depth j is trained, bool (J, B, T)."""
    ids_BT, mask_BT = batch.ids_BT, batch.loss_mask_BT
    shift = nn.functional.pad
    trained_JBT = torch.stack([shift(mask_BT[:, 2 + j :], (0, min(2 + j, mask_BT.shape[1]))) for j in range(depth)])
    if thin == 1:
        return trained_JBT
    # One number in [0, 1) per start, from text and epoch alone: padding, batch composition and resuming cannot change it.
    position_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
    mixed_BT = (
        ids_BT * 0x9E3779B1 + ids_BT.roll(-1, 1) * 0x85EBCA77 + position_T * 0xC2B2AE3D + batch.epoch * 0x27D4EB2F
    )
    for shift_right, factor in ((15, 0x2C1B3C6D), (12, 0x297A2D39), (15, 1)):
        mixed_BT = mixed_BT & 0xFFFFFFFF
        mixed_BT = (mixed_BT ^ (mixed_BT >> shift_right)) * factor
    return trained_JBT & (mixed_BT / 2**32 < thin ** torch.arange(depth, device=ids_BT.device)[:, None, None])


class Starts:
    """Some of the B x T starts as n rows: where a drafter's layers have to run at all.

    Attributes:
        rows_n, starts_n: int64, sequence and start.
        slots_n: int64, place of a start among those of its sequence.
        most: A, the largest number of starts in one sequence.
    """

    def __init__(self, active_BT: Tensor) -> None:
        self.active_BT = active_BT
        self.batch, self.width = active_BT.shape
        self.rows_n, self.starts_n = active_BT.nonzero(as_tuple=True)
        slots_BT = active_BT.cumsum(1) - 1
        self.slots_n = slots_BT[self.rows_n, self.starts_n]
        self.most = max(1, int(slots_BT.max()) + 1)

    def pick(self, x_BTD: Tensor) -> Tensor:
        """What stands at the starts: (n, D)."""
        return x_BTD.flatten(0, 1).index_select(0, self.rows_n * self.width + self.starts_n)

    def place(self, x_nD: Tensor) -> Tensor:
        """The inverse, 0 elsewhere: (B, T, D)."""
        flat_ND = x_nD.new_zeros(self.batch * self.width, x_nD.shape[1])
        return flat_ND.index_copy(0, self.rows_n * self.width + self.starts_n, x_nD).unflatten(0, (self.batch, -1))

    def pad(self, x_nD: Tensor) -> Tensor:
        """One row per sequence, its starts moved to the left, 0 behind them: (B, A, D)."""
        flat_ND = x_nD.new_zeros(self.batch * self.most, x_nD.shape[1])
        return flat_ND.index_copy(0, self.rows_n * self.most + self.slots_n, x_nD).unflatten(0, (self.batch, -1))

    def unpad(self, x_BAD: Tensor) -> Tensor:
        """The inverse: (n, D)."""
        return x_BAD.flatten(0, 1).index_select(0, self.rows_n * self.most + self.slots_n)

    def among(self, others: "Starts") -> Tensor:
        """Which rows of `others` these are, int64 (n); all of them must be there."""
        return self.active_BT[others.rows_n, others.starts_n].nonzero()[:, 0]


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


def _softmax(logits_cW: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities (c, W) and log-sum-exp (c); one exponential per element."""
    probs_cW = torch.softmax(logits_cW, 1)
    return probs_cW, logits_cW.amax(1) - probs_cW.amax(1).log()


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
            # The teacher's law inside the draft vocabulary, and how much of its mass lies there: target_probs = mass · law.
            if hard:
                mass_c = inside_c.to(exact)
                shape = (len(inside_c), len(teacher_head_WD))
                law_cW = torch.zeros(shape, dtype=exact, device=mass_c.device).scatter_(1, argmax_c1, mass_c[:, None])
            else:
                logits_cW = adjust_logits(last_nD[chunk] @ teacher_head_WD.T).to(exact)
                law_cW, logsumexp_c = _softmax(logits_cW)
                mass_c = (logsumexp_c - log_normaliser_n[chunk].to(exact)).exp()
            for j in range(depth):
                # Only the rows that this depth is trained on; all of them unless it is thinned.
                index_r = weight_Jn[j, chunk].nonzero()[:, 0]
                law_rW = law_cW if len(index_r) == len(law_cW) else law_cW[index_r]
                mass_r, inside_r, argmax_r1 = mass_c[index_r], inside_c[index_r], argmax_c1[index_r]
                weight_r = weight_Jn[j, begin + index_r].to(exact)
                hidden_rD = hidden_JnD[j, begin + index_r]
                logits_rW = (hidden_rD @ wide_J[j].T).to(exact)
                # Right if the target's choice has the largest logit: cheaper than an argmax over the vocabulary.
                right_r = logits_rW.gather(1, argmax_r1)[:, 0] == logits_rW.amax(1)
                correct_Jn[j, begin + index_r] = right_r & inside_r
                probs_rW, logsumexp_r = _softmax(logits_rW)
                # -Σ p log q = mass · (logsumexp(z) - law · z), which needs no log-probability per token.
                dot_r = torch.mul(law_rW, logits_rW, out=logits_rW).sum(1)
                row_loss_r = mass_r * (logsumexp_r - dot_r)
                loss_J[j] += row_loss_r.sum()
                total += (row_loss_r * weight_r).sum()
                shared_rW = torch.minimum(probs_rW, torch.mul(law_rW, mass_r[:, None], out=logits_rW), out=logits_rW)
                overlap_J[j] += shared_rW.sum()
                if grad_hidden_JnD is not None:  # of one row: weight · mass · (q - law)
                    narrow_rW = probs_rW.sub_(law_rW).to(hidden_JnD.dtype)
                    scale_r1 = (weight_r * mass_r)[:, None]
                    grad_rD = (narrow_rW @ wide_J[j]) * scale_r1
                    grad_hidden_JnD[j, begin + index_r] = grad_rD.to(hidden_JnD.dtype)
                    grad_heads[j % len(heads)] += narrow_rW.T @ (hidden_rD * scale_r1).to(hidden_JnD.dtype)
        ctx.grad_hidden, ctx.grad_heads = grad_hidden_JnD, grad_heads
        ctx.head_dtypes = [head.dtype for head in heads]
        stats = {"loss": loss_J.float(), "overlap": overlap_J.float(), "correct": correct_Jn}
        return total, stats

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, _stats: Any) -> tuple[Tensor | None, ...]:
        heads = [(grad_total * grad).to(dtype) for grad, dtype in zip(ctx.grad_heads, ctx.head_dtypes, strict=True)]
        return (ctx.grad_hidden * grad_total, None, None, None, None, None, None, None, *heads)
