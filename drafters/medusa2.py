"""Medusa-2: Medusa heads and the target itself trained together (Cai et al. 2024, arXiv 2401.10774, sections 2.2.2 and 2.3.2).

The target gets low-rank adapters (`adapters`); the heads read the *adapted* target's last state, and their loss reaches the
adapters through it, so the target learns to be easier to guess. Self-distillation holds it in place: KL(original ‖ adapted)
wherever the original generated the training text. The paper's L = KL + λ₀ L_heads is minimised as L_heads + KL / λ₀, which AdamW
cannot tell apart (clipping can: set `optim.clip_norm` for this scale, that of kind `medusa`).

The heads learn the adapted target's own law (a constant to them: the adapted target is not pulled towards their guesses), not
the original's, because the adapted target is what verifies them. *After training the adapted target is the target*: decoding is
lossless towards it and only near the original. A run's folder holds it, merged, beside plain `medusa` heads that fit no other.

Departures: those of `medusa`; the text is the original target's, labels are soft.

Letters: B sequences, T positions, D width, n supervised rows.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.drafters import medusa
from draftsmith.drafters.adapters import AdaptedTarget, compare
from draftsmith.drafters.base import Load, LossParts, Pace, Shape, TargetHead, TrainableDrafter, TrainingBatch
from draftsmith.drafters.layout import sent
from draftsmith.drafters.starts import supervised_rows
from draftsmith.drafters.unpack import text_by_text


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config(medusa.Config):
    """The heads' settings are those of `medusa`."""

    adapt_rank: int = 32
    """Of the adapters."""
    adapt_alpha: float = 16.0
    """The adapters' products are scaled by alpha / rank."""
    adapt_modules: tuple[str, ...] = ()
    """Names of the adapted linear layers, for example [q_proj, v_proj]; empty means all of the decoder: attention and MLP."""
    distill_weight: float = 100.0
    """Weight of KL(original ‖ adapted) beside the heads' loss: 1 / λ₀, with the paper's 0.01 for self-distillation. The larger, the
    closer the target stays to the original."""
    adapt_learning_rate_ratio: float = 0.25
    """The adapters' learning rate as a share of the heads' (the paper's heads learn four times as fast)."""
    warmup_heads: float = 0.1
    """Share of the steps in which the heads train alone; their first gradients would spoil the target."""

    def __post_init__(self) -> None:
        medusa.Config.__post_init__(self)
        if self.adapt_rank < 1:
            raise ValueError(f"adapt_rank is {self.adapt_rank}; give 1 or more")
        for name in ("adapt_alpha", "distill_weight", "adapt_learning_rate_ratio"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; give a number above 0")
        if not 0 <= self.warmup_heads < 1:
            raise ValueError(f"warmup_heads is {self.warmup_heads}; give a share of the steps, 0 or more and below 1")


class Model(medusa.Model):
    """The heads and, once `initialise` has seen the target, the adapters; for training. What decodes is `served`."""

    adapts_target = True
    averages = False

    def __init__(self, config: Config, shape: Shape) -> None:
        super().__init__(config, shape)
        self.adapters = nn.ParameterDict()

    def initialise(self, target: TargetHead, token_counts_V: Tensor, batches: Iterable[TrainingBatch] = ()) -> None:
        if target.not_plain:
            raise ValueError(
                f"medusa2 adapts a copy of the target, but {target.not_plain}; or give kind: medusa, which leaves it as it is"
            )
        super().initialise(target, token_counts_V, batches)
        config = self.config
        self.adapted = AdaptedTarget(target.model, config.adapt_rank, config.adapt_alpha, config.adapt_modules)
        for name, parameter in self.adapted.parameters.items():  # the very tensors that the adapted target reads
            self.adapters[name.replace(".", "/")] = parameter

    def pace(self, name: str) -> Pace:
        if not name.startswith("adapters."):
            return Pace()
        return Pace(self.config.adapt_learning_rate_ratio, self.config.warmup_heads)

    def training_flops(self) -> Callable[[Load], float]:
        """The adapted target runs as well; its own weights are frozen."""
        model, heads = self.target.model, super().training_flops()
        frozen = sum(p.numel() for p in model.parameters()) - model.get_input_embeddings().weight.numel()
        return lambda load: heads(load) + 4 * frozen * load.tokens

    def positions(self, name: str, load: Load) -> float:
        return load.tokens if name.startswith("adapters.") else super().positions(name, load)

    def forward(self, batch: TrainingBatch) -> LossParts:
        """The store's states of the original target serve the self-distillation alone."""
        self.adapted.recompute(self.activation_checkpointing)
        last_BTD = text_by_text(self.adapted.last, batch)
        rows_n = sent(supervised_rows(batch), last_BTD.device)
        here_nD, there_nD = (x_BTD.flatten(0, 1).index_select(0, rows_n) for x_BTD in (batch.last_BTD, last_BTD))
        kl_n, normaliser_n, argmax_n = compare(here_nD, there_nD, self.target)

        def placed(like_BT: Tensor, values_n: Tensor) -> Tensor:
            return (
                torch.zeros_like(like_BT).flatten().index_copy(0, rows_n, values_n.to(like_BT.dtype)).view_as(like_BT)
            )

        own = dataclasses.replace(  # as a teacher, states pass no gradient on (`losses`)
            batch,
            last_BTD=last_BTD,
            log_normaliser_BT=placed(batch.log_normaliser_BT, normaliser_n),
            argmax_BT=placed(batch.argmax_BT, argmax_n),
        )
        parts = super().forward(own)
        kl = kl_n.sum()
        metrics = parts.metrics | {"adapted_kl": kl.detach()}
        return LossParts(parts.sum + self.config.distill_weight * kl, parts.count, metrics)

    def adapted_model(self) -> Any:
        return self.adapted.merged()

    def served(self, shape: Shape) -> TrainableDrafter:
        """Plain `medusa` heads for the adapted target, whose sizes and fingerprint `shape` holds."""
        names = [field.name for field in dataclasses.fields(medusa.Config)]
        heads = medusa.Model(medusa.Config(**{name: getattr(self.config, name) for name in names}), shape)
        heads.load_state_dict({n: t for n, t in self.state_dict().items() if not n.startswith("adapters.")})
        return heads
