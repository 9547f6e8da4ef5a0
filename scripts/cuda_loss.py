"""A section of `check_cuda`: the fused loss, values and gradients, against the papers' definitions in fp64; and what it takes
beside the plain way, at a size at which the plain way still fits.

Letters: J depths, T positions, n trained starts of a depth, D width, V vocabulary.
"""

import time
from collections.abc import Callable
from typing import Any, get_args

import torch
from torch import Tensor

from draftsmith.drafters import divergences, fused
from draftsmith.drafters.base import TrainingBatch
from draftsmith.drafters.layout import packed
from draftsmith.drafters.losses import LossConfig, distill
from draftsmith.drafters.starts import trained_starts
from draftsmith.scripts.check_cuda import check, relative

DECAY = 0.8


class Head:
    """A target that is a head alone."""

    def __init__(self, weight_VD: Tensor) -> None:
        self.weight = weight_VD

    def head_weight(self) -> Tensor:
        return self.weight

    def adjust_logits(self, logits: Tensor) -> Tensor:
        return logits


def run(device: torch.device, dry: bool) -> None:
    """Compiled as on a GPU in training, and plain; the dry run's compiled part is one size, since each is compiled anew."""
    _check(device, dry)
    fused.use_compiled(True)
    print("- compiled:")
    _check(device, dry, ("kl",) if dry else ("kl", "lk"))
    if not dry:
        _compare_costs(device)


def _check(device: torch.device, dry: bool, names: tuple[str, ...] = get_args(divergences.Name)) -> None:
    sizes = [(64, 32, 500), (1, 32, 700)] if dry else [(96, 256, 32_000), (64, 128, 262_144), (1, 128, 151_936)]
    for length, width, vocab in sizes:
        for name in names:
            jumps = name in ("tv", "nla", "lk")  # their gradient has a sign in it, which rounding may turn
            for dtype, allowed in ((torch.float32, 1e-4), (torch.bfloat16, 0.15 if jumps else 3e-2)):
                if vocab > 200_000 and (name != "kl" or dtype == torch.float32):
                    continue
                worst = _deviation(device, name, length, width, vocab, dtype)
                kind = str(dtype).removeprefix("torch.")
                check(f"{name}, {kind}, T {length}, V {vocab:,}: value and gradients", worst, allowed)


def definition(name: str, target_nV: Tensor, draft_nV: Tensor, eta: float) -> Tensor:
    """The loss of each row as the papers write it; `draft_nV` are log-probabilities."""
    q_nV, log_p_nV = draft_nV.exp(), target_nV.clamp_min(1e-300).log()
    alpha_n = torch.minimum(target_nV, q_nV).sum(-1)
    cross_n = -(target_nV * draft_nV).sum(-1)
    if name in ("kl", "ce"):
        return cross_n
    if name == "reverse_kl":
        return (q_nV * (draft_nV - log_p_nV)).sum(-1)
    if name == "jsd":
        log_m_nV = ((target_nV + q_nV) / 2).clamp_min(1e-300).log()
        return ((target_nV * (log_p_nV - log_m_nV)).sum(-1) + (q_nV * (draft_nV - log_m_nV)).sum(-1)) / 2
    if name == "tv":
        return 1 - alpha_n
    if name == "nla":
        return -alpha_n.log()
    share_n = torch.exp(-eta * alpha_n.detach())
    return share_n * cross_n + (1 - share_n) * (1 - alpha_n)


