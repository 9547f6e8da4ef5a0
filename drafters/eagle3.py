"""EAGLE-3: one decoder layer that continues the target's own features (Li et al. 2025, arXiv 2503.01840).

At start p the layer reads the embedding of token p + 1 and a state g_p, and predicts token p + 2. At first g_p is a fusion of
three hidden states of the target at p; drafting on, it is the layer's own output. Training imitates that with
`steps` draft depths ("training-time test"): at depth j the query at start p carries the true token p + 1 + j and its own
output of depth j - 1, has rotary position p + j, and sees the depth-0 keys up to p and its own keys of depths 1 to j.

The options of EAGLE-3.1 (arXiv 2605.09992): `fc_norm` normalises each captured state before fusion, `norm_output` feeds the
normalised output back. Parameter names follow the layout that serving engines load (`midlayer.…`, `d2t` as offsets).
Departures: the embedding is the target's, frozen and never stored; head rows start as the target's; probability outside
the draft vocabulary counts as a miss instead of being renormalised away.

Letters: B sequences, T positions, n trained starts, A starts of one sequence, C observed tokens, R queries, S keys, H heads,
E head width, D width, F captured width, W draft vocabulary.
"""

import dataclasses
from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor, nn

from draftsmith.drafters.base import (
    LayerId,
    LossParts,
    Pick,
    Proposal,
    Shape,
    TargetHead,
    TrainableDrafter,
    TrainingBatch,
)
from draftsmith.drafters.grow import Frontier, grow, seen_slots
from draftsmith.drafters.kv import KeyValues, slots_behind
from draftsmith.drafters.layers import MLP, RMSNorm, rotary_tables, rotate
from draftsmith.drafters.losses import Starts, distill, trained_starts
from draftsmith.drafters.tree import Plan
from draftsmith.drafters.vocabulary import choose_draft_vocabulary, offsets


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    layers: tuple[int, ...] | None = None
    """Captured decoder-layer inputs, ascending (Hugging Face `hidden_states` index); default 2, L//2, L-3."""
    draft_vocab_size: int | None = None
    """Tokens the draft can propose, the most frequent ones of the training answers; None means all."""
    steps: int = 3
    """Draft depths unrolled in training (the paper: 7)."""
    decay: float = 0.8
    """Weight of depth j is decay ** j."""
    thin: float = 1.0
    """Share of one depth's starts that the next depth is trained on: less work, the same expected gradient; 1 means all."""
    loss: Literal["soft", "hard"] = "soft"
    """Cross-entropy towards the target's whole law, or towards its most likely token only."""
    norm_before_fc: bool = False
    """One RMS norm over all captured states before fusion."""
    fc_norm: bool = False
    """One RMS norm for each captured state before fusion (EAGLE-3.1); excludes `norm_before_fc`."""
    norm_output: bool = False
    """Feed the normalised output back (EAGLE-3.1)."""
    norm_before_residual: bool = False
    """Residual from the normalised state; few engines can serve it."""
    initialise_head: Literal["target", "random"] = "target"
    """Where the draft head starts."""

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps is {self.steps}; give 1 or more")
        if self.draft_vocab_size is not None and self.draft_vocab_size < 1:
            raise ValueError(f"draft_vocab_size is {self.draft_vocab_size}; give 1 or more, or leave it out")
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay is {self.decay}; give a value above 0, at most 1")
        if not 0 < self.thin <= 1:
            raise ValueError(f"thin is {self.thin}; give a value above 0, at most 1")
        if self.fc_norm and self.norm_before_fc:
            raise ValueError("fc_norm and norm_before_fc exclude each other; set one of them to false")
        if self.layers is not None and list(self.layers) != sorted(set(self.layers)):
            raise ValueError(f"layers is {list(self.layers)}; give distinct layer ids in ascending order")


