"""The decode loop: draft, verify in one target pass, accept a prefix, emit one token more. Plain decoding is the same loop
without a drafter.

Rows of a batch accept different lengths; a row's tokens do not depend on its neighbours. Per round there is one target
forward and one device-to-host read. The newest token of a row (its root) is committed but not yet read by the target; it
is the first row of the next round, so committing costs no forward.

Letters: B sequences, T prompt tokens, R rows (root first), P = draft depth.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from draftsmith.drafters import tree
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.settings import nearest
from draftsmith.inference.drafting import WAYS, default_way, make_pick
from draftsmith.inference.sampling import Sampler
from draftsmith.inference.target import Target
from draftsmith.inference.verify import LOSSLESS, RULES, Keys, emit


@dataclasses.dataclass(frozen=True, slots=True)
class Speculation:
    """How to speculate.

    Attributes:
        drafter: proposes tokens.
        depth: K, tokens drafted per round, 1 or more.
        rule: name of the verification rule (`verify.RULES`).
        way: how draft tokens are chosen (`drafting.WAYS`); None takes the one that belongs to the rule.
    """

    drafter: Drafter
    depth: int
    rule: str = "coupled"
    way: str | None = None

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise ValueError(f"unknown verification rule {self.rule!r}; {nearest(self.rule, RULES)}")
        if self.depth < 1:
            raise ValueError(f"draft depth K is {self.depth}; give 1 or more, or no drafter for plain decoding")
        if self.drafter.max_depth is not None and self.depth > self.drafter.max_depth:
            raise ValueError(f"draft depth K is {self.depth}; this drafter proposes at most {self.drafter.max_depth}")
        if self.way is not None and self.way not in WAYS:
            raise ValueError(f"unknown way of drafting {self.way!r}; {nearest(self.way, WAYS)}")
        if self.rule == "ratio" and self.way == "coupled":
            raise ValueError("the ratio rule is biased under coupled drafts; use way 'sample', or the rule 'coupled'")

    @property
    def lossless(self) -> bool:
        return LOSSLESS[self.rule]


@dataclasses.dataclass(slots=True)
class Output:
    """One sequence's result.

    Attributes:
        ids: new tokens, the prompt excluded, an end-of-sequence token included.
        finished: it ended with an end-of-sequence token (otherwise by the budget).
        rounds: (proposed, accepted, committed) of each round, committed counted after truncation.
    """

    ids: list[int] = dataclasses.field(default_factory=list)
    finished: bool = False
    rounds: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(slots=True)
class Seconds:
    """Wall time by part, summed over rounds."""

    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    other: float = 0.0
    rounds: int = 0

    @property
    def decode(self) -> float:
        return self.draft + self.verify + self.other


OnTokens = Callable[[int, list[int], int], None]
"""Called with (row, newly committed tokens, how many of them were drafted)."""


@torch.inference_mode()
def generate(
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    max_new: int,
    sampler: Sampler,
    speculation: Speculation | None = None,
    seeds: Sequence[int] | None = None,
    stop_at_eos: bool = True,
    on_tokens: OnTokens | None = None,
    seconds: Seconds | None = None,
) -> list[Output]:
    """Decodes all prompts as one batch. The law of the output is the target's, with or without speculation.

    Args:
        target: the frozen target.
        prompts: token ids, at least one each.
        max_new: token budget of each row, 1 or more.
        sampler: sampling settings, of target and draft alike.
        speculation: None for plain decoding.
        seeds: one per prompt; rows with the same seed and prompt get the same tokens. Default 0, 1, 2, …
        stop_at_eos: end a row at the target's end-of-sequence tokens.
        on_tokens: called for every row and round, for streaming.
        seconds: filled with times if given (synchronises an accelerator per part).

    Raises:
        ValueError: an empty prompt, no budget, or prompt and budget beyond the target's positions.
    """
    _check(target, prompts, max_new, seeds)
    seconds = seconds if seconds is not None else Seconds()
    clock = _Clock(target.device)
    device, greedy = target.device, sampler.greedy
    drafter = speculation.drafter if speculation else None
    depth = speculation.depth if speculation else 0
    layers = drafter.feature_layers if drafter else ()
    rule = RULES[speculation.rule] if speculation else RULES["coupled"]
    stops = set(target.eos_ids) if stop_at_eos else set()
    outputs = [Output() for _ in prompts]
    rows = list(range(len(prompts)))  # which prompt each batch row belongs to
    seeds_B = torch.tensor(list(seeds) if seeds is not None else rows, dtype=torch.int64, device=device)

    def commit(row: int, tokens: list[int], drafted: int) -> int:
        """Adds tokens to a prompt's output, cut at the first stop and at the budget; returns how many stayed."""
        output = outputs[row]
        kept = tokens[: max_new - len(output.ids)]
        for index, token in enumerate(kept):
            if token in stops:
                kept, output.finished = kept[: index + 1], True
                break
        output.ids += kept
        if on_tokens is not None:
            on_tokens(row, kept, min(drafted, len(kept)))
        return len(kept)

    # Prefill: one pass over all prompts, logits for the last token of each only.
    counts = [len(prompt) for prompt in prompts]
    ids_BT = pad_ids(prompts).to(device)
    cache = target.new_cache(len(prompts), max(counts) + max_new + 2 * depth + 1)
    out = target.forward(ids_BT, cache, layers, logits_at_B=torch.tensor(counts, device=device) - 1)
    cache.commit(counts)
    positions_B1 = torch.tensor(counts, device=device)[:, None]
    root_B = emit(sampler.log_probs(out.logits), Keys(seeds_B, positions_B1, greedy))[:, 0]
    if drafter:
        drafter.bind(target)
        state = drafter.init(len(prompts), cache.capacity)
        state = drafter.observe(state, ids_BT, out.features, root_B, counts)
    for row, token in enumerate(root_B.tolist()):
        commit(row, [token], 0)
    seconds.prefill += clock.lap()

    while True:
        alive = [index for index, row in enumerate(rows) if not _done(outputs[row], max_new)]
        if not alive:
            break
        if len(alive) <= 0.75 * len(rows):
            keep_B = torch.tensor(alive, device=device)
            rows = [rows[index] for index in alive]
            cache.select(keep_B)
            seeds_B, root_B = seeds_B[keep_B], root_B[keep_B]
            if drafter:
                state = drafter.select(state, keep_B)
        lengths_B = torch.tensor(cache.lengths, device=device)
        seconds.other += clock.lap()

        proposal = None
        if speculation and drafter:
            way = speculation.way or default_way(speculation.rule)
            pick = make_pick(way, sampler, seeds_B, lengths_B + 1, target.shape.vocab_size)
            proposal = drafter.propose(state, depth, pick)
        seconds.draft += clock.lap()

        parents = proposal.parents_N if proposal else ()
        ids_BR = root_B[:, None] if proposal is None else torch.cat([root_B[:, None], proposal.tokens_BN], 1)
        depth_R = torch.tensor(tree.depths(parents), device=device)
        ancestors_RR = None if tree.is_chain(parents) else tree.ancestor_mask(parents).to(device)
        out = target.forward(ids_BR, cache, layers, depth_R=depth_R, ancestors_RR=ancestors_RR)
        keys = Keys(seeds_B, lengths_B[:, None] + 1 + depth_R, greedy)
        log_probs_BRV = sampler.log_probs(out.logits)
        if proposal is None:
            read = [[0, token] for token in emit(log_probs_BRV, keys)[:, 0].tolist()]  # the round's one read
        else:
            verdict = rule(proposal, log_probs_BRV, keys)
            read = torch.cat([verdict.num_accepted_B[:, None], verdict.emitted_BP], 1).tolist()  # the round's one read
        seconds.verify += clock.lap()

        # Everything below knows the outcome on the host. A row that is done and waits in the batch stands still: it would
        # outgrow the cache.
        counts = []
        for index, (accepted, *emitted) in enumerate(read):
            output, waits = outputs[rows[index]], _done(outputs[rows[index]], max_new)
            counts.append(0 if waits else 1 + accepted)
            if not waits:
                committed = commit(rows[index], emitted[: accepted + 1], accepted)
                output.rounds.append((max(tree.depths(parents)), accepted, committed))
        root_B = torch.tensor([emitted[accepted] for accepted, *emitted in read], device=device)
        path_BP = None if tree.is_chain(parents) else verdict.rows_BP
        cache.commit(counts, path_BP)
        seconds.other += clock.lap()
        if drafter:
            features = out.features
            if path_BP is not None:
                ids_BR = ids_BR.gather(1, path_BP)
                features = features.gather(1, path_BP[..., None].expand(-1, -1, features.shape[-1]))
            state = drafter.observe(state, ids_BR, features, root_B, counts)
        seconds.draft += clock.lap()
        seconds.rounds += 1
    return outputs


