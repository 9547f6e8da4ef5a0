"""Verification rules: pure tensor functions from (proposal, target law, chance) to (accepted path, next token).

`coupled` is the default: at each position the target emits argmax(log target_prob + g) with g keyed by seed and position,
whatever was drafted, so its law is the target's by construction and the same seed gives the same tokens with and without
speculation. Drafts that use the same g agree often (Daliri, Musco and Suresh 2024, arXiv 2408.07978). At temperature 0 it
is the ordinary greedy rule. The others draw from streams of their own and stand beside it:

- ratio: the textbook rule for a sampled chain (Leviathan et al. 2022, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318).
- block: accepts or rejects a sampled chain jointly, never fewer tokens in expectation (Sun et al. 2024, arXiv 2403.10444).
- rrsw: siblings sampled without replacement, tried in turn (recursive rejection sampling, Jeon et al. 2024, arXiv 2402.14160).
- point_mass: siblings fixed by the context, tried in turn: a rejected one is removed and the rest renormalised (EAGLE-2).
- typical: what is likely enough is accepted (Cai et al. 2024, arXiv 2401.10774). Not lossless.

A rule refuses, by name, a proposal it is not exact for.

Letters: B sequences, N drafted nodes, R = N + 1 rows (root first), P depth, V target vocabulary.
"""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from draftsmith.drafters.base import Drawn, Proposal
from draftsmith.inference import noise
from draftsmith.inference.sampling import most_likely

TYPICAL_THRESHOLD, TYPICAL_ALPHA = 0.09, 0.3
"""The typical rule accepts a token of probability above min(threshold, alpha * exp(-entropy)); Medusa's defaults."""


@dataclasses.dataclass(frozen=True, slots=True)
class Keys:
    """All chance that a rule may use, keyed so that it does not depend on the batch.

    Attributes:
        seeds_B: int64, one per sequence.
        positions_BR: int64, absolute position of the token that each row's law is about; the root's comes first.
        greedy: no noise at all (temperature 0).
    """

    seeds_B: Tensor
    positions_BR: Tensor
    greedy: bool

    def emit(self, log_probs_BRV: Tensor) -> Tensor:
        """The target's own token at each row, int64 (B, R): a draw by the Gumbel-max trick, from the noise that coupled drafts
        share. Plain decoding is this alone."""
        if self.greedy:
            return most_likely(log_probs_BRV)
        token_ids_V = torch.arange(log_probs_BRV.shape[-1], device=log_probs_BRV.device)
        return most_likely(log_probs_BRV + noise.gumbel(self.seeds_B, self.positions_BR, token_ids_V))

    def accept(self, probability_B: Tensor, use: int) -> Tensor:
        """True with the given probability, bool (B,): an independent coin for each `use` within a round."""
        place_B1 = noise.private(self.positions_BR[:, :1], use)
        coins_B = noise.coins(self.seeds_B, place_B1, noise.ACCEPT)[:, 0]
        return coins_B.to(probability_B.dtype) < probability_B  # strict: nothing of probability 0 passes

    def draw(self, law_BV: Tensor) -> Tensor:
        """A token from each row's law, int64 (B,); once per round."""
        token_ids_V = torch.arange(law_BV.shape[-1], device=law_BV.device)
        place_B1 = noise.private(self.positions_BR[:, :1], 0)
        return most_likely(law_BV.log() + noise.gumbel(self.seeds_B, place_B1, token_ids_V, noise.RESIDUAL)[:, 0])


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """What the target decided.

    Attributes:
        num_accepted_B: int64, accepted drafted tokens, 0 to P.
        rows_BP: int64 (B, P + 1), the accepted path as rows, root first; entries behind num_accepted + 1 repeat its end.
        emitted_BP: int64 (B, P + 1), the tokens to emit: the accepted ones, then the target's own; the rest is padding.
    """

    num_accepted_B: Tensor
    rows_BP: Tensor
    emitted_BP: Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """A rule and what it is exact for.

    Attributes:
        decide: (proposal, log_probs_BRV, keys) -> Verdict.
        drawn: where drafted tokens may come from.
        trees: whether it verifies more than chains.
        lossless: whether the output has the target's law.
    """

    decide: Callable[[Proposal, Tensor, Keys], Verdict]
    drawn: tuple[Drawn, ...]
    trees: bool
    lossless: bool


def verify(rule: str, proposal: Proposal, log_probs_BRV: Tensor, keys: Keys) -> Verdict:
    """Decides by the rule of that name, after `check`."""
    check(rule, proposal.drawn, proposal.tree.is_chain)
    return RULES[rule].decide(proposal, log_probs_BRV, keys)


def check(rule: str, drawn: Drawn, is_chain: bool) -> None:
    """ValueError if a rule is not exact for such proposals; it names one that is."""
    if drawn not in RULES[rule].drawn or not (is_chain or RULES[rule].trees):
        shape = "chain" if is_chain else "tree"
        takes = {name: other for name, other in RULES.items() if drawn in other.drawn and (is_chain or other.trees)}
        exact = [name for name, other in takes.items() if other.lossless]
        raise ValueError(f"the rule {rule!r} cannot verify a {drawn} {shape}; use {' or '.join(map(repr, exact))}")


