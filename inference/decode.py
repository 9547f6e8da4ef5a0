"""The decode loop: draft, verify in one target pass, accept a prefix, emit one token more. Plain decoding is the same loop
without a drafter.

Rows of a batch accept different lengths, stop at different times, and are given to waiting prompts when they are free; a
sequence's tokens do not depend on its neighbours. Per round there is one target forward and one device-to-host read. The newest
token of a row (its root) is committed but not yet read by the target; it is the first row of the next round, so committing
costs no forward.

Letters: B sequences of a batch, T prompt tokens, R rows (root first), P = draft depth, V vocabulary.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from draftsmith.drafters.base import Proposal
from draftsmith.drafters.tree import Fixed, Tree, fixed, scratch_rows
from draftsmith.inference import sampling
from draftsmith.inference.cache import KVCache
from draftsmith.inference.drafting import make_pick
from draftsmith.inference.output import Output, Round, Seconds
from draftsmith.inference.sampling import Prefix, Sampler
from draftsmith.inference.speculation import Speculation
from draftsmith.inference.stopping import Stopper, Stopping
from draftsmith.inference.target import Target
from draftsmith.inference.verify import Keys, verify

ADMITTED_TOGETHER = 8
"""Free rows wait for each other until they are this part of the batch: a pass over four prompts of a hundred tokens takes little
longer than one over a single prompt."""

OnTokens = Callable[[int, list[int], int], None]
"""Called with (number of the prompt, newly committed tokens, how many of them were drafted)."""


@torch.inference_mode()
def generate(
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    max_new: int | Sequence[int],
    sampler: Sampler | Sequence[Sampler],
    speculation: Speculation | None = None,
    seeds: Sequence[int] | None = None,
    stop_at_eos: bool = True,
    stopping: Stopping | None = None,
    max_batch: int | None = None,
    log_probs: bool = False,
    drafts: bool = False,
    on_tokens: OnTokens | None = None,
    seconds: Seconds | None = None,
) -> list[Output]:
    """Decodes all prompts. The law of each output is the target's, with or without speculation.

    Args:
        target: the frozen target.
        prompts: token ids, at least one each; the same prompt several times gives several samples.
        max_new: token budget, 1 or more; one for all or one per prompt.
        sampler: sampling settings; one for all or one per prompt.
        speculation: None for plain decoding.
        seeds: one per prompt; prompts with the same tokens, settings and seed get the same output. Default 0, 1, 2, …
        stop_at_eos: end a sequence at the target's end-of-sequence tokens.
        stopping: what else ends a sequence.
        max_batch: sequences decoded together; others wait and take over rows that become free. None means all.
        log_probs: fill `Output.log_probs`.
        drafts: fill `Output.drafts`.
        on_tokens: called for every sequence and round, for streaming.
        seconds: filled with times if given (synchronises an accelerator per part).

    Raises:
        ValueError: an empty prompt, no budget, or prompt and budget beyond the target's positions.
    """
    samplers = _each(sampler, prompts, "samplers")
    budgets = _each(max_new, prompts, "budgets")
    seeds = list(range(len(prompts))) if seeds is None else list(seeds)
    _check(target, prompts, budgets, seeds, max_batch)
    stopping = stopping or Stopping()
    loop = _Loop(
        target=target,
        prompts=prompts,
        samplers=samplers,
        budgets=budgets,
        seeds=seeds,
        speculation=speculation,
        stopper=Stopper(stopping, target.eos_ids if stop_at_eos else (), target.tokenizer),
        deadline=None if stopping.max_seconds is None else time.perf_counter() + stopping.max_seconds,
        log_probs=log_probs,
        drafts=drafts,
        on_tokens=on_tokens,
        seconds=seconds if seconds is not None else Seconds(),
    )
    loop.run(min(max_batch or len(prompts), len(prompts)))
    return loop.outputs


class _Loop:
    """One call of `generate`. Batch row i belongs to prompt `rows[i]`; a row whose prompt is done is free, and stands still."""

    def __init__(
        self,
        *,
        target: Target,
        prompts: Sequence[Sequence[int]],
        samplers: Sequence[Sampler],
        budgets: Sequence[int],
        seeds: Sequence[int],
        speculation: Speculation | None,
        stopper: Stopper,
        deadline: float | None,
        log_probs: bool,
        drafts: bool,
        on_tokens: OnTokens | None,
        seconds: Seconds,
    ) -> None:
        self.target, self.prompts, self.samplers, self.budgets = target, prompts, samplers, budgets
        self.seeds, self.speculation, self.stopper, self.deadline = seeds, speculation, stopper, deadline
        self.log_probs, self.drafts, self.on_tokens, self.seconds = log_probs, drafts, on_tokens, seconds
        self.outputs = [Output() for _ in prompts]
        self.drafter = speculation.drafter if speculation else None
        self.plan = speculation.plan if speculation else Fixed(())
        self.layers = self.drafter.feature_layers if self.drafter else ()
        longest = max(len(prompt) + budget for prompt, budget in zip(prompts, budgets, strict=True))
        self.capacity = longest + self.plan.depth + scratch_rows(self.plan)
        self.nothing = fixed((), target.device)
        self.waiting = deque(range(len(prompts)))
        self.rows: list[int] = []
        self.cache: KVCache
        self.state: Any = None
        self.seeds_B: Tensor
        self.root_B: Tensor

    def run(self, batch: int) -> None:
        if self.drafter:
            self.drafter.bind(self.target)
        clock = _Clock(self.target.device)
        self.admit([*range(batch)])
        self.seconds.prefill += clock.lap()
        while True:
            if self.late():
                while self.waiting:  # no token, no text: nobody began with them
                    self.outputs[self.waiting.popleft()].reason = "time"
            free = [i for i, number in enumerate(self.rows) if self.outputs[number].reason]
            if self.waiting and len(free) >= min(max(1, len(self.rows) // ADMITTED_TOGETHER), len(self.waiting)):
                self.admit(free[: len(self.waiting)])
                self.seconds.prefill += clock.lap()
                continue  # a prompt may be done with its first token
            if len(free) == len(self.rows):
                break
            if len(free) >= 0.25 * len(self.rows):
                self.keep([i for i in range(len(self.rows)) if i not in free])
            self.round(clock)
        for output in self.outputs:
            output.text = self.stopper.text(output.ids)

    # ---- rows ---------------------------------------------------------------------------------------------------------

    def admit(self, rows: list[int]) -> None:
        """Gives rows to the prompts that have waited longest: one pass over them, logits for the last token of each only."""
        target, device = self.target, self.target.device
        numbers = [self.waiting.popleft() for _ in rows]
        prompts = [self.prompts[number] for number in numbers]
        counts = [len(prompt) for prompt in prompts]
        ids_BT, counts_B = pad_ids(prompts).to(device), torch.tensor(counts, device=device)
        cache = target.new_cache(len(rows), self.capacity)
        out = target.forward(ids_BT, cache, self.layers, logits_at_B=counts_B - 1)
        cache.commit(counts)
        seeds_B = torch.tensor([self.seeds[number] for number in numbers], dtype=torch.int64, device=device)
        root_B = self.emit(out.logits, numbers, seeds_B, counts_B)
        state = None
        if self.drafter:
            state = self.drafter.init(len(rows), self.capacity)
            state = self.drafter.observe(state, ids_BT, out.features, root_B, counts)
        if not self.rows:
            self.rows, self.cache, self.state, self.seeds_B, self.root_B = numbers, cache, state, seeds_B, root_B
        else:
            rows_B = torch.tensor(rows, device=device)
            for row, number in zip(rows, numbers, strict=True):
                self.rows[row] = number
            self.cache.replace(rows_B, cache)
            self.seeds_B, self.root_B = (
                old_B.index_copy(0, rows_B, new_B) for old_B, new_B in ((self.seeds_B, seeds_B), (self.root_B, root_B))
            )
            if self.drafter:
                self.state = self.drafter.replace(self.state, rows_B, state)
        emitted_B1, raw_B1 = root_B[:, None], self.raw_log_probs(out.logits, root_B[:, None])
        for number, (token, *raw) in zip(numbers, _read(emitted_B1, raw_B1), strict=True):
            self.commit(number, [int(token)], raw, 0)

    def keep(self, rows: list[int]) -> None:
        """Drops all other rows from the batch."""
        keep_B = torch.tensor(rows, device=self.target.device)
        self.rows = [self.rows[row] for row in rows]
        self.cache.select(keep_B)
        self.seeds_B, self.root_B = self.seeds_B[keep_B], self.root_B[keep_B]
        if self.drafter:
            self.state = self.drafter.select(self.state, keep_B)

    def commit(self, number: int, tokens: list[int], raw: list[float], drafted: int) -> int:
        """Adds tokens to a prompt's output, cut where it ends; returns how many stayed."""
        output = self.outputs[number]
        kept, output.reason = self.stopper.cut(self.prompts[number], output.ids, tokens, self.budgets[number])
        output.ids += tokens[:kept]
        output.log_probs += raw[:kept]
        if self.on_tokens is not None:
            self.on_tokens(number, tokens[:kept], min(drafted, kept))
        return kept

    # ---- one round ----------------------------------------------------------------------------------------------------

    def round(self, clock: "_Clock") -> None:
        """Draft, verify, commit, and show the drafter what was committed."""
        target, device = self.target, self.target.device
        lengths_B = torch.tensor(self.cache.lengths, device=device)
        self.seconds.other += clock.lap()
        drafting = self.can_draft()
        proposal = self.propose(lengths_B) if drafting else None
        self.seconds.draft += clock.lap()

        tree = proposal.tree if proposal else self.nothing
        ids_BR = self.root_B[:, None] if proposal is None else torch.cat([self.root_B[:, None], proposal.tokens_BN], 1)
        out = target.forward(ids_BR, self.cache, self.layers, tree=tree)
        self.seconds.verify += clock.lap()
        log_probs_BRV, keys = self.law(out.logits, self.rows, self.seeds_B, lengths_B + 1, ids_BR, tree)
        if self.speculation is None or proposal is None:
            emitted_BP, accepted_B, path_BP = keys.emit(log_probs_BRV), torch.zeros_like(self.root_B), None
            end_B = accepted_B
        else:
            decided = verify(self.speculation.rule, proposal, log_probs_BRV, keys)
            emitted_BP, accepted_B, path_BP = decided.emitted_BP, decided.num_accepted_B, decided.rows_BP
            end_B = path_BP[:, -1]
        raw_BP = self.raw_log_probs(out.logits, emitted_BP, path_BP)
        drafted_BN = ids_BR[:, 1:] if self.drafts else ids_BR[:, :0]
        read = _read(accepted_B[:, None], end_B[:, None], emitted_BP, raw_BP, drafted_BN)  # the round's one read

        # Everything below knows the outcome on the host.
        late = self.late()
        counts, roots, width = [], [], tree.depth + 1
        for number, (a, end, *values) in zip(self.rows, read, strict=True):
            output, accepted, emitted = self.outputs[number], int(a), [int(token) for token in values[:width]]
            counts.append(0 if output.reason else 1 + accepted)
            roots.append(emitted[accepted])
            if not output.reason:
                committed = self.commit(number, emitted[: accepted + 1], values[width : width + accepted + 1], accepted)
                output.rounds.append(Round(tree.depth, accepted, committed, tree.num_nodes))
                output.ends.append(int(end))
                if self.drafts:
                    output.drafts.append([int(token) for token in values[len(values) - tree.num_nodes :]])
                if late and not output.reason:
                    output.reason = "time"
        self.root_B = torch.tensor(roots, device=device)
        path_BP = None if tree.is_chain else path_BP
        self.cache.commit(counts, path_BP)
        self.seconds.other += clock.lap()
        if self.drafter and drafting:
            features = out.features
            if path_BP is not None:
                ids_BR = ids_BR.gather(1, path_BP)
                features = features.gather(1, path_BP[..., None].expand(-1, -1, features.shape[-1]))
            self.state = self.drafter.observe(self.state, ids_BR, features, self.root_B, counts)
        self.seconds.draft += clock.lap()
        self.seconds.rounds += 1

    def late(self) -> bool:
        return self.deadline is not None and time.perf_counter() > self.deadline

    def can_draft(self) -> bool:
        """Whether some sequence is within the drafter's positions; one that has left them never comes back."""
        if self.drafter is None or self.drafter.max_positions is None:
            return self.drafter is not None
        lengths = zip(self.rows, self.cache.lengths, strict=True)
        shortest = min(length for number, length in lengths if not self.outputs[number].reason)
        return shortest + 1 + self.plan.depth <= self.drafter.max_positions

    def propose(self, lengths_B: Tensor) -> Proposal:
        assert self.speculation is not None
        samplers = [self.speculation.sampler or self.samplers[number] for number in self.rows]
        way, vocab_size = self.speculation.drafting_way, self.target.shape.vocab_size
        pick = make_pick(way, samplers, self.seeds_B, lengths_B + 1, vocab_size)
        return self.speculation.drafter.propose(self.state, self.plan, pick)

    def emit(self, logits_B1V: Tensor, numbers: list[int], seeds_B: Tensor, positions_B: Tensor) -> Tensor:
        """The first new token of each prompt, int64 (B,)."""
        ids_B1 = torch.zeros_like(seeds_B)[:, None]  # the root's row: no token below it
        law_B1V, keys = self.law(logits_B1V, numbers, seeds_B, positions_B, ids_B1, self.nothing)
        return keys.emit(law_B1V)[:, 0]

    def law(
        self, logits_BRV: Tensor, numbers: list[int], seeds_B: Tensor, positions_B: Tensor, ids_BR: Tensor, tree: Tree
    ) -> tuple[Tensor, Keys]:
        """The target's law at every row under each sequence's settings, as log-probabilities, and the chance that goes with it."""
        samplers = [self.samplers[number] for number in numbers]
        prefix = None
        if any(sampler.needs_prefix for sampler in samplers):
            outputs = [self.outputs[number] for number in numbers]
            prefix = Prefix(
                [self.prompts[number] for number in numbers],
                [output.ids for output in outputs],
                ids_BR,
                tree,
                [output.reason is None for output in outputs],
            )
        keys = Keys(seeds_B, positions_B[:, None] + tree.depth_bR, all(sampler.greedy for sampler in samplers))
        return sampling.log_probs(samplers, logits_BRV, prefix), keys

    def raw_log_probs(self, logits_BRV: Tensor, emitted_BP: Tensor, path_BP: Tensor | None = None) -> Tensor:
        """Log-probability of each emitted token under the target's own law, (B, P); empty if nobody asked."""
        if not self.log_probs:
            return emitted_BP[:, :0]
        if path_BP is not None:
            logits_BRV = logits_BRV.gather(1, path_BP[..., None].expand(-1, -1, logits_BRV.shape[-1]))
        wide = logits_BRV.to(torch.promote_types(logits_BRV.dtype, torch.float32))
        return wide.log_softmax(-1).gather(2, emitted_BP[..., None])[..., 0]