@dataclasses.dataclass(slots=True)
class State:
    """What EAGLE-3 remembers: its keys and values, and where it stands after the newest observation."""

    cache: KeyValues
    lengths: list[int]
    output_BD: Tensor
    """Layer output for the newest pair (feature of the last committed token but one, root token)."""


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        width = shape.hidden_size
        self.q_proj = nn.Linear(2 * width, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * width, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * width, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, width, bias=False)

    def queries(self, joint_BRD2: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        """Rotated queries, (B, R, heads, E)."""
        return rotate(self.q_proj(joint_BRD2).unflatten(2, (self.heads, self.head_dim)), *tables)

    def keys(self, joint_BRD2: Tensor, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Rotated keys, and values, (B, R, kv heads, E) each."""
        key = self.k_proj(joint_BRD2).unflatten(2, (self.kv_heads, self.head_dim))
        return rotate(key, *tables), self.v_proj(joint_BRD2).unflatten(2, (self.kv_heads, self.head_dim))

    def mix(self, query_BRHE: Tensor, key_BHSE: Tensor, value_BHSE: Tensor, mask_BRS: Tensor) -> Tensor:
        """Attention under a bool mask (B or 1, R, S), before the output projection: (B, R, heads * E)."""
        # Queries that share keys are put below each other: one product for all of them, and no key is repeated.
        group = self.heads // self.kv_heads
        query_BHRE = query_BRHE.transpose(1, 2).unflatten(1, (self.kv_heads, group)).flatten(2, 3)
        mask_B1RS = mask_BRS.repeat(1, group, 1)[:, None]
        mixed = nn.functional.scaled_dot_product_attention(query_BHRE, key_BHSE, value_BHSE, attn_mask=mask_B1RS)
        return mixed.unflatten(2, (group, -1)).flatten(1, 2).transpose(1, 2).flatten(2)


class MidLayer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape.hidden_size, shape.intermediate_size)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)


class Model(TrainableDrafter):
    """The EAGLE-3 head; its arithmetic and names are those that serving engines load."""

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: Config, shape: Shape) -> None:
        super().__init__()
        self.config, self.shape = config, shape
        self.training_depth = config.steps
        layers = config.layers if config.layers is not None else default_layers(shape.num_layers)
        check_layers(layers, shape.num_layers)
        self.feature_layers: tuple[LayerId, ...] = layers
        width = shape.hidden_size
        vocab = config.draft_vocab_size or shape.vocab_size
        if vocab > shape.vocab_size:
            raise ValueError(f"draft_vocab_size is {vocab}, above the target's vocabulary of {shape.vocab_size}")
        self.fc = nn.Linear(len(layers) * width, width, bias=False)
        self.midlayer = MidLayer(shape)
        self.norm = RMSNorm(width, shape.rms_norm_eps)
        self.lm_head = nn.Linear(width, vocab, bias=False)
        if config.norm_before_fc:
            self.input_norm = RMSNorm(len(layers) * width, shape.rms_norm_eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(width, shape.rms_norm_eps) for _ in layers)
        self.register_buffer("d2t", torch.zeros(vocab, dtype=torch.int64))
        self.register_buffer("t2d", torch.ones(shape.vocab_size, dtype=torch.bool))

    def bind(self, target: TargetHead) -> None:
        if target is self.target:
            return
        self.check_target(target.shape)
        self.target = target

    def initialise(self, target: TargetHead, token_counts_V: Tensor, batches: Iterable[TrainingBatch] = ()) -> None:
        self.bind(target)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
        kept_W = choose_draft_vocabulary(token_counts_V, len(self.d2t))
        self.d2t.copy_(offsets(kept_W))
        self.t2d.fill_(False)[kept_W] = True
        if self.config.initialise_head == "target":
            with torch.no_grad():
                self.lm_head.weight.copy_(target.head_weight()[kept_W.to(target.head_weight().device)])

    @property
    def bytes_per_token(self) -> int:  # type: ignore[override]
        return self.shape.kv_bytes(1, self.dtype.itemsize)

    @property
    def token_ids_W(self) -> Tensor | None:
        """Target id of each draft id; None if the draft has the whole vocabulary."""
        if len(self.d2t) == self.shape.vocab_size:
            return None
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    # ---- training -------------------------------------------------------------------------------------------------

    def forward(self, batch: TrainingBatch) -> LossParts:
        """Unrolls `steps` depths. Keys of depth 0 come from all positions, everything else from supervised starts alone."""
        ids_BT, attention, shape = batch.ids_BT, self.midlayer.self_attn, self.shape
        trained_JBT = trained_starts(batch, self.config.steps, self.config.thin)
        position_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
        state_BTD = self.fuse(batch.features_BTF.to(self.fc.weight.dtype))
        next_BT = ids_BT.roll(-1, dims=1)  # wraps at the end, where nothing is trained
        joint_BTD2, _ = self._joint(next_BT, state_BTD)
        tables = rotary_tables(position_T[None], shape.head_dim, shape.rope_theta)
        prefix = attention.keys(joint_BTD2, tables)

        starts = Starts(trained_JBT.any(0))
        state_nD = starts.pick(state_BTD)
        own: list[tuple[Tensor, Tensor]] = []  # each start's keys and values of depths 1, 2, …
        outputs: list[Tensor] = []
        for depth in range(self.config.steps):
            if depth > 0 and self.config.thin < 1:
                fewer = Starts(trained_JBT[depth:].any(0))
                kept = fewer.among(starts)
                starts, state_nD = fewer, state_nD[kept]
                own = [(key[kept], value[kept]) for key, value in own]
            last_n = (starts.starts_n + 1 + depth).clamp_max(ids_BT.shape[1] - 1)
            joint_nD2, residual_nD = self._joint(ids_BT[starts.rows_n, last_n], state_nD)
            tables = rotary_tables((starts.starts_n + depth)[None], shape.head_dim, shape.rope_theta)
            query_nHE = attention.queries(joint_nD2[None], tables)[0]
            if depth > 0:
                key, value = attention.keys(joint_nD2[None], tables)
                own.append((key[0], value[0]))
            mixed_nD = self._attend_starts(starts, query_nHE, prefix, own)
            output_nD, normed_nD = self._finish(residual_nD + attention.o_proj(mixed_nD))
            outputs.append(starts.place(normed_nD))
            state_nD = normed_nD if self.config.norm_output else output_nD
        config, heads = self.config, [self.lm_head.weight]
        hard = config.loss == "hard"
        return distill(outputs, heads, batch, self.target, self.token_ids_W, config.decay, hard=hard, thin=config.thin)

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
        mix = self.midlayer.self_attn.mix
        return starts.unpad(mix(pad(query_nHE), key_BSHE.transpose(1, 2), value_BSHE.transpose(1, 2), seen_BAS))

    def fuse(self, features_BTF: Tensor) -> Tensor:
        """The first state g from the captured hidden states: (B, T, F) → (B, T, D)."""
        if self.config.norm_before_fc:
            features_BTF = self.input_norm(features_BTF)
        if self.config.fc_norm:
            chunks = features_BTF.chunk(len(self.fc_norm), dim=-1)
            features_BTF = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], dim=-1)
        out: Tensor = self.fc(features_BTF)
        return out

    def _joint(self, ids: Tensor, state_D: Tensor) -> tuple[Tensor, Tensor]:
        """Attention input (…, 2D) of pairs of a token (…) and a state (…, D), normalised embedding first; and the residual."""
        normed = self.midlayer.hidden_norm(state_D)
        token = self.midlayer.input_layernorm(self.target.embed(ids).to(self.fc.weight.dtype))
        joint = torch.cat([token.to(normed.dtype), normed], dim=-1)
        return joint, normed if self.config.norm_before_residual else state_D

    def _finish(self, attended_BRD: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's output and what the draft head reads, (B, R, D) each."""
        output = attended_BRD + self.midlayer.mlp(self.midlayer.post_attention_layernorm(attended_BRD))
        return output, self.norm(output)

    # ---- drafting -------------------------------------------------------------------------------------------------

    def compile_drafting(self) -> None:
        self._step = torch.compile(self._step, dynamic=True)  # type: ignore[method-assign]

    def init(self, batch: int, capacity: int) -> State:
        weight = self.fc.weight
        cache = KeyValues(batch, self.shape.num_kv_heads, capacity, self.shape.head_dim, weight.dtype, weight.device)
        return State(cache, [0] * batch, torch.zeros(batch, self.shape.hidden_size, dtype=weight.dtype))

    def observe(self, state: State, ids_BC: Tensor, features_BCF: Tensor, next_B: Tensor, counts: list[int]) -> State:
        counts_B = torch.tensor(counts, device=ids_BC.device)
        following_BC = ids_BC.roll(-1, dims=1)
        following_BC[torch.arange(len(counts)), counts_B - 1] = next_B
        fused_BCD = self.fuse(features_BCF.to(self.fc.weight.dtype))
        output_BCD = self._step(state, state.lengths, following_BC, fused_BCD)
        newest_BD = output_BCD[torch.arange(len(counts)), counts_B - 1]
        lengths = [length + count for length, count in zip(state.lengths, counts, strict=True)]
        return State(state.cache, lengths, newest_BD)

    def propose(self, state: State, plan: Plan, pick: Pick) -> Proposal:
        outputs_BAD = state.output_BD[:, None]  # the root's, then those of the expanded rows

        def expand(frontier: Frontier) -> Tensor:
            nonlocal outputs_BAD
            above_BM = (frontier.parents_bM + 1).expand(len(outputs_BAD), -1)
            fed_BMD = outputs_BAD.gather(1, above_BM[..., None].expand(-1, -1, outputs_BAD.shape[2]))
            fed_BMD = self.norm(fed_BMD) if self.config.norm_output else fed_BMD
            done = outputs_BAD.shape[1] - 1
            output_BMD = self._step(state, state.lengths, frontier.tokens_BM, fed_BMD, done, frontier)
            outputs_BAD = torch.cat([outputs_BAD, output_BMD], 1)
            return self._draft_logits(output_BMD)

        return grow(plan, self._draft_logits(state.output_BD), expand, pick, self.token_ids_W)

    def _draft_logits(self, output: Tensor) -> Tensor:
        out: Tensor = self.lm_head(self.norm(output))
        return out

    def select(self, state: State, rows_B: Tensor) -> State:
        state.cache.select(rows_B)
        return State(state.cache, [state.lengths[row] for row in rows_B.tolist()], state.output_BD[rows_B])

    def replace(self, state: State, rows_B: Tensor, other: State) -> State:
        state.cache.replace(rows_B, other.cache)
        lengths = list(state.lengths)
        for row, length in zip(rows_B.tolist(), other.lengths, strict=True):
            lengths[row] = length
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
        attention, slot_S = self.midlayer.self_attn, torch.arange(slots.extent, device=device)
        if frontier is None:
            position_BR, mask_BRS = slots.index_BR, slot_S <= slots.index_BR[..., None]
        else:
            lengths_B = torch.tensor(lengths, device=device)
            position_BR = (lengths_B + frontier.depth - 1)[:, None].expand_as(token_ids_BR)
            mask_BRS = seen_slots(lengths_B, slots.extent, frontier)
        tables = rotary_tables(position_BR, self.shape.head_dim, self.shape.rope_theta)
        joint, residual = self._joint(token_ids_BR, states_BRD)
        key, value = (x_BRHE.transpose(1, 2) for x_BRHE in attention.keys(joint, tables))
        key, value = state.cache.write(key, value, slots)
        mixed = attention.mix(attention.queries(joint, tables), key, value, mask_BRS)
        return self._finish(residual + attention.o_proj(mixed))[0]


def default_layers(num_layers: int) -> tuple[int, ...]:
    """2, L//2, L-3: where every engine agrees even if the checkpoint does not say."""
    layers = (2, num_layers // 2, num_layers - 3)
    if list(layers) != sorted(set(layers)):
        raise ValueError(
            f"the default layers 2, L//2, L-3 collide for a target of {num_layers} layers ({layers}); "
            "give `layers` explicitly, for example [1, 2, 3]"
        )
    return layers


def check_layers(layers: tuple[int, ...], num_layers: int) -> None:
    wrong = [layer for layer in layers if not 0 < layer <= num_layers]
    if wrong or not layers:
        raise ValueError(
            f"layers is {list(layers)}; the target has {num_layers} layers: give ids from 1 to {num_layers}"
        )
