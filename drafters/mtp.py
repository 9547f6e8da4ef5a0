"""A multi-token-prediction module: one ordinary decoder block that continues the target's last hidden state (DeepSeek-V3,
arXiv 2412.19437; used for every depth: FastMTP, Cai et al. 2025, arXiv 2509.18362).

At start p the module reads the target's state h_p and the embedding of token p + 1, each behind an RMS norm of its own, joined by
a projection from 2 D to D; a Llama block and a final norm follow, and the target's own head, frozen, or one of its own says what
token p + 2 is. Drafting on, the module's output takes the place of h. Training unrolls that (`recurrent`), depth j weighs
0.6 ** j as in FastMTP (up to a constant factor: there the weights sum to 1).

Such modules differ in three choices, which change what a module's weights mean and are therefore settings. The paper's text has
the state first. Released ones, as serving engines run them (`inference.native_mtp` reads those whose block is as plain as this one:
MiMo's, and none with experts, latent attention or gates):

    released with       order        normed_state  norm_output
    Qwen3-Next, 3.5     token first  true          true
    MiMo                state first  false         true
    DeepSeek-V3, GLM    token first  true          false

Departures: the target's law is learned, not the next token of the text; one module for all depths (the paper has one per depth);
engines blank the embedding at position 0, this does not.

Letters: J depths, B sequences, T positions, D width, F captured width (D), W draft vocabulary.
"""

import dataclasses
from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor, nn

from draftsmith.drafters.base import LayerId, LossParts, Shape, TargetHead, TrainingBatch
from draftsmith.drafters.layers import Attention, Block, RMSNorm
from draftsmith.drafters.losses import LossConfig, distill
from draftsmith.drafters.recurrent import RecurrentDrafter
from draftsmith.drafters.starts import trained_starts
from draftsmith.drafters.vocabulary import check_draft_vocab_size, choose_offsets, draft_vocab_size


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    steps: int = 3
    """Draft depths unrolled in training; all of them use the one module."""
    order: Literal["state_first", "token_first"] = "state_first"
    """Which half of the projection's input is which."""
    normed_state: bool = True
    """The module reads the target's state behind the target's final norm (what its head reads), otherwise the one before it."""
    norm_output: bool = True
    """The next depth reads the output behind the module's final norm (what the head reads), otherwise the one before it."""
    own_head: bool = False
    """A trained head that starts as the target's; otherwise the target's own, frozen."""
    draft_vocab_size: int | None = None
    """Tokens the draft can propose, the most frequent ones of the training answers; None means all."""
    attention_bias: bool = False
    """Queries, keys and values have biases (Qwen2, MiMo)."""
    loss: LossConfig = dataclasses.field(default_factory=lambda: LossConfig(decay=0.6))
    """What is minimised (`drafters.losses`); FastMTP: decay 0.6, which has to be given along with other settings of the loss."""

    def __post_init__(self) -> None:
        check_draft_vocab_size(self.draft_vocab_size)
        if self.steps < 1:
            raise ValueError(f"steps is {self.steps}; give 1 or more")


class Layer(Block):
    """A Llama decoder layer, in pieces."""

    def __init__(self, shape: Shape, bias: bool) -> None:
        super().__init__(shape, bias=bias)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)


class Model(RecurrentDrafter):
    """The module."""

    d2t: Tensor

    def __init__(self, config: Config, shape: Shape) -> None:
        super().__init__()
        self.config, self.shape = config, shape
        self.shares_head = not config.own_head
        self.training_depth = config.steps
        self.feature_layers: tuple[LayerId, ...] = ("last",) if config.normed_state else (shape.num_layers,)
        width, vocab = shape.hidden_size, draft_vocab_size(config.draft_vocab_size, shape)
        self.state_norm = RMSNorm(width, shape.rms_norm_eps)
        self.token_norm = RMSNorm(width, shape.rms_norm_eps)
        self.proj = nn.Linear(2 * width, width, bias=False)
        self.block = Layer(shape, config.attention_bias)
        self.norm = RMSNorm(width, shape.rms_norm_eps)
        if config.own_head:
            self.lm_head = nn.Linear(width, vocab, bias=False)
        self.register_buffer("d2t", torch.zeros(vocab, dtype=torch.int64))

    def initialise(self, target: TargetHead, token_counts_V: Tensor, batches: Iterable[TrainingBatch] = ()) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        self.d2t.copy_(choose_offsets(token_counts_V, len(self.d2t)))
        self.bind(target)
        if self.config.own_head:
            with torch.no_grad():
                self.lm_head.weight.copy_(self.head_rows())

    def head_weight(self) -> Tensor:
        """The projection (W, D)."""
        return self.lm_head.weight if self.config.own_head else self.shared_head_WD

    def forward(self, batch: TrainingBatch) -> LossParts:
        loss = self.config.loss
        first_BTD = self.fuse(batch.features_BTF.to(self.dtype))
        reads = self.unroll(batch, first_BTD, trained_starts(batch, self.config.steps, loss.thin)).reads
        return distill(reads, [self.head_weight()], batch, self.target, self.token_ids_W, loss).parts

    # ---- how the layer is put together -------------------------------------------------------------------------------

    @property
    def attention(self) -> Attention:
        return self.block.self_attn

    def fuse(self, features_BTF: Tensor) -> Tensor:
        return features_BTF

    def join(self, embedded: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """The block's input behind its norm, and that input: I = D."""
        token, state = self.token_norm(embedded), self.state_norm(state)
        halves = [state, token] if self.config.order == "state_first" else [token, state]
        residual = self.proj(torch.cat(halves, dim=-1))
        return self.block.input_layernorm(residual), residual

    def finish(self, attended: Tensor) -> tuple[Tensor, Tensor]:
        output = self.block.add_mlp(attended)
        return output, self.norm(output)

    def feed(self, output: Tensor) -> Tensor:
        out: Tensor = self.norm(output) if self.config.norm_output else output
        return out

    def draft_logits(self, output: Tensor) -> Tensor:
        read = self.norm(output)
        return read @ self.head_weight().to(read.dtype).T