def _read(*parts_B: Tensor) -> list[list[float]]:
    """Brings everything to the host at once, (B, all columns); fp64 holds token ids and fp32 exactly."""
    rows: list[list[float]] = torch.cat([part.double() for part in parts_B], 1).tolist()
    return rows


def _each(value: Any, prompts: Sequence[Any], what: str) -> list[Any]:
    """One value per prompt, from one for all or from a list."""
    values = list(value) if isinstance(value, Sequence) else [value] * len(prompts)
    if len(values) != len(prompts):
        raise ValueError(f"{len(values)} {what} for {len(prompts)} prompts; give one each, or one for all")
    return values


def _check(
    target: Target, prompts: Sequence[Sequence[int]], budgets: list[int], seeds: list[int], max_batch: int | None
) -> None:
    if not prompts or not all(prompts):
        raise ValueError("every prompt needs at least one token")
    if min(budgets) < 1:
        raise ValueError(f"max_new is {min(budgets)}; give 1 or more")
    if max_batch is not None and max_batch < 1:
        raise ValueError(f"max_batch is {max_batch}; give 1 or more, or leave it out")
    if len(seeds) != len(prompts):
        raise ValueError(f"{len(seeds)} seeds for {len(prompts)} prompts; give one each")
    for prompt, budget in zip(prompts, budgets, strict=True):
        if len(prompt) + budget > target.shape.max_positions:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens and {budget} new ones exceed the target's {target.shape.max_positions} "
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