def _deviation(device: torch.device, name: str, length: int, width: int, vocab: int, dtype: torch.dtype) -> float:
    batch, hidden, heads, target, starts_JT = _case(device, length, width, vocab, dtype, depths=2)
    config = LossConfig(divergence=name, decay=DECAY)  # type: ignore[arg-type]
    inputs = [x.requires_grad_(True) for x in (*hidden, *heads)]
    parts = distill(hidden, heads, batch, target, None, config).parts
    parts.sum.backward()

    wide = [x.detach().double().requires_grad_(True) for x in inputs]
    total = torch.zeros((), dtype=torch.float64, device=device)
    logits_TV = batch.last_BTD[0].double() @ target.weight.double().T
    law_TV = logits_TV.softmax(-1)
    if name == "ce":
        law_TV = torch.nn.functional.one_hot(logits_TV.argmax(-1), vocab).double()
    for j, starts_T in enumerate(starts_JT):
        place_n = starts_T.nonzero()[:, 0]
        draft_nV = (wide[j] @ wide[-1].T).log_softmax(-1)
        total = total + DECAY**j * definition(name, law_TV[place_n + 1 + j], draft_nV, config.eta).sum()
    total.backward()
    pairs = [(parts.sum, total), *((a.grad, b.grad) for a, b in zip(inputs, wide, strict=True) if len(a))]
    return max(relative(a, b) for a, b in pairs if a is not None and b is not None)


def _case(
    device: torch.device, length: int, width: int, vocab: int, dtype: torch.dtype, depths: int
) -> tuple[TrainingBatch, list[Tensor], list[Tensor], Any, Tensor]:
    """A text of which `length` tokens are trained at the first depth."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator, device=device) * scale).to(dtype)

    layout = packed([[3] * (length + 2)], [[False, False, *[True] * length]])
    target = Head(normal(vocab, width, scale=2 * width**-0.5))
    last_1TD = normal(1, length + 2, width)
    normaliser_T, argmax_T = zip(*(_law(rows, target) for rows in last_1TD[0].split(256)), strict=True)
    batch = TrainingBatch(
        ids_BT=layout.ids_BT.to(device),
        loss_mask_BT=layout.loss_mask_BT.to(device),
        features_BTF=last_1TD[..., :0],
        last_BTD=last_1TD,
        log_normaliser_BT=torch.cat(normaliser_T)[None],
        argmax_BT=torch.cat(argmax_T)[None],
        layout=layout,
    )
    starts_JT = trained_starts(batch, depths)[:, 0]
    hidden = [normal(int(starts_T.sum()), width) for starts_T in starts_JT]
    return batch, hidden, [normal(vocab, width, scale=width**-0.5)], target, starts_JT


def _law(last_rD: Tensor, target: Head) -> tuple[Tensor, Tensor]:
    # In fp64: the normaliser is an input of the loss, and must not be what differs.
    logits_rV = last_rD.double() @ target.weight.double().T
    return logits_rV.logsumexp(-1).float(), logits_rV.argmax(-1)


def _compare_costs(device: torch.device) -> None:
    """T 8,192, D 2,048, V 151,936, bf16, one depth: peak memory above the inputs, and time, beside the plain way."""
    batch, hidden, heads, target, _ = _case(device, 8192, 2048, 151_936, torch.bfloat16, depths=1)
    inputs = [hidden[0].requires_grad_(True), heads[0].requires_grad_(True)]
    config = LossConfig()

    def ours() -> Tensor:
        return distill(hidden, heads, batch, target, None, config).parts.sum

    def plain() -> Tensor:
        law_nV = (batch.last_BTD[0, 1:-1] @ target.weight.T).float().softmax(-1)
        return -(law_nV * (hidden[0] @ heads[0].T).float().log_softmax(-1)).sum()

    (peak, seconds), (plain_peak, plain_seconds) = (_costs(way, inputs) for way in (ours, plain))
    print(
        f"- T 8,192, D 2,048, V 151,936, bf16: {peak / 2**30:.2f} GiB above the inputs in {seconds * 1e3:.0f} ms;",
        end=" ",
    )
    print(f"plain {plain_peak / 2**30:.2f} GiB in {plain_seconds * 1e3:.0f} ms")
    check("peak memory, as a share of the plain way's", peak / plain_peak, 0.10)
    check("time, as a share of the plain way's", seconds / plain_seconds, 1.2)


def _costs(way: Callable[[], Tensor], inputs: list[Tensor]) -> tuple[int, float]:
    """Peak bytes above the inputs, gradients included, and the best of three times."""
    best = float("inf")
    for _ in range(4):  # the first compiles
        for x in inputs:
            x.grad = None
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.cuda.synchronize()
        start = time.perf_counter()
        way().backward()
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return torch.cuda.max_memory_allocated() - before, best
