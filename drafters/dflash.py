"""DFlash: a small transformer that drafts a whole block in one pass, with the target's features injected as keys and values into
every layer (arXiv 2602.06036); with the corrections of DSpark (arXiv 2607.05147) as options.

At start p the block is the embedding of token p + 1 (the anchor; when decoding, the root) and one learned vector, the mask, for
every further entry. Entry i has rotary position p + 1 + i, sees all entries of its own block, and in each layer that layer's keys
and values of c_q = RMSNorm(W_c [captured states at q]) for all q up to p, at rotary position q. Entry i predicts token p + 1 + i,
the anchor nothing: depth j is entry j + 1. With `anchor_predicts` (DSpark) entry i predicts token p + 2 + i: depth j is entry j.

The depths do not see each other's tokens. DSpark's low-rank Markov term mends that: the logits of depth j gain
W2 W1[token p + 1 + j], the true token in training and the drafted one in decoding, so that nodes of one depth differ. Its
confidence head is a linear map of the state, trained towards the overlap α of that depth; it is stored and can be asked
(`confidence`), and verification never does.

Training draws some starts of each sequence (`anchors`). The published weights exp(-j / γ) are loss.decay = exp(-1 / γ): 0.867,
0.819 and 0.779 for blocks of 16, 10 and 8. DSpark's 0.1 CE + 0.9 |p - q|₁ is, as |p - q|₁ = 2 TV and up to scale, {divergence: tv,
top_k_weight: 0.056, top_k: 10}, with cross entropy towards the target's ten likeliest tokens in place of one drawn from its law.

Departures: the mask is a vector of its own instead of a reserved token's; no norms on queries and keys; soft labels.

Letters: B sequences, T positions, n anchors, Q block entries, J depths, C observed tokens, M nodes, H heads, S keys, E head width,
D width, X another width, F captured width, r Markov rank, V target vocabulary, W draft vocabulary.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import cast

import torch
from torch import Tensor, nn

from draftsmith.drafters.anchors import anchor_weights
from draftsmith.drafters.attention import attend
from draftsmith.drafters.base import (
    LayerId,
    Load,
    LossParts,
    Pick,
    Proposal,
    Shape,
    TargetHead,
    TrainableDrafter,
    TrainingBatch,
)
from draftsmith.drafters.eagle3 import check_ascending, check_layers
from draftsmith.drafters.grow import Frontier, grow
from draftsmith.drafters.kv import KeyValues, Slots, slots_behind, with_rows
from draftsmith.drafters.layers import Attention, Block, RMSNorm, rotary_tables
from draftsmith.drafters.layout import sent
from draftsmith.drafters.losses import Distilled, LossConfig, distill
from draftsmith.drafters.starts import Starts
from draftsmith.drafters.tree import Plan
from draftsmith.drafters.vocabulary import check_draft_vocab_size, choose_offsets, draft_vocab_size


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    num_layers: int = 5
    """Decoder layers of the draft."""
    block_size: int = 16
    """Entries of a block, the anchor included. It drafts one token less, with `anchor_predicts` as many."""
    layers: tuple[int, ...] | None = None
    """Captured decoder-layer inputs, ascending (Hugging Face `hidden_states` index); default five, evenly from 2 to L-2."""
    anchors: int = 512
    """Blocks per sequence and pass over the data, at most; they bound memory and time."""
    anchor_predicts: bool = False
    """The anchor's entry is the first that predicts (DSpark)."""
    markov_rank: int = 0
    """r of the Markov term (DSpark: 256); 0: there is none."""
    confidence_weight: float = 0.0
    """Weight of the confidence head's loss beside 1 of the other (DSpark's 1.0 beside 1.8 TV is 0.56); 0: there is no such head."""
    own_head: bool = False
    """A trained head that starts as the target's rows; otherwise these, frozen."""
    draft_vocab_size: int | None = None
    """Tokens the draft can propose, the most frequent ones of the training answers; None means all."""
    loss: LossConfig = dataclasses.field(default_factory=LossConfig)
    """What is minimised (`drafters.losses`)."""

    def __post_init__(self) -> None:
        check_draft_vocab_size(self.draft_vocab_size)
        if self.num_layers < 1 or self.anchors < 1:
            raise ValueError(f"num_layers is {self.num_layers} and anchors {self.anchors}; give 1 or more of each")
        if self.depth < 1:
            fewest = 1 if self.anchor_predicts else 2
            raise ValueError(f"block_size is {self.block_size}, which predicts nothing; give {fewest} or more")
        if self.markov_rank < 0 or not self.confidence_weight >= 0:
            raise ValueError(
                f"markov_rank is {self.markov_rank} and confidence_weight {self.confidence_weight}; "
                "give numbers above 0, or 0 to do without"
            )
        check_ascending(self.layers)
        if self.loss.thin != 1:
            raise ValueError(
                f"loss.thin is {self.loss.thin}; a block has all its depths: leave it out and lower `anchors`"
            )

    @property
    def depth(self) -> int:
        """J, the tokens that a block predicts."""
        return self.block_size if self.anchor_predicts else self.block_size - 1


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Queries, keys and values of block entries (n, Q, heads, E) to what they have read, (n, Q, heads * E)."""


class Layer(Block):
    """A decoder layer in pre-norm form; its caller says what its entries see besides themselves."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, x_nQD: Tensor, tables: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        normed_nQD = self.input_layernorm(x_nQD)
        read_nQX = attend(self.self_attn.queries(normed_nQD, tables), *self.self_attn.keys(normed_nQD, tables))
        return self.add_mlp(x_nQD + self.self_attn.o_proj(read_nQX))


