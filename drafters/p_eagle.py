"""P-EAGLE: EAGLE-3's head that predicts all K tokens in one forward instead of one after the other (arXiv 2602.01469).

At start p the entry of depth 0 is EAGLE-3's: the embedding of token p + 1 beside the fused states of the target at p, predicting
token p + 2. What drafting does not know yet at depths 1 to K - 1, token and state, is replaced by one learned mask embedding and
one learned mask state. The entry of depth j has rotary position p + j, sees in every layer the depth-0 entries up to p and
the mask entries 1 to j of its own start, and predicts token p + 2 + j. Behind EAGLE-3's layer come ordinary Llama layers.

No depth-0 entry sees a mask entry, so the keys of committed tokens are the same in training and drafting, and in drafting the
rule above is plain causal attention over the committed tokens and K - 1 mask entries behind the newest one.

Training runs all depths in one forward too. Deeper ones may be thinned (`loss.thin`; the paper's conditional drop-token sampling
keeps 0.7 of each depth): layers run only on what is left. Attention, whose cost grows with the square of it, needs that most.

Departures: thinned depths are weighted up, so that the expected gradient is that of all starts, and have no lower bound (the
paper's recipe never keeps less than 0.2); the mask state stands behind the fusion, not before it; soft labels; head rows start as
the target's; embedding and vocabulary map as in `eagle3`.

Letters: J = K depths, B sequences, T positions, M = K - 1 depths of masks, n mask entries, A of one sequence, C observed tokens,
R queries, S keys, H heads, E head width, D width, I attention input width, F captured width, W draft vocabulary.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Literal

import torch
from torch import Tensor, nn

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
from draftsmith.drafters.eagle3 import MidLayer, check_ascending, check_layers, default_layers
from draftsmith.drafters.grow import grow
from draftsmith.drafters.kv import KeyValues, Slots, slots_behind, with_rows
from draftsmith.drafters.layers import Attention, Block, DecoderLayer, RMSNorm, norm_each, rotary_tables
from draftsmith.drafters.layout import sent
from draftsmith.drafters.losses import LossConfig, distill
from draftsmith.drafters.starts import Starts, trained_starts
from draftsmith.drafters.tree import Plan
from draftsmith.drafters.vocabulary import check_draft_vocab_size, choose_offsets, draft_vocab_size


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    depth: int = 5
    """K, tokens predicted at once: the depths that are trained, and the deepest chain that can be drafted."""
    num_layers: int = 4
    """EAGLE-3's layer and the Llama layers behind it (the paper: 4)."""
    layers: tuple[int, ...] | None = None
    """Captured decoder-layer inputs, ascending (Hugging Face `hidden_states` index); default 2, L//2, L-3."""
    draft_vocab_size: int | None = None
    """Tokens the draft can propose, the most frequent ones of the training answers; None means all."""
    loss: LossConfig = dataclasses.field(default_factory=lambda: LossConfig(thin=0.7))
    """What is minimised (`drafters.losses`); left out, it is the usual one with the paper's `thin` of 0.7."""
    fc_norm: bool = False
    """One RMS norm for each captured state before fusion (EAGLE-3.1)."""
    norm_before_residual: bool = False
    """Residual of the first layer from the normalised state."""
    initialise_head: Literal["target", "random"] = "target"
    """Where the draft head starts."""

    def __post_init__(self) -> None:
        check_draft_vocab_size(self.draft_vocab_size)
        if self.depth < 2:
            raise ValueError(f"depth is {self.depth}; give 2 or more (one token at a time: eagle3)")
        if self.num_layers < 1:
            raise ValueError(f"num_layers is {self.num_layers}; give 1 or more")
        check_ascending(self.layers)


@dataclasses.dataclass(slots=True)
class State:
    """What the layers remember, and what the head reads next."""

    caches: list[KeyValues]
    """Of each layer: the committed tokens, and behind them the newest mask entries, which the next observation overwrites."""
    lengths: list[int]
    hidden_BKD: Tensor
    """Behind the final norm, at the newest token (depth 0) and the mask entries after it."""


