"""How draft tokens are chosen from draft logits: the three ways behind `drafters.base.Pick`.

- coupled: the token with the largest log draft_prob + g, with the same keyed noise g as the target (for the rule `coupled`).
- sample: a draw from the draft's law, from a stream of its own, handing over the law (for the rule `ratio`).
- argmax: the draft's most likely token, a point mass (for both rules).
"""

import torch
from torch import Tensor

from draftsmith.drafters.base import Pick
from draftsmith.drafters.settings import nearest
from draftsmith.inference import noise
from draftsmith.inference.sampling import Sampler, most_likely

WAYS = ("coupled", "sample", "argmax")


def default_way(rule: str) -> str:
    """The way of drafting that belongs to a rule."""
    return {"coupled": "coupled", "ratio": "sample"}[rule]


def make_pick(way: str, sampler: Sampler, seeds_B: Tensor, first_position_B: Tensor, vocab_size: int) -> Pick:
    """The `Pick` of one round.

    Args:
        way: one of `WAYS`; at temperature 0 all of them are the argmax.
        sampler: the draft's sampling settings.
        seeds_B: int64 seeds of the rows.
        first_position_B: int64 absolute position of the token drafted at depth 0.
        vocab_size: size of the target's vocabulary.
    """
    if way not in WAYS:
        raise ValueError(f"unknown way of drafting {way!r}; {nearest(way, WAYS)}")

    def pick(logits_BW: Tensor, depth: int, token_ids_W: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if sampler.greedy or way == "argmax":
            index_B = most_likely(logits_BW)
            return (index_B if token_ids_W is None else token_ids_W[index_B]), None
        ids_W = torch.arange(logits_BW.shape[-1], device=logits_BW.device) if token_ids_W is None else token_ids_W
        log_probs_BW = sampler.log_probs(logits_BW)
        positions_B1 = first_position_B[:, None] + depth
        stream = noise.TOKENS if way == "coupled" else noise.DRAFT
        noise_BW = noise.gumbel(seeds_B, positions_B1, ids_W, stream)[:, 0]
        tokens_B = ids_W[most_likely(log_probs_BW + noise_BW)]
        if way == "coupled":
            return tokens_B, None
        probs_BV = log_probs_BW.new_zeros(len(logits_BW), vocab_size)
        probs_BV[:, ids_W] = log_probs_BW.exp()
        return tokens_B, probs_BV

    return pick
