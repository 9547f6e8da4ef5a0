"""EAGLE-1: one decoder layer that guesses the target's next last hidden state (Li et al. 2024, arXiv 2401.15077).

At start p the layer reads the embedding of token p + 1 beside the target's state f_p after its final norm, and its output is a
guess of f_(p + 1); the target's own head behind it, frozen and never stored, predicts token p + 2. Drafting on, the guess takes the
place of the state. Both are trained: SmoothL1 towards the state, and soft labels behind the head. EAGLE-2 (arXiv 2406.16858) has
the same weights and drafts dynamic trees (`grow`); HASS (Zhang et al. 2024, arXiv 2408.15766) trains several steps on their
own outputs (`steps`, `detach`) and adds a loss on the likeliest tokens (`loss.top_k_weight`).

The layer has no norm in front of the attention and none at the end: its output has to look like f. Parameter names follow the
layout that serving engines load (`fc.weight`, `layers.0.…`). Departures: no bias in `fc` (the published heads of Llama 2 have
one, `fc_bias`); an optional reduced draft vocabulary; gradients are clipped by norm, not by value; draft logits are scaled and
soft-capped as the target's are, in training too, so that a perfect guess has exactly the target's law.

Letters: J depths, B sequences, T positions, n trained starts, D width, W draft vocabulary, V target vocabulary.
"""

import dataclasses
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from draftsmith.drafters.base import LossParts, Shape, TargetHead, TrainingBatch
from draftsmith.drafters.layers import Attention, Block
from draftsmith.drafters.layout import sent
from draftsmith.drafters.losses import LossConfig, distill
from draftsmith.drafters.recurrent import RecurrentDrafter
from draftsmith.drafters.starts import Starts, element_numbers, trained_starts
from draftsmith.drafters.vocabulary import check_draft_vocab_size, choose_offsets, draft_vocab_size

