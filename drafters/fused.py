"""Draft states → draft head → loss against the target's laws, with the gradient, in chunks: no logits for all rows at once.

The gradient is taken in the forward pass (the idea of Liger kernels, Hsu et al. 2024, arXiv 2410.10989), so nothing of a chunk
outlives it, and two matrices of c x W are all that a chunk needs: the target's logits, and the draft's, over which the gradient is
written. What happens between the products is limited by memory, so on a CPU it is done a few rows at a time, which stay in the
cache; `use_compiled` makes one kernel of it. Which rows a depth is trained on is known on the host, so no index needs an answer
from the device.

Letters: J depths, n rows of the teacher, c rows of a chunk, r rows that a depth is trained on (of all, of a chunk or of a block),
D width, W draft vocabulary.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftsmith.drafters import divergences
from draftsmith.drafters.divergences import Divergence, Laws
from draftsmith.drafters.head_gradient import HeadGradient, exact_dtype
from draftsmith.drafters.layout import sent

CHUNK_ELEMENTS = 1 << 24
"""Rows per chunk are this many logits divided by W, if that is not too few (`rows_per_chunk`)."""
BLOCK_ELEMENTS = 1 << 18
"""Rows that are handled at once between the products, on a CPU: this many logits divided by W, one for each thread at least. (On
one core a block of 2^23 takes twice to three times as long there; from 2^16 to 2^18 the time is about the same.)"""


class Teacher(NamedTuple):
    """What the target says at n rows, by draft ids, -1 where the draft vocabulary lacks the token."""

    last_nD: Tensor
    log_normaliser_n: Tensor
    head_WD: Tensor
    adjust_logits: Callable[[Tensor], Tensor]
    argmax_n: Tensor
    few: tuple[Tensor, Tensor] | None
    """Draft ids and log-probabilities (n, k) of the only tokens that the law is on; None if it is on all."""
    adjust_draft: bool
    """The draft's logits are scaled and soft-capped as the target's are."""

    def labels(self, index_r: Tensor) -> "Teacher":
        """The same at some of the rows, without states and head."""
        few = None if self.few is None else (self.few[0][index_r], self.few[1][index_r])
        rows = self._replace(log_normaliser_n=self.log_normaliser_n[index_r], argmax_n=self.argmax_n[index_r], few=few)
        return rows._replace(last_nD=self.last_nD[:0], head_WD=self.head_WD[:0])


def fused(
    states: list[Tensor],
    rows: list[Tensor],
    weights: list[Tensor],
    teacher: Teacher,
    diverge: Divergence,
    heads: list[Tensor],
) -> tuple[Tensor, dict[str, list[Tensor]]]:
    """The weighted loss of J draft depths. Products are taken in autocast's dtype, or in that of the states; sums in fp32.

    Args:
        states: J tensors (r, D), what goes into the draft head at the rows that a depth is trained on.
        rows: J times which row of the teacher each belongs to, int64 (r), ascending, on the host.
        weights: J tensors (r), without gradient.
        teacher: what the target says at n rows.
        diverge: the loss of a row and its gradient (`divergences`).
        heads: J weights (W, D), or one weight for all depths.

    Returns:
        The sum over depths and rows, fp32 (fp64 for fp64 states), with gradient towards states and heads, once; and of each depth's
        rows, J tensors (r) each without gradient: "loss" (unweighted), "overlap" (α) and "correct" (whether the likeliest token is
        the target's).
    """
    total, stats = _Fused.apply(_Job(rows, weights, teacher, diverge), *states, *heads)
    return total, stats


def rows_per_chunk(vocab: int, width: int) -> int:
    """At least an eighth of the width: adding to a head's gradient then costs little beside the products, and a chunk in bf16 takes
    an eighth of the memory of that gradient."""
    return max(1, CHUNK_ELEMENTS // vocab, width // 8)


def use_compiled(on: bool) -> None:
    """Whether what happens between the products is compiled from now on (`torch.compile`); it is not unless asked for."""
    global _compiled
    _compiled = torch.compile(_score, dynamic=True) if on else None


_compiled: Callable[..., tuple[Tensor, Tensor, Tensor]] | None = None


class _Job(NamedTuple):
    rows: list[Tensor]
    weights: list[Tensor]
    teacher: Teacher
    diverge: Divergence


class _Fused(torch.autograd.Function):
    """The plain definition is its reference in the tests."""

    @staticmethod
    def forward(ctx: Any, job: _Job, *inputs: Tensor) -> tuple[Tensor, dict[str, list[Tensor]]]:
        depth, teacher = len(job.rows), job.teacher
        states, heads = inputs[:depth], inputs[depth:]
        need_states, need_heads = ctx.needs_input_grad[1 : 1 + depth], ctx.needs_input_grad[1 + depth :]
        device, exact, dtype = states[0].device, exact_dtype(states[0].dtype), _product_dtype(states[0])
        narrow = [head_WD.to(dtype) for head_WD in heads]
        if teacher.few is None:
            teacher = teacher._replace(head_WD=teacher.head_WD.to(_product_dtype(teacher.last_nD)))
        loss, overlap = ([torch.empty(len(x), dtype=exact, device=device) for x in states] for _ in range(2))
        correct = [torch.empty(len(x), dtype=torch.bool, device=device) for x in states]
        grad_states = [torch.empty_like(x) if needed else None for x, needed in zip(states, need_states, strict=True)]
        grad_heads = [HeadGradient(x) if needed else None for x, needed in zip(heads, need_heads, strict=True)]

        vocab = len(teacher.head_WD)
        needed_m = _union(job.rows, len(teacher.argmax_n))
        chunks = _Chunks(job.rows, needed_m, rows_per_chunk(vocab, heads[0].shape[1]))
        index_m, index = sent(needed_m, device), [sent(rows_r, device) for rows_r in chunks.rows]
        logits_cW, target_cW = torch.empty(chunks.size, vocab, dtype=dtype, device=device), None
        if teacher.few is None:
            target_cW = torch.empty_like(logits_cW, dtype=teacher.head_WD.dtype)
        score = _score if _compiled is None else _compiled
        with torch.autocast(device.type, enabled=False):
            for begin, parts in chunks:
                index_c = index_m[begin : begin + chunks.size]
                if target_cW is not None:
                    last_cD = teacher.last_nD[index_c].to(target_cW.dtype)
                    torch.mm(last_cD, teacher.head_WD.T, out=target_cW[: len(index_c)])
                for j, part in enumerate(parts):
                    if part.start == part.stop:
                        continue
                    h, state_rD = j % len(heads), states[j][part].to(dtype)
                    logits_rW = torch.mm(state_rD, narrow[h].T, out=logits_cW[: len(state_rD)])
                    for block in _blocks(len(state_rD), vocab, device):
                        place = slice(part.start + block.start, part.start + block.stop)
                        at = block if len(state_rD) == len(index_c) else index[j][place] - begin
                        loss[j][place], overlap[j][place], correct[j][place] = score(
                            logits_rW[block],
                            None if target_cW is None else target_cW[at],
                            teacher.labels(index_c[at]),
                            job.diverge,
                            need_states[j] or need_heads[h],
                        )
                    scale_r1 = job.weights[j][part, None].to(exact)
                    if (grad_state_rD := grad_states[j]) is not None:
                        torch.mul(logits_rW @ narrow[h], scale_r1, out=grad_state_rD[part])
                    if (grad_head := grad_heads[h]) is not None:
                        grad_head.add(logits_rW, (state_rD * scale_r1).to(dtype))
        ctx.grad_states, ctx.grad_heads = grad_states, grad_heads
        total = torch.stack([(x_r * w_r.to(exact)).sum() for x_r, w_r in zip(loss, job.weights, strict=True)]).sum()
        return total, {"loss": loss, "overlap": overlap, "correct": correct}

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_total: Tensor, _stats: Any) -> tuple[Tensor | None, ...]:
        """Hands the gradients over, scaled where they lie."""
        if ctx.grad_states is None:
            raise RuntimeError("the gradient of the fused loss was handed over before; compute the loss once more")
        states = [None if grad_rD is None else grad_rD.mul_(grad_total) for grad_rD in ctx.grad_states]
        heads = [None if grad is None else grad.scaled(grad_total) for grad in ctx.grad_heads]
        ctx.grad_states = ctx.grad_heads = None
        return (None, *states, *heads)


class _Chunks:
    """Chunks of the teacher's rows, and which rows of each depth lie in them; all of it on the host.

    Args:
        rows: J times which row of the teacher each belongs to, ascending.
        needed_m: the teacher's rows that any depth is trained on.
        size: rows of a chunk, at most.

    Attributes:
        rows: J times which of the needed rows each belongs to.
        size: fewer where there are not so many.
    """

    def __init__(self, rows: list[Tensor], needed_m: Tensor, size: int) -> None:
        self.size = max(1, min(size, len(needed_m)))
        self.rows = [torch.searchsorted(needed_m, rows_r) for rows_r in rows]
        self._begins = range(0, len(needed_m), self.size)

    def __iter__(self) -> Iterator[tuple[int, list[slice]]]:
        """The first needed row of each chunk, and J slices of the rows of a depth."""
        borders = torch.tensor([*self._begins, self._begins.stop])
        parts = [itertools.pairwise(torch.searchsorted(rows_r, borders).tolist()) for rows_r in self.rows]
        for begin, *parts_J in zip(self._begins, *parts, strict=True):
            yield begin, [slice(*part) for part in parts_J]


def _law(shape: torch.Size, exact: torch.dtype, target_rW: Tensor | None, teacher: Teacher) -> tuple[Tensor, Tensor]:
    """The target's probabilities inside the draft vocabulary (r, W) from its logits, and their sums (r)."""
    if target_rW is not None:
        law_rW = (teacher.adjust_logits(target_rW).to(exact) - teacher.log_normaliser_n[:, None].to(exact)).exp_()
        return law_rW, law_rW.sum(1)
    assert teacher.few is not None
    ids_rk, log_probs_rk = teacher.few
    inside_rk = log_probs_rk.to(exact).exp() * (ids_rk >= 0)
    law_rW = torch.zeros(shape, dtype=exact, device=ids_rk.device)
    return law_rW.scatter_add_(1, ids_rk.clamp_min(0), inside_rk), inside_rk.sum(1)


def _score(
    logits_rW: Tensor, target_rW: Tensor | None, teacher: Teacher, diverge: Divergence, with_grad: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, α and whether the draft is right, (r) each; the gradient is written over the draft's logits."""
    exact, argmax_r = exact_dtype(logits_rW.dtype), teacher.argmax_n
    law_rW, mass_r = _law(logits_rW.shape, exact, target_rW, teacher)
    wide_rW = logits_rW.to(exact)
    if teacher.adjust_draft:
        wide_rW, pull_back = torch.func.vjp(teacher.adjust_logits, wide_rW)  # type: ignore[misc]
    # Right if the target's choice has the largest logit: cheaper than an argmax over the vocabulary.
    top_r, probs_rW = wide_rW.amax(1), torch.softmax(wide_rW, 1)
    correct_r = (wide_rW.gather(1, argmax_r.clamp_min(0)[:, None])[:, 0] == top_r) & (argmax_r >= 0)
    # The log-sum-exp from the probabilities: one exponential per element.
    laws = Laws(wide_rW, top_r - probs_rW.amax(1).log(), probs_rW, law_rW, mass_r)
    overlap_r = divergences.overlap(laws)
    loss_r, grad_rW = diverge(laws)
    if with_grad:
        logits_rW.copy_(pull_back(grad_rW)[0] if teacher.adjust_draft else grad_rW)
    return loss_r, overlap_r, correct_r


def _blocks(num_rows: int, vocab: int, device: torch.device) -> list[slice]:
    """Rows that are handled at once between the products."""
    if _compiled is not None:
        size = num_rows
    elif device.type == "cpu":
        size = max(torch.get_num_threads(), BLOCK_ELEMENTS // vocab)
    else:
        size = max(1, CHUNK_ELEMENTS // vocab)
    return [slice(begin, min(begin + size, num_rows)) for begin in range(0, num_rows, size)]


def _union(rows: list[Tensor], num_rows: int) -> Tensor:
    """Rows that any depth has, ascending."""
    found_n = torch.zeros(num_rows, dtype=torch.bool)
    for rows_r in rows:
        found_n[rows_r] = True
    return found_n.nonzero()[:, 0]


def _product_dtype(values: Tensor) -> torch.dtype:
    """What products are taken in: autocast's dtype where it is on and would apply."""
    kind = values.device.type
    autocast = torch.is_autocast_enabled(kind) and values.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if autocast else values.dtype