class Markov(nn.Module):
    """The part of a token's logits that the token before it decides, W2 W1[previous]: 0 at the start."""

    def __init__(self, shape: Shape, rank: int, vocab: int) -> None:
        super().__init__()
        self.previous = nn.Embedding(shape.vocab_size, rank)
        self.next = nn.Linear(rank, vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.next(self.previous(ids))
        return out


@dataclasses.dataclass(frozen=True, slots=True)
class State:
    """What has been committed.

    Attributes:
        caches: keys and values of the context features, one per layer.
        lengths: how many there are of each row.
        root_B: int64, the token behind them.
    """

    caches: list[KeyValues]
    lengths: list[int]
    root_B: Tensor


class Model(TrainableDrafter):
    """The block drafter. `lm_head` is part of the names that an optimizer should treat as heads."""

    d2t: Tensor

    def __init__(self, config: Config, shape: Shape) -> None:
        super().__init__()
        self.config, self.shape = config, shape
        self.shares_head = not config.own_head
        self.max_depth = self.training_depth = config.depth
        captured = config.layers if config.layers is not None else default_layers(shape.num_layers)
        check_layers(captured, shape.num_layers)
        self.feature_layers: tuple[LayerId, ...] = captured
        width, vocab = shape.hidden_size, draft_vocab_size(config.draft_vocab_size, shape)
        self.fc = nn.Linear(len(captured) * width, width, bias=False)
        self.hidden_norm = RMSNorm(width, shape.rms_norm_eps)
        self.mask_embedding = nn.Parameter(torch.zeros(width))
        # A module list says of its items only that they are modules.
        self.layers = cast("list[Layer]", nn.ModuleList(Layer(shape) for _ in range(config.num_layers)))
        self.norm = RMSNorm(width, shape.rms_norm_eps)
        if config.own_head:
            self.lm_head = nn.Linear(width, vocab, bias=False)
        if config.markov_rank:
            self.lm_head_markov = Markov(shape, config.markov_rank, vocab)
        if config.confidence_weight:
            self.confidence_head = nn.Linear(width, 1)
        self.register_buffer("d2t", torch.zeros(vocab, dtype=torch.int64))

    def initialise(self, target: TargetHead, token_counts_V: Tensor, batches: Iterable[TrainingBatch] = ()) -> None:
        self.d2t.copy_(choose_offsets(token_counts_V, len(self.d2t)))
        self.bind(target)
        for parameter in self.parameters():
            if parameter.dim() == 2 or parameter is self.mask_embedding:
                nn.init.normal_(parameter, std=0.02)
        if self.config.markov_rank:
            # One side 0, so that nothing is added at first; the other as large as a state, so that it learns as fast as a head.
            nn.init.normal_(self.lm_head_markov.previous.weight)
            nn.init.zeros_(self.lm_head_markov.next.weight)
        if self.config.own_head:
            with torch.no_grad():
                self.lm_head.weight.copy_(self.head_rows())

    # ---- what training and drafting share ----------------------------------------------------------------------------

    def head_weight(self) -> Tensor:
        """(W, D): its own head, or the target's rows."""
        return self.lm_head.weight if self.config.own_head else self.shared_head_WD

    def confidence(self, hidden: Tensor) -> Tensor:
        """How likely each depth's token is to be accepted if those above it are, (…) in 0 to 1, from states (…, D)."""
        out: Tensor = self.confidence_head(hidden)[..., 0].sigmoid()
        return out

    def context(self, features: Tensor) -> Tensor:
        """c (…, D) from captured states (…, F)."""
        out: Tensor = self.hidden_norm(self.fc(features.to(self.dtype)))
        return out

    def _entries(self, anchor_ids_n: Tensor, position_n: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The entries (n, Q, D) of blocks that begin at a position, and their rotary tables."""
        anchor_nD = self.target.embed(anchor_ids_n).to(self.dtype)
        masks_nQD = self.mask_embedding.expand(len(anchor_nD), self.config.block_size - 1, -1)
        position_nQ = position_n[:, None] + torch.arange(self.config.block_size, device=position_n.device)
        return torch.cat([anchor_nD[:, None], masks_nQD], 1), self._tables(position_nQ)

    def _tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return rotary_tables(positions, self.shape.head_dim, self.shape.rope_theta)

    def _finish(self, x_nQD: Tensor) -> Tensor:
        """States that predict, (n, J, D)."""
        out: Tensor = self.norm(x_nQD[:, -self.config.depth :])
        return out

    # ---- training ----------------------------------------------------------------------------------------------------

    def draft_positions(self, load: Load) -> float:
        """Of the blocks: their starts are drawn, at most so many of a text."""
        return min(load.supervised, self.config.anchors * load.texts) * self.training_depth

    def positions(self, name: str, load: Load) -> float:
        """The layers see whole blocks, the anchor included."""
        blocks = self.draft_positions(load) / self.training_depth
        if name.startswith("fc."):
            return load.tokens
        return self.config.block_size * blocks if name.startswith("layers.") else self.draft_positions(load)

    def forward(self, batch: TrainingBatch) -> LossParts:
        config = self.config
        weight_JBT = anchor_weights(batch, config.depth, config.anchors)
        anchors = Starts.where(batch, weight_JBT[0] > 0)
        hidden_nJD = self.train_blocks(batch, anchors)
        reads_nJX, head_WX = hidden_nJD, self.head_weight()
        if config.markov_rank:  # one product for both parts of the logits
            previous_nJr = self.lm_head_markov.previous(anchors.paths(config.depth))
            reads_nJX = torch.cat([hidden_nJD, previous_nJr.to(hidden_nJD.dtype)], 2)
            head_WX = torch.cat([head_WX.to(self.dtype), self.lm_head_markov.next.weight], 1)
        reads = [
            Starts.where(batch, weight_BT > 0).of(anchors, x_nX)
            for weight_BT, x_nX in zip(weight_JBT, reads_nJX.unbind(1), strict=True)
        ]
        out = distill(reads, [head_WX], batch, self.target, self.token_ids_W, config.loss, weight_JBT)
        return self._add_confidence(out, hidden_nJD, anchors) if config.confidence_weight else out.parts

    def train_blocks(self, batch: TrainingBatch, anchors: Starts) -> Tensor:
        """States (n, J, D) of the blocks at the given starts."""
        context_1ND = self.context(batch.features_BTF).flatten(0, 1)[None]
        context_tables = self._tables(sent(batch.layout.position_N, context_1ND.device)[None])
        x_nQD, tables = self._entries(anchors.ids_at(1), sent(anchors.position_n + 1, context_1ND.device))
        for layer in self.layers:
            key_1NHE, value_1NHE = layer.self_attn.keys(context_1ND, context_tables)
            x_nQD = self.recomputed(
                layer, x_nQD, tables, functools.partial(_read_texts, anchors, (key_1NHE[0], value_1NHE[0]))
            )
        return self._finish(x_nQD)

    def _add_confidence(self, out: Distilled, hidden_nJD: Tensor, anchors: Starts) -> LossParts:
        """Binary cross entropy towards α, with the weights of the loss itself."""
        overlap_Jn, weight_Jn = (
            x_JBT.flatten(1).index_select(1, anchors.index_n) for x_JBT in (out.overlap_JBT, out.weight_JBT)
        )
        logits_Jn = self.confidence_head(hidden_nJD)[..., 0].T.to(overlap_Jn.dtype)
        # An overlap of fp32 rounding's making may exceed 1.
        wrong_Jn = nn.functional.binary_cross_entropy_with_logits(logits_Jn, overlap_Jn.clamp(0, 1), reduction="none")
        more = self.config.confidence_weight * (wrong_Jn * weight_Jn).sum()
        return dataclasses.replace(out.parts, sum=out.parts.sum + more.to(out.parts.sum.dtype))

    # ---- drafting ----------------------------------------------------------------------------------------------------

    @property
    def bytes_per_token(self) -> int:  # type: ignore[override]
        return self.shape.kv_bytes(self.config.num_layers, self.dtype.itemsize)

    def compile_drafting(self) -> None:
        self.draft_states = torch.compile(self.draft_states, dynamic=True)  # type: ignore[method-assign]

    def init(self, batch: int, capacity: int) -> State:
        shape, device, slots = self.shape, self.d2t.device, capacity + self.config.block_size  # a block is always whole
        caches = [KeyValues(batch, shape.num_kv_heads, slots, shape.head_dim, self.dtype, device) for _ in self.layers]
        return State(caches, [0] * batch, torch.zeros(batch, dtype=torch.int64, device=device))

    def observe(self, state: State, ids_BC: Tensor, features_BCF: Tensor, next_B: Tensor, counts: list[int]) -> State:
        slots = slots_behind(state.lengths, ids_BC.shape[1], ids_BC.device)
        context_BCD, tables = self.context(features_BCF), self._tables(slots.index_BR)
        for layer, cache in zip(self.layers, state.caches, strict=True):
            key, value = layer.self_attn.keys(context_BCD, tables)
            cache.write(key.transpose(1, 2), value.transpose(1, 2), slots)
        lengths = [length + count for length, count in zip(state.lengths, counts, strict=True)]
        return State(state.caches, lengths, next_B)

    def draft_states(self, state: State) -> Tensor:
        """States (B, J, D) of the block behind what is committed."""
        slots = slots_behind(state.lengths, self.config.block_size, state.root_B.device)
        x_BQD, tables = self._entries(state.root_B, slots.index_BR[:, 0])
        slot_S = torch.arange(slots.extent, device=slots.index_BR.device)
        seen_BQS = (slot_S <= slots.index_BR[:, -1:])[:, None].expand(-1, x_BQD.shape[1], -1)
        for layer, cache in zip(self.layers, state.caches, strict=True):
            x_BQD = layer(x_BQD, tables, functools.partial(_read_cache, layer.self_attn, cache, slots, seen_BQS))
        return self._finish(x_BQD)

    def propose(self, state: State, plan: Plan, pick: Pick) -> Proposal:
        hidden_BJD = self.draft_states(state)[:, : plan.depth]
        logits_BJW = hidden_BJD @ self.head_weight().to(hidden_BJD.dtype).T
        markov = self.lm_head_markov if self.config.markov_rank else None

        def expand(frontier: Frontier) -> Tensor:
            logits_B1W = logits_BJW[:, frontier.depth, None]
            return logits_B1W if markov is None else logits_B1W + markov(frontier.tokens_BM)

        root_BW = logits_BJW[:, 0] if markov is None else logits_BJW[:, 0] + markov(state.root_B)
        return grow(plan, root_BW, expand, pick, self.token_ids_W)

    def select(self, state: State, rows_B: Tensor) -> State:
        for cache in state.caches:
            cache.select(rows_B)
        return State(state.caches, [state.lengths[row] for row in rows_B.tolist()], state.root_B[rows_B])

    def replace(self, state: State, rows_B: Tensor, other: State) -> State:
        for cache, theirs in zip(state.caches, other.caches, strict=True):
            cache.replace(rows_B, theirs)
        lengths = with_rows(state.lengths, rows_B, other.lengths)
        return State(state.caches, lengths, state.root_B.index_copy(0, rows_B, other.root_B))


def default_layers(num_layers: int) -> tuple[int, ...]:
    """Five, evenly from 2 to L-2, fewer where they coincide: inputs of these layers, in the paper's count outputs 1 to L-3."""
    first, last = 1, max(1, num_layers - 3)
    return tuple(sorted({round(first + (last - first) * i / 4) + 1 for i in range(5)}))


def _read_texts(anchors: Starts, context: tuple[Tensor, Tensor], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """`Attend` in training: the context up to each block's anchor, and the block itself."""
    return attend(anchors, query, context, (key, value))


def _read_cache(
    attention: Attention, cache: KeyValues, slots: Slots, seen_BQS: Tensor, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """`Attend` in decoding: the block's keys lie behind the committed ones until the next round overwrites them."""
    keys_BHSE, values_BHSE = cache.write(key.transpose(1, 2), value.transpose(1, 2), slots)
    return attention.mix(query, keys_BHSE, values_BHSE, seen_BQS)