Joint = tuple[Tensor, Tensor]
"""What the first layer reads: attention input (…, I) and residual (…, D)."""
Attend = Callable[[int, Attention, Tensor], Tensor]
"""A layer's number, attention and attention input to its mixed values (…, H E)."""


class Model(TrainableDrafter):
    """The P-EAGLE head."""

    d2t: Tensor

    def __init__(self, config: Config, shape: Shape) -> None:
        super().__init__()
        self.config, self.shape = config, shape
        self.max_depth = self.training_depth = config.depth
        layers = config.layers if config.layers is not None else default_layers(shape.num_layers)
        check_layers(layers, shape.num_layers)
        self.feature_layers: tuple[LayerId, ...] = layers
        width, vocab = shape.hidden_size, draft_vocab_size(config.draft_vocab_size, shape)
        self.fc = nn.Linear(len(layers) * width, width, bias=False)
        self.mask_embedding = nn.Parameter(torch.zeros(width))
        self.mask_state = nn.Parameter(torch.zeros(width))
        self.midlayer = MidLayer(shape)
        self.layers = nn.ModuleList(DecoderLayer(shape) for _ in range(config.num_layers - 1))
        self.norm = RMSNorm(width, shape.rms_norm_eps)
        self.lm_head = nn.Linear(width, vocab, bias=False)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(width, shape.rms_norm_eps) for _ in layers)
        self.register_buffer("d2t", torch.zeros(vocab, dtype=torch.int64))

    def initialise(self, target: TargetHead, token_counts_V: Tensor, batches: Iterable[TrainingBatch] = ()) -> None:
        self.bind(target)
        for parameter in (*(p for p in self.parameters() if p.dim() == 2), self.mask_embedding, self.mask_state):
            nn.init.normal_(parameter, std=0.02)
        self.d2t.copy_(choose_offsets(token_counts_V, len(self.d2t)))
        if self.config.initialise_head == "target":
            with torch.no_grad():
                self.lm_head.weight.copy_(self.head_rows())

    # ---- the layers --------------------------------------------------------------------------------------------------

    def _fuse(self, features_BTF: Tensor) -> Tensor:
        """The states that stand beside the tokens: (B, T, F) → (B, T, D)."""
        features_BTF = features_BTF.to(self.dtype)
        if self.config.fc_norm:
            features_BTF = norm_each(self.fc_norm, features_BTF)
        out: Tensor = self.fc(features_BTF)
        return out

    def _join(self, embedded: Tensor, state: Tensor) -> Joint:
        return self.midlayer.join(embedded, state, self.config.norm_before_residual)

    def _run(self, joint: Joint, attend: Attend) -> Tensor:
        """All layers: (…, D). `attend` gives a layer's mixed values (…, H E) for its number, attention and attention input."""
        reads, residual = joint
        for number, layer in enumerate((self.midlayer, *self.layers)):
            if number > 0:
                reads = layer.input_layernorm(residual)
            residual = self.recomputed(_run_layer, number, layer, attend, reads, residual)
        return residual

    def _tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return rotary_tables(positions, self.shape.head_dim, self.shape.rope_theta)

    # ---- training ----------------------------------------------------------------------------------------------------

    def positions(self, name: str, load: Load) -> float:
        """All depths go through the same layers, at once."""
        return load.tokens if name.startswith("fc.") else self.draft_positions(load)

    def forward(self, batch: TrainingBatch) -> LossParts:
        loss = self.config.loss
        trained_JBT = trained_starts(batch, self.config.depth, loss.thin)
        tokens = Starts.tokens(batch)
        device = batch.ids_BT.device
        tables = self._tables(sent(tokens.position_n, device)[None])
        prefix: dict[int, tuple[Tensor, Tensor]] = {}  # each layer's keys and values of depth 0, at all places

        def attend_texts(number: int, attention: Attention, reads_1nI: Tensor) -> Tensor:
            key, value = (tokens.over_places(x_1nHE[0]) for x_1nHE in attention.keys(reads_1nI, tables))
            prefix[number] = key, value
            return attend(tokens, attention.queries(reads_1nI, tables).transpose(0, 1), prefix[number]).transpose(0, 1)

        embedded, fused = (
            tokens.pick(x)[None] for x in (self.target.embed(batch.next_BT), self._fuse(batch.features_BTF))
        )
        first_nD = self._run(self._join(embedded.to(self.dtype), fused), attend_texts)[0]

        # All mask entries are alike until they attend: one row stands for them, and rotary positions make it n.
        entries = MaskEntries(batch, trained_JBT)
        mask_tables = self._tables(sent(entries.starts.position_n + entries.depth_n, device)[None])
        mask = (x_D[None, None].to(fused.dtype) for x_D in (self.mask_embedding, self.mask_state))

        def attend_masks(number: int, attention: Attention, reads_1nI: Tensor) -> Tensor:
            key_1nHE, value_1nHE = attention.keys(reads_1nI, mask_tables)
            own = entries.own(key_1nHE[0]), entries.own(value_1nHE.expand_as(key_1nHE)[0])
            query_n1HE = attention.queries(reads_1nI, mask_tables).transpose(0, 1)
            return attend(entries.starts, query_n1HE, prefix[number], own, entries.seen_n1M).transpose(0, 1)

        later_nD = self._run(self._join(*mask), attend_masks)[0]
        if entries.starts.count == 0:  # the one row that stands for them is not needed either
            later_nD = later_nD[:0]
        first = Starts.where(batch, trained_JBT[0]).of(tokens, first_nD)
        hidden = [self.norm(x_nD) for x_nD in (first, *entries.by_depth(later_nD))]
        return distill(hidden, [self.lm_head.weight], batch, self.target, self.token_ids_W, loss).parts

    # ---- drafting ----------------------------------------------------------------------------------------------------

    @property
    def bytes_per_token(self) -> int:  # type: ignore[override]
        return self.shape.kv_bytes(self.config.num_layers, self.dtype.itemsize)

    def compile_drafting(self) -> None:
        self._read = torch.compile(self._read, dynamic=True)  # type: ignore[method-assign]

    def init(self, batch: int, capacity: int) -> State:
        config, shape, device = self.config, self.shape, self.fc.weight.device
        capacity += config.depth - 1  # mask entries, however few the plan uses
        caches = [
            KeyValues(batch, shape.num_kv_heads, capacity, shape.head_dim, self.dtype, device)
            for _ in range(config.num_layers)
        ]
        hidden_BKD = torch.zeros(batch, config.depth, shape.hidden_size, dtype=self.dtype, device=device)
        return State(caches, [0] * batch, hidden_BKD)

    def observe(self, state: State, ids_BC: Tensor, features_BCF: Tensor, next_B: Tensor, counts: list[int]) -> State:
        counts_B = torch.tensor(counts, device=ids_BC.device)
        rows_B = torch.arange(len(counts), device=ids_BC.device)
        following_BC = ids_BC.roll(-1, dims=1)
        following_BC[rows_B, counts_B - 1] = next_B
        hidden_BRD = self._read(state.caches, state.lengths, following_BC, features_BCF, counts_B)
        depth_K = torch.arange(self.config.depth, device=ids_BC.device)
        newest_BK = (counts_B - 1).clamp_min(0)[:, None] + depth_K
        lengths = [length + count for length, count in zip(state.lengths, counts, strict=True)]
        return State(state.caches, lengths, self.norm(hidden_BRD[rows_B[:, None], newest_BK]))

    def _read(
        self, caches: list[KeyValues], lengths: list[int], following_BC: Tensor, features_BCF: Tensor, counts_B: Tensor
    ) -> Tensor:
        """Runs the layers on each row's tokens, mask entries right behind them, and nothing useful behind these: (B, R, D)."""
        num_masks, device = self.config.depth - 1, following_BC.device
        slots: Slots = slots_behind(lengths, following_BC.shape[1] + num_masks, device)
        real_BR1 = torch.arange(slots.index_BR.shape[1], device=device)[:, None] < counts_B[:, None, None]

        def fill(known_BCD: Tensor, mask_D: Tensor) -> Tensor:
            return torch.where(real_BR1, nn.functional.pad(known_BCD, (0, 0, 0, num_masks)), mask_D)

        embedded_BRD = fill(self.target.embed(following_BC).to(self.dtype), self.mask_embedding)
        joint = self._join(embedded_BRD, fill(self._fuse(features_BCF), self.mask_state))
        tables = self._tables(slots.index_BR)
        causal_BRS = torch.arange(slots.extent, device=device) <= slots.index_BR[..., None]

        def attend(number: int, attention: Attention, reads_BRI: Tensor) -> Tensor:
            new_key, new_value = (x_BRHE.transpose(1, 2) for x_BRHE in attention.keys(reads_BRI, tables))
            key_BHSE, value_BHSE = caches[number].write(new_key, new_value, slots)
            return attention.mix(attention.queries(reads_BRI, tables), key_BHSE, value_BHSE, causal_BRS)

        return self._run(joint, attend)

    def propose(self, state: State, plan: Plan, pick: Pick) -> Proposal:
        logits_BKW = self.lm_head(state.hidden_BKD[:, : max(1, plan.depth)])
        return grow(
            plan, logits_BKW[:, 0], lambda frontier: logits_BKW[:, frontier.depth, None], pick, self.token_ids_W
        )

    def select(self, state: State, rows_B: Tensor) -> State:
        for cache in state.caches:
            cache.select(rows_B)
        return State(state.caches, [state.lengths[row] for row in rows_B.tolist()], state.hidden_BKD[rows_B])

    def replace(self, state: State, rows_B: Tensor, other: State) -> State:
        for cache, new in zip(state.caches, other.caches, strict=True):
            cache.replace(rows_B, new)
        lengths = with_rows(state.lengths, rows_B, other.lengths)
        return State(state.caches, lengths, state.hidden_BKD.index_copy(0, rows_B, other.hidden_BKD))


