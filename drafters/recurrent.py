"""Drafters that continue the target's features one token at a time: one decoder layer that reads a token and a state and whose
output is the next state. What EAGLE-1, EAGLE-3 and multi-token-prediction modules have in common; they differ in how token and
state are joined, in norms, and in the head.

At start p the layer reads the embedding of token p + 1 and a state g_p, and predicts token p + 2. At first g_p comes from the
target's hidden states at p; drafting on, it is the layer's own output. Training imitates that with J depths ("training-time
test", Li et al. 2025, arXiv 2503.01840; Zhang et al. 2024, arXiv 2408.15766): at depth j the query at start p carries the true
token p + 1 + j and its own output of depth j - 1, has rotary position p + j, and sees the depth-0 keys up to p and its own keys of
depths 1 to j.

Letters: J depths, B rows, T places, N = B T, n starts at which a depth runs, C observed tokens, R queries, S keys, H heads, E head
width, D width, I attention input width, F captured width, W draft vocabulary.
"""

import abc
import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from draftsmith.drafters.attention import attend
from draftsmith.drafters.base import Load, Pick, Proposal, TrainableDrafter, TrainingBatch
from draftsmith.drafters.grow import Frontier, grow, seen_slots
from draftsmith.drafters.kv import KeyValues, slots_behind, with_rows
from draftsmith.drafters.layers import Attention, rotary_tables
from draftsmith.drafters.layout import sent
from draftsmith.drafters.starts import Starts
from draftsmith.drafters.tree import Plan


@dataclasses.dataclass(slots=True)
class State:
    """What the layer remembers: its keys and values, and where it stands after the newest observation."""

    cache: KeyValues
    lengths: list[int]
    output_BD: Tensor
    """Layer output for the newest pair (feature of the last committed token but one, root token)."""


class Unrolled(NamedTuple):
    """Per depth, at the starts where it is trained, (n, D): what the head reads, and the layer's output."""

    reads: list[Tensor]
    outputs: list[Tensor]