def _done(output: Output, max_new: int) -> bool:
    return output.finished or len(output.ids) >= max_new


def _check(target: Target, prompts: Sequence[Sequence[int]], max_new: int, seeds: Sequence[int] | None) -> None:
    if not prompts or not all(prompts):
        raise ValueError("every prompt needs at least one token")
    if max_new < 1:
        raise ValueError(f"max_new is {max_new}; give 1 or more")
    if seeds is not None and len(seeds) != len(prompts):
        raise ValueError(f"{len(seeds)} seeds for {len(prompts)} prompts; give one each")
    longest = max(map(len, prompts))
    if longest + max_new > target.shape.max_positions:
        raise ValueError(
            f"a prompt of {longest} tokens and {max_new} new ones exceed the target's {target.shape.max_positions} "
            "positions; shorten the prompt or the budget"
        )


class _Clock:
    """Laps of wall time; waits for an accelerator so that each part pays for its own work."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last = time.perf_counter()

    def lap(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = time.perf_counter()
        elapsed, self._last = now - self._last, now
        return elapsed


def pad_ids(sequences: Sequence[Sequence[int]]) -> Tensor:
    """Right-padded int64 (B, T); padding is 0 and must be masked or ignored."""
    padded_BT = torch.zeros(len(sequences), max(map(len, sequences)), dtype=torch.int64)
    for row, sequence in enumerate(sequences):
        padded_BT[row, : len(sequence)] = torch.tensor(sequence)
    return padded_BT