# ---- rules ------------------------------------------------------------------------------------------------------------


def coupled(proposal: Proposal, log_probs_BRV: Tensor, keys: Keys) -> Verdict:
    """Accepts the path on which every node equals the token that the target emits at its parent. Lossless for any draft."""
    return follow(proposal, keys.emit(log_probs_BRV))


def follow(proposal: Proposal, choice_BR: Tensor) -> Verdict:
    """Walks down from the root while a node equals the token chosen at its parent."""
    up_BN = proposal.tree.up_bR[:, 1:].expand_as(proposal.tokens_BN)
    end_B = deepest(proposal, proposal.tokens_BN == choice_BR.gather(1, up_BN))
    return verdict(proposal, end_B, choice_BR.gather(1, end_B[:, None])[:, 0])


def deepest(proposal: Proposal, passes_BN: Tensor) -> Tensor:
    """The deepest row, int64 (B,), that is reached through nodes that pass; the first of equally deep ones."""
    tree, batch = proposal.tree, len(passes_BN)
    passes_BR = torch.nn.functional.pad(passes_BN, (1, 0), value=True)
    if tree.is_chain:
        return passes_BR.long().cumprod(1).sum(1) - 1
    up_BR, reached_BR = tree.up_bR.expand(batch, -1), passes_BR
    for _ in range(tree.depth):
        reached_BR = passes_BR & reached_BR.gather(1, up_BR)
    return (reached_BR * (tree.depth_bR + 1)).argmax(1)


def verdict(proposal: Proposal, end_B: Tensor, next_B: Tensor) -> Verdict:
    """The path that ends at row `end_B`, followed by the token `next_B`."""
    tree, tokens_BN = proposal.tree, proposal.tokens_BN
    if tree.is_chain:
        accepted_B = end_B
        rows_BP = torch.arange(tree.depth + 1, device=end_B.device).minimum(end_B[:, None])
    else:
        accepted_B = tree.depth_bR.expand(len(end_B), -1).gather(1, end_B[:, None])[:, 0]
        rows_BP = tree.paths(end_B)
    tokens_BR = torch.nn.functional.pad(tokens_BN, (1, 0))
    emitted_BP = torch.nn.functional.pad(tokens_BR.gather(1, rows_BP[:, 1:]), (0, 1))
    return Verdict(accepted_B, rows_BP, emitted_BP.scatter(1, accepted_B[:, None], next_B[:, None]))


def try_in_turn(proposal: Proposal, log_probs_BRV: Tensor, keys: Keys) -> Verdict:
    """Walks down from the root: the children of a node are tried one after the other, each accepted with probability
    min(1, target/draft); after a rejection the target's law becomes the normalised positive part of target - draft, and what
    is left of it where no child is accepted gives the next token.

    The draft's law is the one each token was drawn from, or all mass on the token if it was fixed. With one child per node
    this is the textbook rule, with siblings drawn without replacement it is RRSw, with fixed siblings EAGLE-2's rule.
    """
    target_probs_BRV, tokens_BN = log_probs_BRV.exp(), proposal.tokens_BN
    above_BN = proposal.tree.up_bR[:, 1:].expand_as(tokens_BN)
    here_B, law_BV = torch.zeros_like(keys.seeds_B), target_probs_BRV[:, 0]
    for node in range(proposal.tree.num_nodes):
        token_B, tried_B = tokens_BN[:, node], here_B == above_BN[:, node]
        draft_BV = draft_law(proposal, node, law_BV)
        accepted_B = tried_B & keys.accept(accept_probability(token_B, law_BV, draft_BV), node)
        left_BV = torch.where((tried_B & ~accepted_B)[:, None], residual(law_BV, draft_BV), law_BV)
        law_BV = torch.where(accepted_B[:, None], target_probs_BRV[:, node + 1], left_BV)
        here_B = torch.where(accepted_B, node + 1, here_B)
    return verdict(proposal, here_B, keys.draw(law_BV))


def draft_law(proposal: Proposal, node: int, like_BV: Tensor) -> Tensor:
    """The law that a node's token was drawn from, (B, V): what was handed over, or all mass on the token itself."""
    if proposal.probs_BNV is not None:
        return proposal.probs_BNV[:, node].to(like_BV.dtype)
    return torch.zeros_like(like_BV).scatter_(1, proposal.tokens_BN[:, node, None], 1.0)


def accept_probability(token_B: Tensor, target_BV: Tensor, draft_BV: Tensor) -> Tensor:
    """min(1, target/draft) of a drafted token, (B,); 0 where target or draft give it no mass."""
    target_B, draft_B = (law_BV.gather(1, token_B[:, None])[:, 0] for law_BV in (target_BV, draft_BV))
    return torch.where(draft_B > 0, target_B / draft_B, 0.0).clamp_max(1.0)


