"""How draft tokens are chosen from draft logits: the three ways behind `drafters.base.Pick`.

- coupled: the largest log draft_prob + g, with the same keyed noise g as the target; for siblings the k largest (for the rule
  `coupled`; Rowan, Phan and Khisti 2025, arXiv 2506.05632, for lists of drafts).
- sample: draws from the draft's law without replacement, from a stream of their own, handing over the laws (for `ratio`, `block`
  and `rrsw`).
- argmax: the draft's most likely tokens, point masses (for every rule that takes fixed drafts).

Letters: B sequences, M nodes, k children of each, W draft vocabulary, V target vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from draftsmith.drafters.base import Drawn, Pick, Picked
from draftsmith.drafters.settings import nearest
from draftsmith.inference import noise, sampling
from draftsmith.inference.sampling import Sampler, most_likely

DRAWN: dict[str, Drawn] = {"coupled": "coupled", "sample": "sampled", "argmax": "fixed"}
"""The ways, and what a proposal made that way is called."""


def default_way(rule: str) -> str:
    """The way of drafting that belongs to a rule."""
    return {"ratio": "sample", "block": "sample", "rrsw": "sample", "point_mass": "argmax", "typical": "argmax"}.get(
        rule, "coupled"
    )


def drawn_by(way: str, greedy: bool) -> Drawn:
    """What a proposal is called; at temperature 0 all ways take the most likely tokens. ValueError for an unknown way."""
    if way not in DRAWN:
        raise ValueError(f"unknown way of drafting {way!r}; {nearest(way, DRAWN)}")
    return "fixed" if greedy and way == "sample" else DRAWN[way]


def make_pick(
    way: str, sampler: Sampler | Sequence[Sampler], seeds_B: Tensor, first_position_B: Tensor, vocab_size: int
) -> Pick:
    """The `Pick` of one round.

    Args:
        way: one of `DRAWN`; at temperature 0 all of them take the most likely tokens.
        sampler: the draft's sampling settings; one for all or one per row.
        seeds_B: int64 seeds of the rows.
        first_position_B: int64 absolute position of the token drafted behind the root.
        vocab_size: size of the target's vocabulary.
    """
    samplers = [sampler] * len(seeds_B) if isinstance(sampler, Sampler) else list(sampler)
    return _Pick(way, [each.drafting() for each in samplers], seeds_B, first_position_B[:, None], vocab_size)


class _Pick:
    def __init__(self, way: str, samplers: list[Sampler], seeds_B: Tensor, first_B1: Tensor, vocab_size: int) -> None:
        self._greedy = all(sampler.greedy for sampler in samplers)
        self.drawn = drawn_by(way, self._greedy)
        self._samplers, self._seeds_B, self._first_B1, self._vocab_size = samplers, seeds_B, first_B1, vocab_size

    def __call__(self, logits_BMW: Tensor, depth: int, token_ids_W: Tensor | None, count: int) -> Picked:
        ids_W = torch.arange(logits_BMW.shape[-1], device=logits_BMW.device) if token_ids_W is None else token_ids_W
        wide_BMW = logits_BMW.to(torch.promote_types(logits_BMW.dtype, torch.float32))
        if self._greedy:
            scores_BMW = wide_BMW
        else:
            log_probs_BMW = sampling.log_probs(self._samplers, logits_BMW, None)
            scores_BMW = self._perturb(log_probs_BMW, wide_BMW, depth, ids_W)
        if count == 1:
            index_BMk = most_likely(scores_BMW)[..., None]
        else:
            index_BMk = scores_BMW.topk(count).indices
        probs_BMkV = None
        if self.drawn == "sampled":
            probs_BMkW = without_replacement(log_probs_BMW.exp(), index_BMk)
            probs_BMkV = probs_BMkW.new_zeros(*index_BMk.shape, self._vocab_size).index_copy_(3, ids_W, probs_BMkW)
        confidence_BMk = scores_BMW.gather(2, index_BMk) - scores_BMW.logsumexp(2, keepdim=True)
        return Picked(ids_W[index_BMk], confidence_BMk, probs_BMkV)

    def _perturb(self, log_probs_BMW: Tensor, logits_BMW: Tensor, depth: int, ids_W: Tensor) -> Tensor:
        """The scores whose largest are taken. One noise vector per position serves all nodes of a depth: along any path all
        positions differ."""
        if self.drawn == "sampled":
            place_B1 = noise.private(self._first_B1, depth)
            return log_probs_BMW + noise.gumbel(self._seeds_B, place_B1, ids_W, noise.DRAFT)
        scores_BMW = log_probs_BMW
        if self.drawn == "coupled":
            scores_BMW = log_probs_BMW + noise.gumbel(self._seeds_B, self._first_B1 + depth, ids_W)
        if any(sampler.greedy for sampler in self._samplers):  # their law is one-hot and says nothing about siblings
            greedy_B = torch.tensor([sampler.greedy for sampler in self._samplers], device=ids_W.device)
            scores_BMW = torch.where(greedy_B[:, None, None], logits_BMW.log_softmax(-1), scores_BMW)
        return scores_BMW


def without_replacement(probs_BMW: Tensor, index_BMk: Tensor) -> Tensor:
    """The law of each draw given the ones before, (B, M, k, W): their tokens zeroed, the rest renormalised; all zero where nothing
    is left."""
    laws, left_BMW = [], probs_BMW
    for k in range(index_BMk.shape[2]):
        mass_BM1 = left_BMW.sum(-1, keepdim=True)
        laws.append(torch.where(mass_BM1 > 0, left_BMW / mass_BM1, 0.0))
        left_BMW = left_BMW.scatter(2, index_BMk[..., k : k + 1], 0.0)
    return torch.stack(laws, 2)
