"""How far a draft law q is from the target's law p, with the gradient towards the draft's logits: one small family for all kinds.

p is normalised over the *whole* target vocabulary and given inside the draft vocabulary only (and there, if so chosen, on its k
likeliest tokens), where its mass may be below 1: what lies outside is a miss that nothing can mend, never renormalised away.
α = Σ min(p, q) is the chance that the ratio test accepts.

- kl: -Σ p log q, forward KL up to the target's entropy (EAGLE-3, Li et al. 2025, arXiv 2503.01840)
- ce: the same towards the target's most likely token alone
- reverse_kl: Σ q log(q / p) (Gu et al. 2023, arXiv 2306.08543)
- jsd: Jensen-Shannon, ½ Σ p log(p / m) + ½ Σ q log(q / m) with m = (p + q) / 2 (Agarwal et al. 2023, arXiv 2306.13649)
- tv: total variation, 1 - α (DistillSpec, Zhou et al. 2023, arXiv 2310.08461)
- nla: -log α
- lk: λ KL + (1 - λ) TV with λ = exp(-η α), not differentiated: KL where the draft is poor, acceptance itself where it is good
  (LK losses, Samarin et al. 2026, arXiv 2602.23881; theirs takes one λ per depth from the batch's mean α, this one per token,
  so that no token's loss depends on what else is in the batch)
- top_k_weight adds that much of -Σ p log q over the k tokens of the draft vocabulary that the target finds likeliest (HASS,
  Zhang et al. 2024, arXiv 2408.15766)

Letters: r rows, W draft vocabulary.
"""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Name = Literal["kl", "ce", "reverse_kl", "jsd", "tv", "nla", "lk"]


class Laws(NamedTuple):
    """Both laws at r rows; fp32 or wider.

    Attributes:
        logits_rW: the draft's.
        logsumexp_r: of them.
        draft_rW: q.
        target_rW: p inside the draft vocabulary.
        mass_r: its sum.
    """

    logits_rW: Tensor
    logsumexp_r: Tensor
    draft_rW: Tensor
    target_rW: Tensor
    mass_r: Tensor


Divergence = Callable[[Laws], tuple[Tensor, Tensor]]
"""Loss (r) and its gradient towards the logits (r, W)."""


def overlap(laws: Laws) -> Tensor:
    """α = Σ min(p, q), (r)."""
    return torch.minimum(laws.draft_rW, laws.target_rW).sum(1)


def kl(laws: Laws) -> tuple[Tensor, Tensor]:
    # -Σ p log q = mass · logsumexp(z) - p · z, which needs no log-probability per token.
    loss_r = laws.mass_r * laws.logsumexp_r - (laws.target_rW * laws.logits_rW).sum(1)
    return loss_r, laws.draft_rW * laws.mass_r[:, None] - laws.target_rW


def reverse_kl(laws: Laws) -> tuple[Tensor, Tensor]:
    ratio_rW = laws.logits_rW - laws.logsumexp_r[:, None] - _log(laws.target_rW)
    return (laws.draft_rW * ratio_rW).sum(1), _through_softmax(laws.draft_rW, ratio_rW)


def jsd(laws: Laws) -> tuple[Tensor, Tensor]:
    log_middle_rW = _log((laws.draft_rW + laws.target_rW) / 2)
    draft_rW = laws.logits_rW - laws.logsumexp_r[:, None] - log_middle_rW
    target_r = (laws.target_rW * (_log(laws.target_rW) - log_middle_rW)).sum(1)
    outside_r = (1 - laws.mass_r).clamp_min(0) * math.log(2)  # there the middle is half the target
    loss_r = (target_r + outside_r + (laws.draft_rW * draft_rW).sum(1)) / 2
    return loss_r, _through_softmax(laws.draft_rW, draft_rW / 2)


def tv(laws: Laws) -> tuple[Tensor, Tensor]:
    return 1 - overlap(laws), _through_softmax(laws.draft_rW, -(laws.draft_rW < laws.target_rW).to(laws.draft_rW.dtype))


def nla(laws: Laws) -> tuple[Tensor, Tensor]:
    alpha_r = overlap(laws).clamp_min(torch.finfo(laws.draft_rW.dtype).tiny)
    return -alpha_r.log(), tv(laws)[1] / alpha_r[:, None]


def lk(laws: Laws, eta: float) -> tuple[Tensor, Tensor]:
    share_r = torch.exp(-eta * overlap(laws))
    (kl_r, kl_rW), (tv_r, tv_rW) = kl(laws), tv(laws)
    loss_r = share_r * kl_r + (1 - share_r) * tv_r
    return loss_r, share_r[:, None] * kl_rW + (1 - share_r)[:, None] * tv_rW


def top_k(laws: Laws, k: int) -> tuple[Tensor, Tensor]:
    best_rk = laws.target_rW.topk(min(k, laws.target_rW.shape[1]), dim=1)
    kept_rW = torch.zeros_like(laws.target_rW).scatter_(1, best_rk.indices, best_rk.values)
    return kl(laws._replace(target_rW=kept_rW, mass_r=best_rk.values.sum(1)))


def choose(name: Name, eta: float, k: int, top_k_weight: float) -> Divergence:
    """The divergence that a config asks for; "ce" is "kl" towards a one-hot target, which the caller makes."""
    plain: dict[str, Divergence] = {"kl": kl, "ce": kl, "reverse_kl": reverse_kl, "jsd": jsd, "tv": tv, "nla": nla}
    first = plain[name] if name != "lk" else lambda laws: lk(laws, eta)
    if top_k_weight == 0:
        return first

    def both(laws: Laws) -> tuple[Tensor, Tensor]:
        (loss_r, grad_rW), (more_r, more_rW) = first(laws), top_k(laws, k)
        return loss_r + top_k_weight * more_r, grad_rW + top_k_weight * more_rW

    return both


def _log(probs_rW: Tensor) -> Tensor:
    return probs_rW.clamp_min(torch.finfo(probs_rW.dtype).tiny).log()


def _through_softmax(draft_rW: Tensor, grad_rW: Tensor) -> Tensor:
    """The gradient towards the logits from that towards the probabilities."""
    return draft_rW * (grad_rW - (draft_rW * grad_rW).sum(1, keepdim=True))
