"""From logits to probabilities: one sampler for target and draft, for plain and for speculative decoding.

Order as in Hugging Face's generate: temperature, then top-k, then top-p. Temperature 0 is a one-hot law, so greedy decoding
needs no second path anywhere.
"""

import dataclasses
import math

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Sampler:
    """Sampling settings; calling `log_probs` applies them.

    Attributes:
        temperature: 0 or more; 0 is greedy.
        top_k: keep the k most likely tokens; None keeps all.
        top_p: keep the smallest set of most likely tokens whose mass reaches top_p; 1 keeps all.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise ValueError(f"temperature is {self.temperature}; give 0 (greedy) or more")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}; give 1 or more, or leave it out")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; give a value above 0, at most 1")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def log_probs(self, logits: Tensor) -> Tensor:
        """Log-probabilities of the warped law, same shape (…, V), fp32 (fp64 for fp64 logits); -inf where it is 0."""
        exact = torch.promote_types(logits.dtype, torch.float32)
        if self.greedy:
            one_hot = torch.full_like(logits, -math.inf, dtype=exact)
            return one_hot.scatter_(-1, most_likely(logits)[..., None], 0.0)
        wide = logits.to(exact)
        scores = (wide - wide.amax(-1, keepdim=True)) / self.temperature  # the largest is 0: no temperature overflows
        if self.top_k is not None and self.top_k < scores.shape[-1]:
            kth = scores.topk(self.top_k, dim=-1).values[..., -1:]
            scores = scores.masked_fill(scores < kth, -math.inf)
        if self.top_p < 1:
            scores = _keep_top_p(scores, self.top_p)
        return scores.log_softmax(-1)


def most_likely(scores: Tensor) -> Tensor:
    """Index of the largest score, the first of equals, int64 (…): on a CPU, argmax takes four times as long as max."""
    return scores.max(-1).indices


def _keep_top_p(scores: Tensor, top_p: float) -> Tensor:
    """Masks the least likely tokens whose total mass is at most 1 - top_p; the most likely token always stays."""
    ascending, order = scores.sort(dim=-1)
    below = ascending.softmax(-1).cumsum(-1)
    drop = below <= 1 - top_p
    drop[..., -1] = False
    return scores.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), -math.inf)
