"""Hydra heads: Medusa heads that read the drafted tokens above them (Ankner et al. 2024, arXiv 2402.05109).

Head k reads the target's state h_p after the final norm and the embeddings of tokens p + 1 (the root when decoding) to p + 1 + k,
the path to the node whose children it predicts, and gives the law of token p + 2 + k. So nodes of one depth have laws of their
own, which is what trees gain from; training gives the true tokens of the path. A head is a projection of all its inputs,
(k + 2) D → D, then residual blocks z ← z + SiLU(W z + b) and a projection to the vocabulary.

With `prefix_attention` (Hydra++) the target's states first pass through one causal decoder layer of the drafter's own; h_p is
what comes out, and the layer's keys and values are kept while decoding.

Departures: the first projection is linear (the paper's code adds a SiLU of a second one), heads have no bias and the prefix
layer no final norm; the embedding is the target's, frozen and never stored; the projection starts as a linear guess of the later
state (`regression`) or a copy of h_p, and the prefix layer as the identity; no dropout; an optional reduced draft vocabulary.

Letters: B sequences, T positions, C observed tokens, n trained starts, M nodes, P tokens of a path, D width, K heads, W draft
vocabulary.
"""

import dataclasses
from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor, nn

from draftsmith.drafters.base import Load, LossParts, Pick, Proposal, Shape, TargetHead, TrainableDrafter, TrainingBatch
from draftsmith.drafters.grow import Frontier, grow
from draftsmith.drafters.kv import KeyValues, slots_behind, with_rows
from draftsmith.drafters.layers import DecoderLayer, ResidualBlock
from draftsmith.drafters.losses import LossConfig, distill
from draftsmith.drafters.regression import later_states
from draftsmith.drafters.starts import Starts, trained_starts
from draftsmith.drafters.tree import Plan
from draftsmith.drafters.vocabulary import check_draft_vocab_size, choose_offsets, draft_vocab_size


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    num_heads: int = 4
    """K, the deepest chain that can be drafted."""
    num_layers: int = 1
    """Residual blocks per head (Hydra++: 4)."""
    prefix_attention: bool = False
    """A decoder layer over the target's states comes before the heads (Hydra++)."""
    own_head: bool = True
    """Each depth has a projection to the vocabulary of its own; otherwise all share one. Either way they are trained."""
    draft_vocab_size: int | None = None
    """Tokens the draft can propose, the most frequent ones of the training answers; None means all."""
    loss: LossConfig = dataclasses.field(default_factory=LossConfig)
    """What is minimised (`drafters.losses`)."""
    initialise_head: Literal["regression", "target"] = "regression"
    """Heads start as the target's rows, behind a linear guess of the later state from all that is read, or behind h_p alone."""

    def __post_init__(self) -> None:
        check_draft_vocab_size(self.draft_vocab_size)
        if self.num_heads < 1 or self.num_layers < 1:
            raise ValueError(f"num_heads is {self.num_heads} and num_layers {self.num_layers}; give 1 or more of each")


class Body(nn.Module):
    """One head up to the vocabulary: (…, inputs * D) → (…, D)."""

    def __init__(self, width: int, num_inputs: int, num_layers: int) -> None:
        super().__init__()
        self.project = nn.Linear(num_inputs * width, width, bias=False)
        self.blocks = nn.Sequential(*(ResidualBlock(width) for _ in range(num_layers)))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.blocks(self.project(x))
        return out


@dataclasses.dataclass(slots=True)
class State:
    """What a decoding remembers.

    Attributes:
        hidden_BD: h at the newest token that the target has read.
        root_B: the token behind it.
        lengths: tokens read, of each row.
        cache: keys and values of the prefix layer at these tokens; None without it.
    """

    hidden_BD: Tensor
    root_B: Tensor
    lengths: list[int]
    cache: KeyValues | None