class RecurrentDrafter(TrainableDrafter):
    """One decoder layer that continues features; a kind says how it is put together."""

    # ---- what a kind says --------------------------------------------------------------------------------------------

    @property
    @abc.abstractmethod
    def attention(self) -> Attention:
        """The layer's attention; its input is what `join` makes."""

    @abc.abstractmethod
    def fuse(self, features_BTF: Tensor) -> Tensor:
        """The first state g from the captured hidden states: (B, T, F) → (B, T, D)."""

    @abc.abstractmethod
    def join(self, embedded: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Attention input (…, I) of an embedded token and a state (…, D each), and the residual (…, D)."""

    @abc.abstractmethod
    def finish(self, attended: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's output and what the head reads, (…, D) each, from residual plus attention."""

    @abc.abstractmethod
    def feed(self, output: Tensor) -> Tensor:
        """The next state from the layer's output, (…, D)."""

    @abc.abstractmethod
    def draft_logits(self, output: Tensor) -> Tensor:
        """Logits (…, W) from the layer's output (…, D)."""

    def positions(self, name: str, load: Load) -> float:
        """The layer continues itself: every depth runs through it."""
        return self.draft_positions(load)

    # ---- training ----------------------------------------------------------------------------------------------------

    def unroll(self, batch: TrainingBatch, first_BTD: Tensor, trained_JBT: Tensor, detach: bool = False) -> Unrolled:
        """Runs all depths. Keys of depth 0 come from all places, everything else from trained starts alone.

        Args:
            batch: the training texts.
            first_BTD: states of depth 0 (`fuse`).
            trained_JBT: bool, where each depth is trained, on the host.
            detach: no gradient flows from one depth to the one before.
        """
        device = first_BTD.device
        joint_1NI, residual_1ND = (x.flatten(0, 1)[None] for x in self._join_ids(batch.next_BT, first_BTD))
        tables_N = self._tables(sent(batch.layout.position_N, device))
        prefix = [x_1NHE[0] for x_1NHE in self.attention.keys(joint_1NI, tables_N)]

        starts = Starts.round_number(batch, trained_JBT.any(0))
        joint_nI, residual_nD = (starts.among_places(x_1NX[0]) for x_1NX in (joint_1NI, residual_1ND))
        own: list[tuple[Tensor, Tensor]] = []  # each start's keys and values of depths 1, 2, …
        unrolled, state_nD = Unrolled([], []), residual_nD
        for depth in range(len(trained_JBT)):
            if depth > 0:
                fewer = Starts.round_number(batch, trained_JBT[depth:].any(0))
                state_nD = fewer.of(starts, state_nD)
                own = [(fewer.of(starts, key), fewer.of(starts, value)) for key, value in own]
                starts = fewer
                joint_nI, residual_nD = self._join_ids(starts.ids_at(1 + depth), state_nD)
            tables = self._tables(sent(starts.position_n + depth, device))
            output_nD, read_nD, *new = self.recomputed(
                self._run_depth, starts, depth, tables, joint_nI, residual_nD, prefix, own
            )
            own = [*own, (new[0], new[1])] if new else own  # a new list: what is recomputed reads the old one
            trained = Starts.where(batch, trained_JBT[depth])
            unrolled.reads.append(trained.of(starts, read_nD))
            unrolled.outputs.append(trained.of(starts, output_nD))
            state_nD = self.feed(output_nD.detach() if detach else output_nD)
        return unrolled

    def _run_depth(
        self,
        starts: Starts,
        depth: int,
        tables: tuple[Tensor, Tensor],
        joint_nI: Tensor,
        residual_nD: Tensor,
        prefix: list[Tensor],
        own: list[tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, ...]:
        """The layer's output, what the head reads and, of depths above 0, the new keys and values, at n starts."""
        attention = self.attention
        query_nHE = attention.queries(joint_nI[None], tables)[0]
        new: tuple[Tensor, ...] = ()
        if depth > 0:
            new = tuple(x_1nHE[0] for x_1nHE in attention.keys(joint_nI[None], tables))
            own = [*own, (new[0], new[1])]
        key, value = prefix
        own_nMHE = (torch.stack([k for k, _ in own], 1), torch.stack([v for _, v in own], 1)) if own else None
        mixed_nX = attend(starts, query_nHE[:, None], (key, value), own_nMHE)[:, 0]
        return *self.finish(residual_nD + attention.o_proj(mixed_nX)), *new

    def _tables(self, position_n: Tensor) -> tuple[Tensor, Tensor]:
        return rotary_tables(position_n[None], self.shape.head_dim, self.shape.rope_theta)

    def _join_ids(self, ids: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return self.join(self.target.embed(ids).to(self.dtype), state)

    # ---- drafting ----------------------------------------------------------------------------------------------------

    @property
    def bytes_per_token(self) -> int:  # type: ignore[override]
        return self.shape.kv_bytes(1, self.dtype.itemsize)

    def compile_drafting(self) -> None:
        self._step = torch.compile(self._step, dynamic=True)  # type: ignore[method-assign]

    def init(self, batch: int, capacity: int) -> State:
        device, dtype = self.attention.q_proj.weight.device, self.dtype
        cache = KeyValues(batch, self.shape.num_kv_heads, capacity, self.shape.head_dim, dtype, device)
        return State(cache, [0] * batch, torch.zeros(batch, self.shape.hidden_size, dtype=dtype))

    def observe(self, state: State, ids_BC: Tensor, features_BCF: Tensor, next_B: Tensor, counts: list[int]) -> State:
        counts_B = torch.tensor(counts, device=ids_BC.device)
        following_BC = ids_BC.roll(-1, dims=1)
        following_BC[torch.arange(len(counts)), counts_B - 1] = next_B
        fused_BCD = self.fuse(features_BCF.to(self.dtype))
        output_BCD = self._step(state, state.lengths, following_BC, fused_BCD)
        newest_BD = output_BCD[torch.arange(len(counts)), counts_B - 1]
        lengths = [length + count for length, count in zip(state.lengths, counts, strict=True)]
        return State(state.cache, lengths, newest_BD)

    def propose(self, state: State, plan: Plan, pick: Pick) -> Proposal:
        outputs_BAD = state.output_BD[:, None]  # the root's, then those of the expanded rows

        def expand(frontier: Frontier) -> Tensor:
            nonlocal outputs_BAD
            above_BM = (frontier.parents_bM + 1).expand(len(outputs_BAD), -1)
            fed_BMD = self.feed(outputs_BAD.gather(1, above_BM[..., None].expand(-1, -1, outputs_BAD.shape[2])))
            done = outputs_BAD.shape[1] - 1
            output_BMD = self._step(state, state.lengths, frontier.tokens_BM, fed_BMD, done, frontier)
            outputs_BAD = torch.cat([outputs_BAD, output_BMD], 1)
            return self.draft_logits(output_BMD)

        return grow(plan, self.draft_logits(state.output_BD), expand, pick, self.token_ids_W)

    def select(self, state: State, rows_B: Tensor) -> State:
        state.cache.select(rows_B)
        return State(state.cache, [state.lengths[row] for row in rows_B.tolist()], state.output_BD[rows_B])

    def replace(self, state: State, rows_B: Tensor, other: State) -> State:
        state.cache.replace(rows_B, other.cache)
        lengths = with_rows(state.lengths, rows_B, other.lengths)
        return State(state.cache, lengths, state.output_BD.index_copy(0, rows_B, other.output_BD))

    def _step(
        self,
        state: State,
        lengths: list[int],
        token_ids_BR: Tensor,
        states_BRD: Tensor,
        behind: int = 0,
        frontier: Frontier | None = None,
    ) -> Tensor:
        """Runs the layer on R pairs `behind` each row's `lengths` cached ones: (B, R, D). They are consecutive tokens, or the
        nodes of a frontier."""
        device = token_ids_BR.device
        slots = slots_behind([length + behind for length in lengths], token_ids_BR.shape[1], device)
        attention, slot_S = self.attention, torch.arange(slots.extent, device=device)
        if frontier is None:
            position_BR, mask_BRS = slots.index_BR, slot_S <= slots.index_BR[..., None]
        else:
            lengths_B = torch.tensor(lengths, device=device)
            position_BR = (lengths_B + frontier.depth - 1)[:, None].expand_as(token_ids_BR)
            mask_BRS = seen_slots(lengths_B, slots.extent, frontier)
        tables = rotary_tables(position_BR, self.shape.head_dim, self.shape.rope_theta)
        joint, residual = self._join_ids(token_ids_BR, states_BRD)
        key, value = (x_BRHE.transpose(1, 2) for x_BRHE in attention.keys(joint, tables))
        key, value = state.cache.write(key, value, slots)
        mixed = attention.mix(attention.queries(joint, tables), key, value, mask_BRS)
        return self.finish(residual + attention.o_proj(mixed))[0]
