"""The contract every drafter fulfils, and the values that cross it.

Decoding: `init` → `observe` the prompt → (`propose` → the target verifies → `observe` what was committed) …
The state is a value handed in and back, never an attribute of the drafter, so one drafter can serve many decodings.
Training: calling the module on a `TrainingBatch` gives a loss as sum and count; the loop divides once by the global count.

Letters: B sequences, T training positions, C newly committed tokens, N proposed nodes, K chain depth, D target width,
F feature width, V target vocabulary, W draft vocabulary.
"""

import abc
import dataclasses
import hashlib
from collections.abc import Iterable
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

LayerId = int | Literal["last"]
"""A captured hidden state: i is the residual stream entering decoder layer i (Hugging Face's `hidden_states[i]`; the
number of layers means the stream leaving the last one), "last" is the state after the final norm, what the head reads."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of a target, all that is needed to build a drafter for it; `fingerprint` names the weights."""

    hidden_size: int
    vocab_size: int
    num_layers: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    max_positions: int = 2048
    fingerprint: str = ""

    def differences(self, other: "Shape") -> str:
        """The fields in which two shapes differ, as "name: a here, b there"; empty if they agree."""
        pairs = [
            (field.name, getattr(self, field.name), getattr(other, field.name)) for field in dataclasses.fields(self)
        ]
        return "; ".join(f"{name}: {a} here, {b} there" for name, a, b in pairs if a != b and "" not in (a, b))


@dataclasses.dataclass(frozen=True, slots=True)
class Proposal:
    """N drafted nodes for each of B sequences.

    Attributes:
        tokens_BN: int64, target token ids.
        parents_N: see `tree`; a chain is (-1, 0, 1, …).
        probs_BNV: fp32, exactly the distribution each token was drawn from. None says that the draft is deterministic
            given the context (or coupled to the target's own noise), so that rules needing a law treat it as a point mass.
    """

    tokens_BN: Tensor
    parents_N: tuple[int, ...]
    probs_BNV: Tensor | None = None


class Pick(Protocol):
    """How draft tokens are chosen from draft logits; made by the decode loop for every round."""

    def __call__(self, logits_BW: Tensor, depth: int, token_ids_W: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Chooses one token per row.

        Args:
            logits_BW: draft logits for the token `depth` places behind the root's successor.
            depth: 0 for the first drafted token.
            token_ids_W: target id of each draft id, None if the vocabularies are the same.

        Returns:
            tokens_B (int64, target ids) and probs_BV (fp32 over the target vocabulary), or None for the latter.
        """


class TargetHead(Protocol):
    """What a drafter shares with its target (`inference.target.Target` fulfils it)."""

    shape: Shape

    def embed(self, ids: Tensor) -> Tensor: ...

    def unembed(self, last: Tensor) -> Tensor: ...

    def head_weight(self) -> Tensor: ...

    def adjust_logits(self, logits: Tensor) -> Tensor: ...


class Drafter(abc.ABC):
    """Proposes tokens for a frozen target to verify."""

    feature_layers: tuple[LayerId, ...] = ()
    """Which hidden states of the target `observe` wants, concatenated in this order."""
    max_depth: int | None = None
    """Deepest chain it can propose; None if there is no limit."""

    @abc.abstractmethod
    def bind(self, target: TargetHead) -> None:
        """Gives the drafter the target's embedding and head; ValueError if it was made for another target."""

    @abc.abstractmethod
    def init(self, batch: int, capacity: int) -> Any:
        """An empty state for `batch` sequences of at most `capacity` tokens, drafted ones included."""

    @abc.abstractmethod
    def observe(self, state: Any, ids_BC: Tensor, features_BCF: Tensor, next_B: Tensor, counts: list[int]) -> Any:
        """Takes in tokens that the target has committed; the prompt is the first observation.

        Args:
            ids_BC: committed tokens, row b holds `counts[b]` of them, the rest is padding.
            features_BCF: the target's features at these tokens.
            next_B: the token that follows them, committed but not yet read by the target: the next round's root.
            counts: number of tokens of each row; 0 for a row that is done and waits in the batch.

        Returns:
            the new state.
        """

    @abc.abstractmethod
    def propose(self, state: Any, depth: int, pick: Pick) -> Proposal:
        """Drafts a chain of `depth` tokens that follow the root. Does not change what `state` means."""

    @abc.abstractmethod
    def select(self, state: Any, rows_B: Tensor) -> Any:
        """The state of the given batch rows only."""


@dataclasses.dataclass(frozen=True, slots=True)
class LossParts:
    """A loss that no padding, packing, accumulation or world size can change: the loop divides the sums.

    Attributes:
        sum: scalar fp32 with gradient, summed over supervised tokens and draft steps.
        count: number of supervised tokens, a scalar fp32 without gradient.
        metrics: name -> fp32 tensor of sums; `drafters.losses.summarise` says what they become.
    """

    sum: Tensor
    count: Tensor
    metrics: dict[str, Tensor]


@dataclasses.dataclass(frozen=True, slots=True)
class TrainingBatch:
    """Right-padded training sequences.

    Attributes:
        ids_BT: int64.
        loss_mask_BT: bool, True where the target itself would have generated the token; False on padding.
        features_BTF: the layers that the drafter asked for; "last" included if it did.
        last_BTD: the target's state after the final norm, from which the teacher's logits follow.
        log_normaliser_BT: fp32, log-sum-exp of the teacher's logits over the whole vocabulary.
        argmax_BT: int64, the teacher's most likely next token.
        epoch: which pass over the data this is; thinned depths choose other starts in each.
    """

    ids_BT: Tensor
    loss_mask_BT: Tensor
    features_BTF: Tensor
    last_BTD: Tensor
    log_normaliser_BT: Tensor
    argmax_BT: Tensor
    epoch: int = 0


class TrainableDrafter(nn.Module, Drafter):
    """A drafter with weights. A kind's `Model` is built from its `Config` and the target's `Shape`."""

    config: Any
    shape: Shape
    training_depth: int
    """Number of draft positions that training supervises."""
    target: Any = None
    """The target that `bind` gave (a `TargetHead`)."""

    @abc.abstractmethod
    def initialise(self, target: TargetHead, token_counts_V: Tensor, batches: Iterable[TrainingBatch] = ()) -> None:
        """Sets the starting weights from the target.

        Args:
            target: what the drafter is trained for.
            token_counts_V: int64, how often each token is supervised in training.
            batches: some of the training batches, for kinds that fit starting values to what the target says there.
        """

    @abc.abstractmethod
    def forward(self, batch: TrainingBatch) -> LossParts:
        """The training loss."""

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def check_target(self, shape: Shape) -> None:
        """ValueError unless `shape` is that of the target this drafter was made for."""
        differences = self.shape.differences(shape)
        if differences:
            raise ValueError(
                f"this drafter was made for another target ({differences}); give the target it was made for"
            )


def vocabulary_hash(draft_to_target_W: Tensor | None) -> str:
    """Names a draft vocabulary in reports, "full" if it is the target's."""
    if draft_to_target_W is None:
        return "full"
    return hashlib.sha256(draft_to_target_W.cpu().to(torch.int64).numpy().tobytes()).hexdigest()[:12]