class Model(TrainableDrafter):
    """K heads, each of which reads the path above it."""

    feature_layers = ("last",)
    d2t: Tensor

    def __init__(self, config: Config, shape: Shape) -> None:
        super().__init__()
        self.config, self.shape = config, shape
        self.max_depth = self.training_depth = config.num_heads
        vocab, width = draft_vocab_size(config.draft_vocab_size, shape), shape.hidden_size
        self.prefix = DecoderLayer(shape) if config.prefix_attention else None
        self.bodies = nn.ModuleList(Body(width, k + 2, config.num_layers) for k in range(config.num_heads))
        num_projections = config.num_heads if config.own_head else 1
        self.lm_heads = nn.ModuleList(nn.Linear(width, vocab, bias=False) for _ in range(num_projections))
        self.register_buffer("d2t", torch.zeros(vocab, dtype=torch.int64))

    def initialise(self, target: TargetHead, token_counts_V: Tensor, batches: Iterable[TrainingBatch] = ()) -> None:
        self.bind(target)
        self.d2t.copy_(choose_offsets(token_counts_V, len(self.d2t)))
        fitted = self.config.initialise_head == "regression"
        maps = later_states(batches if fitted else (), len(self.bodies), self.shape.hidden_size, target.embed)
        with torch.no_grad():
            for body, map_DI in zip(self.bodies, maps, strict=True):
                body.get_parameter("project.weight").copy_(map_DI)
            for head in self.lm_heads:
                head.get_parameter("weight").copy_(self.head_rows())
        if self.prefix is not None:
            for parameter in self.prefix.parameters():
                if parameter.dim() == 2:
                    nn.init.normal_(parameter, std=0.02)
            # The identity at first, so that the linear guess holds behind it.
            nn.init.zeros_(self.prefix.self_attn.o_proj.weight)
            nn.init.zeros_(self.prefix.mlp.down_proj.weight)

    def head_weights(self) -> list[Tensor]:
        """The projections to the vocabulary (W, D): one per depth, or the shared one alone."""
        return [head.get_parameter("weight") for head in self.lm_heads]

    def positions(self, name: str, load: Load) -> float:
        if name.startswith("prefix."):
            return load.tokens
        return (
            self.draft_positions(load) if len(self.lm_heads) == 1 and name.startswith("lm_heads.") else load.supervised
        )

    def forward(self, batch: TrainingBatch) -> LossParts:
        loss = self.config.loss
        hidden_BTD = batch.last_BTD.to(self.dtype)
        if self.prefix is not None:
            hidden_BTD = self.recomputed(self.prefix.over_texts, hidden_BTD, batch)
        reads: list[Tensor] = []
        for k, trained_BT in enumerate(trained_starts(batch, self.config.num_heads, loss.thin)):
            starts = Starts.where(batch, trained_BT)
            reads.append(self.recomputed(self._read, starts.pick(hidden_BTD), starts.paths(k + 1)))
        return distill(reads, self.head_weights(), batch, self.target, self.token_ids_W, loss).parts

    def _read(self, hidden: Tensor, path: Tensor) -> Tensor:
        """What draft head P - 1 reads, (…, D), from h (…, D) and the P tokens behind it (…, P)."""
        embedded = self.target.embed(path).flatten(-2).to(hidden.dtype)
        out: Tensor = self.bodies[path.shape[-1] - 1](torch.cat([hidden, embedded], dim=-1))
        return out

    # ---- drafting ----------------------------------------------------------------------------------------------------

    @property
    def bytes_per_token(self) -> int:  # type: ignore[override]
        return self.shape.kv_bytes(1, self.dtype.itemsize) if self.config.prefix_attention else 0

    def init(self, batch: int, capacity: int) -> State:
        device, dtype, shape = self.d2t.device, self.dtype, self.shape
        cache = None
        if self.prefix is not None:
            cache = KeyValues(batch, shape.num_kv_heads, capacity, shape.head_dim, dtype, device)
        hidden_BD = torch.zeros(batch, shape.hidden_size, dtype=dtype, device=device)
        return State(hidden_BD, torch.zeros(batch, dtype=torch.int64, device=device), [0] * batch, cache)

    def observe(self, state: State, ids_BC: Tensor, features_BCF: Tensor, next_B: Tensor, counts: list[int]) -> State:
        hidden_BCD = features_BCF.to(self.dtype)
        if self.prefix is not None:
            slots = slots_behind(state.lengths, ids_BC.shape[1], ids_BC.device)
            hidden_BCD = self.prefix(hidden_BCD, state.cache, slots)
        newest_B = torch.tensor(counts, device=ids_BC.device) - 1
        lengths = [length + count for length, count in zip(state.lengths, counts, strict=True)]
        return State(hidden_BCD[torch.arange(len(counts)), newest_B], next_B, lengths, state.cache)

    def propose(self, state: State, plan: Plan, pick: Pick) -> Proposal:
        heads = self.head_weights()
        paths_BMP = state.root_B[:, None, None]  # from the root to each of the nodes expanded last
        first = -1  # the row number of the first of them; the root's is -1

        def logits_BMW() -> Tensor:
            head_WD = heads[(paths_BMP.shape[2] - 1) % len(heads)]
            hidden_BMD = state.hidden_BD[:, None].expand(-1, paths_BMP.shape[1], -1)
            return self._read(hidden_BMD, paths_BMP) @ head_WD.T

        def expand(frontier: Frontier) -> Tensor:
            nonlocal paths_BMP, first
            above_BM = (frontier.parents_bM - first).expand(len(paths_BMP), -1)
            first += paths_BMP.shape[1]
            above_BMP = paths_BMP.gather(1, above_BM[..., None].expand(-1, -1, paths_BMP.shape[2]))
            paths_BMP = torch.cat([above_BMP, frontier.tokens_BM[..., None]], 2)
            return logits_BMW()

        return grow(plan, logits_BMW()[:, 0], expand, pick, self.token_ids_W)

    def select(self, state: State, rows_B: Tensor) -> State:
        if state.cache is not None:
            state.cache.select(rows_B)
        lengths = [state.lengths[row] for row in rows_B.tolist()]
        return State(state.hidden_BD[rows_B], state.root_B[rows_B], lengths, state.cache)

    def replace(self, state: State, rows_B: Tensor, other: State) -> State:
        if state.cache is not None and other.cache is not None:
            state.cache.replace(rows_B, other.cache)
        lengths = with_rows(state.lengths, rows_B, other.lengths)
        hidden_BD = state.hidden_BD.index_copy(0, rows_B, other.hidden_BD)
        return State(hidden_BD, state.root_B.index_copy(0, rows_B, other.root_B), lengths, state.cache)
