"""Verification rules: pure tensor functions from (proposal, target law, noise) to (accepted path, next token).

`coupled` is the default: at each position the target emits argmax(log target_prob + g) with g keyed by seed and position,
whatever was drafted, so its law is the target's by construction and the same seed gives the same tokens with and without
speculation. Drafts that use the same g agree often (Daliri, Musco and Suresh 2024, arXiv 2408.07978). At temperature 0 it
is the ordinary greedy rule. `ratio` is the textbook rule (Leviathan et al. 2022, arXiv 2211.17192; Chen et al. 2023,
arXiv 2302.01318). Shared noise is exact only under `coupled`; `ratio` draws from streams of its own.

Letters: B sequences, N drafted nodes, R = N + 1 rows (root first), P depth, V target vocabulary.
"""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from draftsmith.drafters import tree
from draftsmith.drafters.base import Proposal
from draftsmith.inference import noise
from draftsmith.inference.sampling import most_likely


@dataclasses.dataclass(frozen=True, slots=True)
class Keys:
    """What the noise of a round is keyed by.

    Attributes:
        seeds_B: int64, one per sequence.
        positions_BR: int64, absolute position of the token that each row's law is about.
        greedy: no noise at all (temperature 0).
    """

    seeds_B: Tensor
    positions_BR: Tensor
    greedy: bool


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


Rule = Callable[[Proposal, Tensor, Keys], Verdict]


def coupled(proposal: Proposal, log_probs_BRV: Tensor, keys: Keys) -> Verdict:
    """Accepts the path on which every node equals the token that the target emits at its parent. Lossless for any draft."""
    return follow(proposal, emit(log_probs_BRV, keys))


def emit(log_probs_BRV: Tensor, keys: Keys) -> Tensor:
    """The target's own tokens, int64 (B, R): a draw from each row's law by the Gumbel-max trick; plain decoding is this alone."""
    if keys.greedy:
        return most_likely(log_probs_BRV)
    token_ids_V = torch.arange(log_probs_BRV.shape[-1], device=log_probs_BRV.device)
    return most_likely(log_probs_BRV + noise.gumbel(keys.seeds_B, keys.positions_BR, token_ids_V))


def follow(proposal: Proposal, choice_BR: Tensor) -> Verdict:
    """Walks down from the root while a node equals the token chosen at its parent; siblings must be distinct."""
    tokens_BN, parents = proposal.tokens_BN, proposal.parents_N
    alive_BR = torch.ones_like(choice_BR, dtype=torch.bool)
    for node, parent in enumerate(parents):
        alive_BR[:, node + 1] = alive_BR[:, parent + 1] & (tokens_BN[:, node] == choice_BR[:, parent + 1])
    depth_R = torch.tensor(tree.depths(parents), device=choice_BR.device)
    end_B = (alive_BR * (depth_R + 1)).argmax(1)
    rows_BP = tree.path_rows(parents).to(choice_BR.device)[end_B]
    return Verdict(depth_R[end_B], rows_BP, choice_BR.gather(1, rows_BP))


def ratio(proposal: Proposal, log_probs_BRV: Tensor, keys: Keys) -> Verdict:
    """Accepts a drafted token with probability min(1, target/draft), else draws from the normalised positive difference.

    Lossless for chains whose `probs_BNV` are exactly the laws the tokens were drawn from; without them the draft counts as a
    point mass. At temperature 0 both laws are one-hot and this is the greedy rule.

    Raises:
        ValueError: the proposal is not a chain.
    """
    if not tree.is_chain(proposal.parents_N):
        raise ValueError("the ratio rule verifies chains only; use the rule 'coupled' for a tree")
    tokens_BN, target_probs_BRV = proposal.tokens_BN, log_probs_BRV.exp()
    num_nodes = tokens_BN.shape[1]
    draft_probs_BNV = proposal.probs_BNV
    if draft_probs_BNV is None:
        draft_probs_BNV = torch.zeros_like(target_probs_BRV[:, :-1]).scatter_(-1, tokens_BN[..., None], 1.0)
    draft_probs_BNV = draft_probs_BNV.to(target_probs_BRV.dtype)
    coins_BN = noise.coins(keys.seeds_B, keys.positions_BR[:, :-1], noise.ACCEPT).to(target_probs_BRV.dtype)
    accept_BN = coins_BN < accept_probability(proposal, target_probs_BRV, draft_probs_BNV)
    num_accepted_B = accept_BN.long().cumprod(1).sum(1)

    batch = torch.arange(len(tokens_BN), device=tokens_BN.device)
    law_BV = residual(target_probs_BRV, draft_probs_BNV)[batch, num_accepted_B]
    position_B1 = keys.positions_BR.gather(1, num_accepted_B[:, None])
    token_ids_V = torch.arange(law_BV.shape[-1], device=law_BV.device)
    noise_BV = noise.gumbel(keys.seeds_B, position_B1, token_ids_V, noise.RESIDUAL)[:, 0]
    next_B = most_likely(law_BV.log() + noise_BV)
    rows_BP = torch.arange(num_nodes + 1, device=tokens_BN.device).minimum(num_accepted_B[:, None])
    emitted_BP = torch.cat([tokens_BN, next_B[:, None]], 1).scatter(1, num_accepted_B[:, None], next_B[:, None])
    return Verdict(num_accepted_B, rows_BP, emitted_BP)


def accept_probability(proposal: Proposal, target_probs_BRV: Tensor, draft_probs_BNV: Tensor) -> Tensor:
    """min(1, target/draft) of each drafted token, (B, N); 0 where the target gives it no mass."""
    tokens_BN1 = proposal.tokens_BN[..., None]
    target_BN = target_probs_BRV[:, :-1].gather(-1, tokens_BN1)[..., 0]
    draft_BN = draft_probs_BNV.gather(-1, tokens_BN1)[..., 0]
    return (target_BN / draft_BN.clamp_min(torch.finfo(draft_BN.dtype).tiny)).clamp_max(1.0)


def residual(target_probs_BRV: Tensor, draft_probs_BNV: Tensor) -> Tensor:
    """The law of the next token if row r is where the path ends, (B, R, V), rows summing to 1: the normalised positive part of
    target - draft, and behind the last node the target's law itself. Where rounding leaves no positive part, the target's."""
    difference = (target_probs_BRV[:, :-1] - draft_probs_BNV).clamp_min(0)
    mass = difference.sum(-1, keepdim=True)
    law = torch.where(mass > 0, difference / mass.clamp_min(torch.finfo(mass.dtype).tiny), target_probs_BRV[:, :-1])
    return torch.cat([law, target_probs_BRV[:, -1:]], dim=1)


RULES: dict[str, Rule] = {"coupled": coupled, "ratio": ratio}
LOSSLESS = {"coupled": True, "ratio": True}
