"""Medusa heads: K small heads that guess the next tokens from one hidden state (Cai et al. 2024, arXiv 2401.10774).

Head k reads the target's state after the final norm at position p and predicts token p + 2 + k (the target's own head predicts
p + 1): residual blocks z ← z + SiLU(W z + b), the identity at the start, then a projection to the vocabulary. The
projection is either the target's head, shared and frozen ("Medusa-1" without own heads), or one trained head per depth.
Heads do not see each other's guesses: every node of a depth has the same law for its children.

Departures: soft labels from the target, an optional reduced draft vocabulary, and own heads that start as the target's
rows behind a linear guess of its state at the later position (`regression`) instead of as a mere copy.

Letters: B sequences, C observed tokens, D width, K heads, W draft vocabulary.
"""

import dataclasses
from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor, nn

from draftsmith.drafters.base import LossParts, Pick, Proposal, Shape, TargetHead, TrainableDrafter, TrainingBatch
from draftsmith.drafters.grow import grow
from draftsmith.drafters.layers import ResidualBlock
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
    """Residual blocks per head."""
    own_head: bool = True
    """Each head has a projection of its own; otherwise all share the target's frozen one."""
    draft_vocab_size: int | None = None
    """Tokens the draft can propose, the most frequent ones of the training answers; None means all."""
    loss: LossConfig = dataclasses.field(default_factory=LossConfig)
    """What is minimised (`drafters.losses`)."""
    initialise_head: Literal["regression", "target"] = "regression"
    """Own heads start as the target's rows behind a linear guess of the later state, or as those rows alone."""

    def __post_init__(self) -> None:
        check_draft_vocab_size(self.draft_vocab_size)
        if self.num_heads < 1 or self.num_layers < 1:
            raise ValueError(f"num_heads is {self.num_heads} and num_layers {self.num_layers}; give 1 or more of each")


class Blocks(nn.Sequential):
    """The residual blocks of one head; each is a module of its own."""

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__(*(ResidualBlock(width) for _ in range(num_layers)))


class Model(TrainableDrafter):
    """K heads on the target's last hidden state."""

    feature_layers = ("last",)
    d2t: Tensor

    def __init__(self, config: Config, shape: Shape) -> None:
        super().__init__()
        self.config, self.shape = config, shape
        self.shares_head = not config.own_head
        self.max_depth = self.training_depth = config.num_heads
        vocab = draft_vocab_size(config.draft_vocab_size, shape)
        width = shape.hidden_size
        self.blocks = nn.ModuleList(Blocks(width, config.num_layers) for _ in range(config.num_heads))
        self.lm_heads = nn.ModuleList(
            nn.Linear(width, vocab, bias=False) for _ in range(config.num_heads if config.own_head else 0)
        )
        self.register_buffer("d2t", torch.zeros(vocab, dtype=torch.int64))

    def initialise(self, target: TargetHead, token_counts_V: Tensor, batches: Iterable[TrainingBatch] = ()) -> None:
        self.d2t.copy_(choose_offsets(token_counts_V, len(self.d2t)))
        self.bind(target)
        fitted = self.config.own_head and self.config.initialise_head == "regression"
        maps = later_states(batches if fitted else (), len(self.lm_heads), self.shape.hidden_size)
        with torch.no_grad():
            rows_WD = self.head_rows().float()
            for head, map_DD in zip(self.lm_heads, maps, strict=True):
                head.get_parameter("weight").copy_(rows_WD @ map_DD.to(rows_WD.device))

    def head_weights(self) -> list[Tensor]:
        """The projections (W, D): one per head, or the shared one alone."""
        return [head.get_parameter("weight") for head in self.lm_heads] or [self.shared_head_WD]

    def forward(self, batch: TrainingBatch) -> LossParts:
        config = self.config
        trained_KBT = trained_starts(batch, config.num_heads, config.loss.thin)
        hidden: list[Tensor] = []
        for block, trained_BT in zip(self.blocks, trained_KBT, strict=True):
            read_nD = Starts.where(batch, trained_BT).pick(batch.last_BTD).to(self.dtype)
            hidden.append(self.recomputed(block, read_nD))
        return distill(hidden, self.head_weights(), batch, self.target, self.token_ids_W, config.loss).parts

    def init(self, batch: int, capacity: int) -> Tensor:
        """The state is the last hidden state, (B, D), of the newest token the target has read."""
        return torch.zeros(batch, self.shape.hidden_size, dtype=self.dtype, device=self.d2t.device)

    def observe(self, state: Tensor, ids_BC: Tensor, features_BCF: Tensor, next_B: Tensor, counts: list[int]) -> Tensor:
        counts_B = torch.tensor(counts, device=ids_BC.device)
        return features_BCF[torch.arange(len(counts)), counts_B - 1].to(state.dtype)

    def propose(self, state: Tensor, plan: Plan, pick: Pick) -> Proposal:
        heads = self.head_weights()

        def logits(k: int) -> Tensor:
            out: Tensor = self.blocks[k](state) @ heads[k % len(heads)].to(state.dtype).T
            return out

        return grow(plan, logits(0), lambda frontier: logits(frontier.depth)[:, None], pick, self.token_ids_W)

    def select(self, state: Tensor, rows_B: Tensor) -> Tensor:
        return state[rows_B]

    def replace(self, state: Tensor, rows_B: Tensor, other: Tensor) -> Tensor:
        return state.index_copy(0, rows_B, other)
