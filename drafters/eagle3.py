"""EAGLE-3: one decoder layer that continues the target's own features (Li et al. 2025, arXiv 2503.01840).

At start p the layer reads the embedding of token p + 1 and a state g_p, and predicts token p + 2. At first g_p is a fusion of
three hidden states of the target at p; drafting on, it is the layer's own output. Training unrolls that (`recurrent`).

The options of EAGLE-3.1 (arXiv 2605.09992): `fc_norm` normalises each captured state before fusion, `norm_output` feeds the
normalised output back. Parameter names follow the layout that serving engines load (`midlayer.…`, `d2t` as offsets).
Departures: the embedding is the target's, frozen and never stored; head rows start as the target's; probability outside
the draft vocabulary counts as a miss instead of being renormalised away.

Letters: J depths, B sequences, T positions, I attention input width, D width, F captured width, W draft vocabulary.
"""

import dataclasses
from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor, nn

from draftsmith.drafters.base import LayerId, Load, LossParts, Shape, TargetHead, TrainingBatch
from draftsmith.drafters.layers import Attention, Block, RMSNorm, norm_each
from draftsmith.drafters.losses import LossConfig, distill
from draftsmith.drafters.recurrent import RecurrentDrafter
from draftsmith.drafters.starts import trained_starts
from draftsmith.drafters.vocabulary import check_draft_vocab_size, choose_draft_vocabulary, draft_vocab_size, offsets


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    layers: tuple[int, ...] | None = None
    """Captured decoder-layer inputs, ascending (Hugging Face `hidden_states` index); default 2, L//2, L-3."""
    draft_vocab_size: int | None = None
    """Tokens the draft can propose, the most frequent ones of the training answers; None means all."""
    steps: int = 3
    """Draft depths unrolled in training (the paper: 7)."""
    loss: LossConfig = dataclasses.field(default_factory=LossConfig)
    """What is minimised (`drafters.losses`)."""
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
        check_draft_vocab_size(self.draft_vocab_size)
        if self.steps < 1:
            raise ValueError(f"steps is {self.steps}; give 1 or more")
        if self.fc_norm and self.norm_before_fc:
            raise ValueError("fc_norm and norm_before_fc exclude each other; set one of them to false")
        check_ascending(self.layers)


class MidLayer(Block):
    """EAGLE-3's decoder layer: its attention reads token and state side by side."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape, 2 * shape.hidden_size)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def join(self, embedded: Tensor, state: Tensor, norm_before_residual: bool) -> tuple[Tensor, Tensor]:
        """Normalised token first, normalised state behind it: attention input (…, 2 D); and the residual (…, D)."""
        normed = self.hidden_norm(state)
        joint = torch.cat([self.input_layernorm(embedded).to(normed.dtype), normed], dim=-1)
        return joint, normed if norm_before_residual else state


class Model(RecurrentDrafter):
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
        width, vocab = shape.hidden_size, draft_vocab_size(config.draft_vocab_size, shape)
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
                self.lm_head.weight.copy_(self.head_rows())

    def positions(self, name: str, load: Load) -> float:
        return load.tokens if name.startswith("fc.") else super().positions(name, load)

    def forward(self, batch: TrainingBatch) -> LossParts:
        loss = self.config.loss
        first_BTD = self.fuse(batch.features_BTF.to(self.dtype))
        reads = self.unroll(batch, first_BTD, trained_starts(batch, self.config.steps, loss.thin)).reads
        return distill(reads, [self.lm_head.weight], batch, self.target, self.token_ids_W, loss).parts

    # ---- how the layer is put together -------------------------------------------------------------------------------

    @property
    def attention(self) -> Attention:
        return self.midlayer.self_attn

    def fuse(self, features_BTF: Tensor) -> Tensor:
        if self.config.norm_before_fc:
            features_BTF = self.input_norm(features_BTF)
        if self.config.fc_norm:
            features_BTF = norm_each(self.fc_norm, features_BTF)
        out: Tensor = self.fc(features_BTF)
        return out

    def join(self, embedded: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return self.midlayer.join(embedded, state, self.config.norm_before_residual)

    def finish(self, attended: Tensor) -> tuple[Tensor, Tensor]:
        output = self.midlayer.add_mlp(attended)
        return output, self.norm(output)

    def feed(self, output: Tensor) -> Tensor:
        out: Tensor = self.norm(output) if self.config.norm_output else output
        return out

    def draft_logits(self, output: Tensor) -> Tensor:
        out: Tensor = self.lm_head(self.norm(output))
        return out


def default_layers(num_layers: int) -> tuple[int, ...]:
    """2, L//2, L-3: where every engine agrees even if the checkpoint does not say."""
    layers = (2, num_layers // 2, num_layers - 3)
    if list(layers) != sorted(set(layers)):
        raise ValueError(
            f"the default layers 2, L//2, L-3 collide for a target of {num_layers} layers ({layers}); "
            "give `layers` explicitly, for example [1, 2, 3]"
        )
    return layers


def check_ascending(layers: tuple[int, ...] | None) -> None:
    """ValueError unless layer ids are distinct and in order."""
    if layers is not None and list(layers) != sorted(set(layers)):
        raise ValueError(f"layers is {list(layers)}; give distinct layer ids in ascending order")


def check_layers(layers: tuple[int, ...], num_layers: int) -> None:
    """ValueError unless the target has all of them."""
    wrong = [layer for layer in layers if not 0 < layer <= num_layers]
    if wrong or not layers:
        raise ValueError(
            f"layers is {list(layers)}; the target has {num_layers} layers: give ids from 1 to {num_layers}"
        )