def _run_layer(number: int, layer: Block, attend: Attend, reads: Tensor, residual: Tensor) -> Tensor:
    out: Tensor = layer.add_mlp(residual + layer.self_attn.o_proj(attend(number, layer.self_attn, reads)))
    return out


class MaskEntries:
    """The n mask entries (start, depth of 1 or more) that training runs, by start and then by depth.

    Args:
        batch: the training texts.
        trained_JBT: bool, on the host, where each depth is trained; an entry is needed where its depth or a deeper one is.

    Attributes:
        starts: where they start.
        depth_n: int64, on the host.
        seen_n1M: bool, which of `own` an entry sees.
    """

    def __init__(self, batch: TrainingBatch, trained_JBT: Tensor) -> None:
        trained_JN = trained_JBT.flatten(1)
        needed_JN = trained_JN.flip(0).cumsum(0).flip(0) > 0
        place_n, above_n = needed_JN[1:].T.nonzero(as_tuple=True)
        self.starts, self.depth_n = Starts(batch, place_n), above_n + 1
        # A start has all depths up to its deepest: those above an entry stand right in front of it.
        back_M = torch.arange(len(trained_JN) - 1)
        self._own_nM = sent((torch.arange(len(place_n))[:, None] - back_M).clamp_min(0), self.starts.device)
        self.seen_n1M = sent((back_M < self.depth_n[:, None])[:, None], self.starts.device)
        self._trained = [
            sent(((self.depth_n == depth) & trained_JN[depth, place_n]).nonzero()[:, 0], self.starts.device)
            for depth in range(1, len(trained_JN))
        ]

    def own(self, x_nHE: Tensor) -> Tensor:
        """Of each entry those of its start up to its depth, the nearest first, and others behind: (n, M, H, E)."""
        return x_nHE.index_select(0, self._own_nM.flatten()).unflatten(0, self._own_nM.shape)

    def by_depth(self, x_nD: Tensor) -> list[Tensor]:
        """What stands at the entries of each depth from 1, where it is trained."""
        return [x_nD.index_select(0, index_r) for index_r in self._trained]