def residual(target_BV: Tensor, draft_BV: Tensor) -> Tensor:
    """The law of the token after a rejection, (B, V): the normalised positive part of target - draft; the target's where rounding
    leaves none."""
    difference_BV = (target_BV - draft_BV).clamp_min(0)
    mass_B1 = difference_BV.sum(-1, keepdim=True)
    return torch.where(mass_B1 > 0, difference_BV / mass_B1.clamp_min(torch.finfo(mass_B1.dtype).tiny), target_BV)


def block(proposal: Proposal, log_probs_BRV: Tensor, keys: Keys) -> Verdict:
    """Accepts the longest prefix whose own coin falls below its chance (`block_step`); the next token comes from what the target's
    weighted law has left behind it."""
    target_probs_BRV, tokens_BN, depth = log_probs_BRV.exp(), proposal.tokens_BN, proposal.tree.depth
    weight_B = torch.ones_like(target_probs_BRV[:, 0, 0])
    end_B, law_BV = torch.zeros_like(keys.seeds_B), target_probs_BRV[:, 0]
    for length in range(depth + 1):
        target_BV = target_probs_BRV[:, length]
        draft_BV = draft_law(proposal, length, target_BV) if length < depth else None
        chance_B, next_BV = block_step(weight_B, target_BV, draft_BV)
        taken_B = keys.accept(chance_B, length) if length else torch.ones_like(weight_B, dtype=torch.bool)
        end_B = torch.where(taken_B, length, end_B)
        law_BV = torch.where(taken_B[:, None], next_BV, law_BV)
        if draft_BV is not None:
            weight_B = block_weight(weight_B, tokens_BN[:, length], target_BV, draft_BV)
    return verdict(proposal, end_B, keys.draw(law_BV))


def block_weight(weight_B: Tensor, token_B: Tensor, target_BV: Tensor, draft_BV: Tensor) -> Tensor:
    """w_i = min(1, w_{i-1} target/draft) of a prefix, (B,); 0 where the draft gives the token no mass."""
    target_B, draft_B = (law_BV.gather(1, token_B[:, None])[:, 0] for law_BV in (target_BV, draft_BV))
    return torch.where(draft_B > 0, weight_B * target_B / draft_B, 0.0).clamp_max(1.0)


def block_step(weight_B: Tensor, target_BV: Tensor, draft_BV: Tensor | None) -> tuple[Tensor, Tensor]:
    """The chance h of a prefix of weight w, (B,), and the law of the token behind it, (B, V): h = S / (S + 1 - w), S the mass of
    the positive part of w target - draft, which is the law, normalised; behind the last token (no draft) h = w and the target's."""
    if draft_BV is None:
        return weight_B, target_BV
    left_BV = (weight_B[:, None] * target_BV - draft_BV).clamp_min(0)
    mass_B1 = left_BV.sum(1, keepdim=True)
    chance_B = torch.where(mass_B1[:, 0] > 0, mass_B1[:, 0] / (mass_B1[:, 0] + 1 - weight_B), 0.0)
    return chance_B, torch.where(mass_B1 > 0, left_BV / mass_B1, target_BV)


def typical(proposal: Proposal, log_probs_BRV: Tensor, keys: Keys) -> Verdict:
    """Accepts every token whose probability exceeds min(threshold, alpha * exp(-entropy)); the token behind the path is a draw from
    the target's law. Not lossless: the output's law depends on the draft."""
    probs_BRV, tokens_BN = log_probs_BRV.exp(), proposal.tokens_BN
    entropy_BR = torch.special.entr(probs_BRV).sum(-1)
    threshold_BR = (TYPICAL_ALPHA * (-entropy_BR).exp()).clamp_max(TYPICAL_THRESHOLD)
    up_BN = proposal.tree.up_bR[:, 1:].expand_as(tokens_BN)
    probs_BNV = probs_BRV.gather(1, up_BN[..., None].expand(-1, -1, probs_BRV.shape[2]))
    probs_BN = probs_BNV.gather(2, tokens_BN[..., None])[..., 0]
    end_B = deepest(proposal, probs_BN > threshold_BR.gather(1, up_BN))
    law_BV = probs_BRV.gather(1, end_B[:, None, None].expand(-1, 1, probs_BRV.shape[2]))[:, 0]
    return verdict(proposal, end_B, keys.draw(law_BV))


RULES: dict[str, Rule] = {
    "coupled": Rule(coupled, ("coupled", "sampled", "fixed"), trees=True, lossless=True),
    "ratio": Rule(try_in_turn, ("sampled", "fixed"), trees=False, lossless=True),
    "block": Rule(block, ("sampled", "fixed"), trees=False, lossless=True),
    "rrsw": Rule(try_in_turn, ("sampled", "fixed"), trees=True, lossless=True),
    "point_mass": Rule(try_in_turn, ("fixed",), trees=True, lossless=True),
    "typical": Rule(typical, ("coupled", "sampled", "fixed"), trees=True, lossless=False),
}