NOISE_LENGTH = 512
"""Length of a sequence whose noise is `Config.noise`; longer ones get less."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    draft_vocab_size: int | None = None
    """Tokens the draft can propose, the most frequent ones of the training answers; None means all."""
    steps: int = 1
    """Draft depths unrolled in training: 1 is EAGLE, more are HASS (the paper: 3)."""
    detach: bool = False
    """No gradient flows from one step to the one before (HASS)."""
    loss: LossConfig = dataclasses.field(default_factory=LossConfig)
    """The part behind the head (`drafters.losses`); its depth weights and starts are those of the regression too."""
    loss_weight: float = 0.1
    """Weight of that part, its top-k term included."""
    regression_weight: float = 1.0
    """Weight of SmoothL1 between the layer's output and the target's next state, a mean over the width."""
    noise: float = 0.1
    """Training reads states with uniform noise of ± this · 512 / length added; the same for the same text and epoch."""
    fc_bias: bool = False
    """A bias in the layer that joins token and state; few engines can serve it."""

    def __post_init__(self) -> None:
        check_draft_vocab_size(self.draft_vocab_size)
        if self.steps < 1:
            raise ValueError(f"steps is {self.steps}; give 1 or more")
        if self.detach and self.steps == 1:
            raise ValueError("detach has no effect with steps: 1; give steps of 2 or more, or leave detach out")
        for name in ("loss_weight", "regression_weight", "noise"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} is {getattr(self, name)}; give 0 or more")
        if self.loss_weight == self.regression_weight == 0:
            raise ValueError("loss_weight and regression_weight are both 0, so nothing is trained; raise one of them")


class Model(RecurrentDrafter):
    """The EAGLE-1 head; its arithmetic and names are those that serving engines load."""

    feature_layers = ("last",)
    d2t: Tensor
    shares_head = True

    def __init__(self, config: Config, shape: Shape) -> None:
        super().__init__()
        self.config, self.shape = config, shape
        self.training_depth = config.steps
        self.fc = nn.Linear(2 * shape.hidden_size, shape.hidden_size, bias=config.fc_bias)
        self.layers = nn.ModuleList([Block(shape)])
        vocab = draft_vocab_size(config.draft_vocab_size, shape)
        self.register_buffer("d2t", torch.zeros(vocab, dtype=torch.int64))

    def initialise(self, target: TargetHead, token_counts_V: Tensor, batches: Iterable[TrainingBatch] = ()) -> None:
        self.d2t.copy_(choose_offsets(token_counts_V, len(self.d2t)))
        self.bind(target)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
        if self.config.fc_bias:
            nn.init.zeros_(self.fc.bias)

    def forward(self, batch: TrainingBatch) -> LossParts:
        config = self.config
        trained_JBT = trained_starts(batch, config.steps, config.loss.thin)
        reads, outputs = self.unroll(batch, self.fuse(self.noisy(batch)), trained_JBT, config.detach)
        distilled = distill(
            reads, [self.shared_head_WD], batch, self.target, self.token_ids_W, config.loss, adjust_draft=True
        )
        parts = distilled.parts
        error, error_J = regression(outputs, batch, trained_JBT, distilled.weight_JBT)
        total = config.loss_weight * parts.sum + config.regression_weight * error
        return LossParts(total, parts.count, parts.metrics | {"regression": error_J})

    def noisy(self, batch: TrainingBatch) -> Tensor:
        """The target's states with the noise of training, (B, T, D). A text is as long as up to its last supervised token."""
        features_BTD = batch.features_BTF.to(self.dtype)
        if self.config.noise == 0:
            return features_BTD
        mask_N, scale_N = batch.layout.loss_mask_BT.flatten(), torch.zeros(batch.ids_BT.numel())
        for begin, end in batch.layout.bounds:
            length = int((mask_N[begin:end] * torch.arange(1, end - begin + 1)).max()) if end > begin else 0
            scale_N[begin:end] = self.config.noise * NOISE_LENGTH / max(1, length)
        scale_BT1 = sent(scale_N, features_BTD.device).view_as(batch.ids_BT)[..., None]
        noise_BTD = (2 * element_numbers(batch, features_BTD.shape[2]) - 1) * scale_BT1
        return features_BTD + noise_BTD.to(features_BTD.dtype)

    # ---- how the layer is put together -------------------------------------------------------------------------------

    @property
    def layer(self) -> Block:
        layer: Block = self.layers[0]  # type: ignore[assignment]
        return layer

    @property
    def attention(self) -> Attention:
        return self.layer.self_attn

    def fuse(self, features_BTF: Tensor) -> Tensor:
        return features_BTF

    def join(self, embedded: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Token first, state behind it, together brought to width D; no norm."""
        joint: Tensor = self.fc(torch.cat([embedded.to(state.dtype), state], dim=-1))
        return joint, joint

    def finish(self, attended: Tensor) -> tuple[Tensor, Tensor]:
        output = self.layer.add_mlp(attended)
        return output, output

    def feed(self, output: Tensor) -> Tensor:
        return output

    def draft_logits(self, output: Tensor) -> Tensor:
        out: Tensor = self.target.adjust_logits(output @ self.shared_head_WD.to(output.dtype).T)
        return out


def regression(
    outputs: list[Tensor], batch: TrainingBatch, trained_JBT: Tensor, weight_JBT: Tensor
) -> tuple[Tensor, Tensor]:
    """SmoothL1 between the output at start p and depth j and the target's state at p + 1 + j, a mean over the width.

    Args:
        outputs: J tensors (n, D), at the starts where a depth is trained.
        batch: the training texts.
        trained_JBT: bool, which these are, on the host.
        weight_JBT: what they weigh.

    Returns:
        The weighted sum, a scalar with gradient, and the J plain sums, fp32 without gradient.
    """
    totals, sums = [], []
    for depth, (output_nD, trained_BT, weight_BT) in enumerate(zip(outputs, trained_JBT, weight_JBT, strict=True)):
        starts = Starts.where(batch, trained_BT)
        wide = torch.promote_types(output_nD.dtype, torch.float32)
        next_nD = starts.pick(batch.last_BTD, 1 + depth).to(wide)
        error_n = nn.functional.smooth_l1_loss(output_nD.to(wide), next_nD, reduction="none").mean(1)
        totals.append((error_n * starts.pick(weight_BT).to(wide)).sum())
        sums.append(error_n.detach().sum().float())
    return torch.stack(totals).sum(), torch.stack(sums)
