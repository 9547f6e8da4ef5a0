"""Drafters that continue the target's features one token at a time: one decoder layer that reads a token and a state and whose
output is the next state. What EAGLE-1, EAGLE-3 and multi-token-prediction modules have in common; they differ in how token and
state are joined, in norms, and in the head.

At start p the layer reads the embedding of token p + 1 and a state g_p, and predicts token p + 2. At first g_p comes from the
target's hidden states at p; drafting on, it is the layer's own output. Training imitates that with J depths ("training-time
test", Li et al. 2025, arXiv 2503.01840; Zhang et al. 2024, arXiv 2408.15766): at depth j the query at start p carries the true
token p + 1 + j and its own output of depth j - 1, has rotary position p + j, and sees the depth-0 keys up to p and its own keys of
depths 1 to j.

Letters: B sequences, T positions, n trained starts, A starts of one sequence, C observed tokens, R queries, S keys, H heads,
E head width, D width, I attention input width, F captured width, W draft vocabulary.
"""

import abc
import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from draftsmith.drafters.base import Pick, Proposal, TrainableDrafter, TrainingBatch
from draftsmith.drafters.grow import Frontier, grow, seen_slots
from draftsmith.drafters.kv import KeyValues, slots_behind, with_rows
from draftsmith.drafters.layers import Attention, rotary_tables
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
    """Per depth, at every trained start and 0 elsewhere, (B, T, D): what the head reads, and the layer's output."""

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

    # ---- training ----------------------------------------------------------------------------------------------------

    def unroll(self, batch: TrainingBatch, first_BTD: Tensor, trained_JBT: Tensor, detach: bool = False) -> Unrolled:
        """Runs all depths. Keys of depth 0 come from all positions, everything else from trained starts alone.

        Args:
            batch: the training sequences.
            first_BTD: states of depth 0 (`fuse`).
            trained_JBT: bool, where each depth is trained.
            detach: no gradient flows from one depth to the one before.
        """
        ids_BT, attention, shape = batch.ids_BT, self.attention, self.shape
        position_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
        next_BT = ids_BT.roll(-1, dims=1)  # wraps at the end, where nothing is trained
        tables = rotary_tables(position_T[None], shape.head_dim, shape.rope_theta)
        prefix = attention.keys(self._join_ids(next_BT, first_BTD)[0], tables)

        starts = Starts(trained_JBT.any(0))
        state_nD = starts.pick(first_BTD)
        own: list[tuple[Tensor, Tensor]] = []  # each start's keys and values of depths 1, 2, …
        unrolled = Unrolled([], [])
        for depth in range(len(trained_JBT)):
            if depth > 0 and (fewer := Starts(trained_JBT[depth:].any(0))).count < starts.count:
                kept = fewer.among(starts)
                starts, state_nD = fewer, state_nD[kept]
                own = [(key[kept], value[kept]) for key, value in own]
            last_n = (starts.starts_n + 1 + depth).clamp_max(ids_BT.shape[1] - 1)
            joint_nI, residual_nD = self._join_ids(ids_BT[starts.rows_n, last_n], state_nD)
            tables = rotary_tables((starts.starts_n + depth)[None], shape.head_dim, shape.rope_theta)
            query_nHE = attention.queries(joint_nI[None], tables)[0]
            if depth > 0:
                key, value = attention.keys(joint_nI[None], tables)
                own.append((key[0], value[0]))
            mixed_nD = self._attend_starts(starts, query_nHE, prefix, own)
            output_nD, read_nD = self.finish(residual_nD + attention.o_proj(mixed_nD))
            unrolled.reads.append(starts.place(read_nD))
            unrolled.outputs.append(starts.place(output_nD))
            state_nD = self.feed(output_nD.detach() if detach else output_nD)
        return unrolled

    def _attend_starts(
        self, starts: Starts, query_nHE: Tensor, prefix: tuple[Tensor, Tensor], own: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """Attention of each start to the depth-0 keys up to it (B, T, kv heads, E) and its own later ones (n, kv heads, E)."""

        def pad(x_nHE: Tensor) -> Tensor:
            return starts.pad(x_nHE.flatten(1)).unflatten(2, x_nHE.shape[1:])

        position_T = torch.arange(starts.width, device=query_nHE.device)
        seen_BAT = starts.pad(starts.starts_n[:, None]) >= position_T
        own_BAA = torch.eye(starts.most, dtype=torch.bool, device=query_nHE.device).expand(starts.batch, -1, -1)
        seen_BAS = torch.cat([seen_BAT] + [own_BAA] * len(own), dim=2)
        key_BSHE, value_BSHE = (
            torch.cat([first, *(pad(later) for later in rest)], dim=1)
            for first, *rest in zip(prefix, *own, strict=True)
        )
        mix = self.attention.mix
        return starts.unpad(mix(pad(query_nHE), key_BSHE.transpose(1, 2), value_BSHE.transpose(1, 2), seen_BAS))

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
