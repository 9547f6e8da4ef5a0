"""The contract every drafter fulfils, and the values that cross it.

Decoding: `init` → `observe` the prompt → (`propose` → the target verifies → `observe` what was committed) …
The state is a value handed in and back, never an attribute of the drafter, so one drafter can serve many decodings.
Training: calling the module on a `TrainingBatch` gives a loss as sum and count; the loop divides once by the global count.

Letters: B sequences, T training positions, C newly committed tokens, N proposed nodes, K chain depth, D target width,
F feature width, V target vocabulary, W draft vocabulary.
"""

import abc
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from draftsmith.drafters.layout import Layout, one_text_per_row
from draftsmith.drafters.tree import Plan, Tree

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

    def kv_bytes(self, num_layers: int, itemsize: int) -> int:
        """Bytes of one token's keys and values in so many layers."""
        return 2 * num_layers * self.num_kv_heads * self.head_dim * itemsize

    def differences(self, other: "Shape") -> str:
        """The fields in which two shapes differ, as "name: a here, b there"; empty if they agree."""
        pairs = [
            (field.name, getattr(self, field.name), getattr(other, field.name)) for field in dataclasses.fields(self)
        ]
        return "; ".join(f"{name}: {a} here, {b} there" for name, a, b in pairs if a != b and "" not in (a, b))


Drawn = Literal["coupled", "sampled", "fixed"]
"""Where drafted tokens come from: coupled to the noise that the target uses itself; sampled, from laws that are handed over;
or fixed by the context alone (the most likely tokens, an n-gram match)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Proposal:
    """N drafted nodes for each of B sequences.

    Attributes:
        tokens_BN: int64, target token ids; siblings are distinct.
        tree: how the nodes hang together.
        drawn: where the tokens come from; rules refuse what they are not exact for.
        probs_BNV: fp32, exactly the law that each token was drawn from (of a second sibling: without the first one); given
            if and only if `drawn` is "sampled".
    """

    tokens_BN: Tensor
    tree: Tree
    drawn: Drawn
    probs_BNV: Tensor | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Picked:
    """Tokens for the k children of each of M nodes.

    Attributes:
        tokens_BMk: int64, target ids, the likeliest first.
        scores_BMk: log of how likely each is to be the target's token as the draft sees it, 0 or less.
        probs_BMkV: fp32, the law each was drawn from if they were sampled, else None.
    """

    tokens_BMk: Tensor
    scores_BMk: Tensor
    probs_BMkV: Tensor | None


class Pick(Protocol):
    """How draft tokens are chosen from draft logits; made by the decode loop for every round."""

    drawn: Drawn

    def __call__(self, logits_BMW: Tensor, depth: int, token_ids_W: Tensor | None, count: int) -> Picked:
        """Chooses the children of M nodes.

        Args:
            logits_BMW: draft logits for the token behind each node.
            depth: of the nodes; 0 is the root.
            token_ids_W: target id of each draft id, None if the vocabularies are the same.
            count: k, children of each node.
        """


class TargetHead(Protocol):
    """What a drafter shares with its target (`inference.target.Target` fulfils it)."""

    shape: Shape
    model: Any
    """The Hugging Face model, for kinds that begin as a part of it."""
    layers: nn.ModuleList
    """Its decoder layers."""
    tokenizer: Any
    """None if it came without one."""

    @property
    def not_plain(self) -> str | None:
        """Why its decoder layers cannot be copied or adapted as they are (quantised, sharded, …); None if they can."""

    def drive(self, model: Any) -> Any:
        """Another causal LM, run as the target is (a `language_model.LanguageModel`): in eval mode, but not frozen."""

    def embed(self, ids: Tensor) -> Tensor: ...

    def unembed(self, last: Tensor) -> Tensor: ...

    def head_weight(self) -> Tensor: ...

    def adjust_logits(self, logits: Tensor) -> Tensor: ...


class Drafter(abc.ABC):
    """Proposes tokens for a frozen target to verify."""

    feature_layers: tuple[LayerId, ...] = ()
    """Which hidden states of the target `observe` wants, concatenated in this order."""
    max_depth: int | None = None
    """Deepest node it can propose; None if there is no limit."""
    max_positions: int | None = None
    """Longest text it can follow; None if there is no limit of its own. Beyond it decoding goes on plainly."""
    grows_trees: bool = True
    """Whether it can propose trees; otherwise chains only."""
    bytes_per_token: int = 0
    """What its state keeps on the device per token of text: keys and values."""

    def weights(self) -> Iterable[Tensor]:
        """All parameters that drafting reads besides the target's own."""
        return ()

    def forget(self) -> None:  # noqa: B027  (doing nothing is right for most kinds)
        """Drops what it remembers of earlier texts, so that a measurement does not profit from the one before."""

    def compile_drafting(self) -> None:  # noqa: B027
        """Compiles what `observe` and `propose` run (`torch.compile`); nothing where there is little to gain."""

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
    def propose(self, state: Any, plan: Plan, pick: Pick) -> Proposal:
        """Drafts what follows the root, in the shape that `plan` asks for. Does not change what `state` means."""

    @abc.abstractmethod
    def select(self, state: Any, rows_B: Tensor) -> Any:
        """The state of the given batch rows only."""

    @abc.abstractmethod
    def replace(self, state: Any, rows_B: Tensor, other: Any) -> Any:
        """The state with the given batch rows taken from `other`, whose batch they are; both were made for the same capacity."""


@dataclasses.dataclass(frozen=True, slots=True)
class LossParts:
    """A loss that no padding, batching, accumulation or world size can change: the loop divides the sums.

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
    """Rows of training texts: one or more in a row, one behind the other, padding only behind the last.

    Attributes:
        ids_BT: int64.
        loss_mask_BT: bool, True where the target itself would have generated the token; False on padding.
        features_BTF: the layers that the drafter asked for; "last" included if it did.
        last_BTD: the target's state after the final norm, from which the teacher's logits follow; of width 0 where they are given.
        log_normaliser_BT: fp32, log-sum-exp of the teacher's logits over the whole vocabulary.
        argmax_BT: int64, the teacher's most likely next token.
        epoch: which pass over the data this is; thinned depths choose other starts in each.
        top_ids_BTk: int32, the k tokens that alone have a probability for the teacher; None if all have.
        top_logits_BTk: their logits, in the target's dtype.
        layout: which texts there are, on the host; not given, each row is one.
    """

    ids_BT: Tensor
    loss_mask_BT: Tensor
    features_BTF: Tensor
    last_BTD: Tensor
    log_normaliser_BT: Tensor
    argmax_BT: Tensor
    epoch: int = 0
    top_ids_BTk: Tensor | None = None
    top_logits_BTk: Tensor | None = None
    layout: Layout = None  # type: ignore[assignment]  # never None once made

    def __post_init__(self) -> None:
        if self.layout is None:
            object.__setattr__(self, "layout", one_text_per_row(self.ids_BT, self.loss_mask_BT))

    @property
    def next_BT(self) -> Tensor:
        """The token behind each place, int64; of the last place it is the first one, where nothing is trained."""
        return self.ids_BT.flatten().roll(-1).view_as(self.ids_BT)


class Load(NamedTuple):
    """The size of a batch: its tokens, those of them that count in the loss, and its texts."""

    tokens: int
    supervised: int
    texts: int


class Pace(NamedTuple):
    """How a parameter learns.

    Attributes:
        rate: its learning rate as a share of the run's.
        start: share of the steps before which it stands still; its schedule begins there.
    """

    rate: float = 1.0
    start: float = 0.0


class TrainableDrafter(nn.Module, Drafter):
    """A drafter with weights. A kind's `Model` is built from its `Config` and the target's `Shape`."""

    config: Any
    shape: Shape
    training_depth: int
    """Number of draft positions that training supervises."""
    on_policy: float = 0.0
    """Share of the training batches whose answers the drafter writes itself (`train.on_policy`); it must do without features."""
    target: Any = None
    """The target that `bind` gave (a `TargetHead`)."""
    shares_head: bool = False
    """Whether the draft reads logits off the target's own head, frozen: `bind` then sets `shared_head_WD`."""
    shared_head_WD: Tensor
    """`head_rows` of the target."""
    adapts_target: bool = False
    """Whether training changes a copy of the target too: then the model itself is for training, and `served` decodes with
    `adapted_model` as its target."""

    activation_checkpointing: bool = False
    """Training keeps less of each layer or depth for backward and computes it again there."""
    averages: bool = True
    """Whether `optim.ema` can follow its weights: not where adapters hold what is trained."""

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

    def weights(self) -> Iterable[Tensor]:
        return self.parameters()

    def recomputed(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """`function(*arguments)`, computed again in backward where that is asked for (`activation_checkpointing`)."""
        if not (self.activation_checkpointing and torch.is_grad_enabled()):
            return function(*arguments)
        return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)

    def pace(self, name: str) -> Pace:
        """How the parameter of that name learns."""
        return Pace()

    def training_flops(self) -> Callable[[Load], float]:
        """FLOPs of forward and backward on a batch: 6 per parameter of a matrix and position that it is applied to, for its output
        and two gradients (4 if it is frozen), and 2 for the teacher's head. Attention scores, norms, embeddings are left out. The
        sizes are read now, before an engine shards them."""
        embeddings = {id(module.weight) for module in self.modules() if isinstance(module, nn.Embedding)}
        costs = {
            name: (6 if parameter.requires_grad else 4) * parameter.numel()
            for name, parameter in self.named_parameters()
            if parameter.dim() > 1 and id(parameter) not in embeddings
        }
        ids_W = self.token_ids_W
        head = self.shape.hidden_size * (self.shape.vocab_size if ids_W is None else len(ids_W))

        def flops(load: Load) -> float:
            own = sum(cost * self.positions(name, load) for name, cost in costs.items())
            return own + head * (2 * load.supervised + (4 * self.draft_positions(load) if self.shares_head else 0))

        return flops

    def positions(self, name: str, load: Load) -> float:
        """How many positions of a batch the parameter of that name is applied to. Here each depth has its own."""
        return self.draft_positions(load) / self.training_depth

    def draft_positions(self, load: Load) -> float:
        """Draft positions that a batch trains, all depths together."""
        return load.supervised * float(sum(self.config.loss.thin**j for j in range(self.training_depth)))

    def served(self, shape: Shape) -> "TrainableDrafter":
        """A copy of what is saved and decodes after training, on the CPU, for the target of that shape."""
        copy = type(self)(self.config, shape)
        copy.load_state_dict(self.state_dict())
        return copy

    def adapted_model(self) -> Any:
        """The Hugging Face model that takes the target's place after training, independent of it; None if it stays."""
        return None

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    @property
    def token_ids_W(self) -> Tensor | None:
        """Target id of each draft id; None if the draft has the whole vocabulary. Kinds with a reduced one keep it as a buffer
        `d2t`, int64 (W,): target id - draft id."""
        offsets_W = getattr(self, "d2t", None)
        if offsets_W is None or len(offsets_W) == self.shape.vocab_size:
            return None
        ids_W: Tensor = offsets_W + torch.arange(len(offsets_W), device=offsets_W.device)
        return ids_W

    def bind(self, target: TargetHead) -> None:
        if target is self.target:
            return
        self.check_target(target.shape)
        self.target = target
        if self.shares_head:
            self.shared_head_WD = self.head_rows()

    def head_rows(self) -> Tensor:
        """The target's head rows of the draft vocabulary, (W, D), without gradient; not copied where that is the whole one."""
        weight_VD: Tensor = self.target.head_weight().detach()  # a Parameter would become one of the drafter's own
        ids_W = self.token_ids_W
        return weight_VD if ids_W is None else weight_VD[ids_W.to(weight_VD.device)]

    def check_target(self, shape: Shape) -> None:
        """ValueError unless `shape` is that of the target this drafter was made for."""
        differences = self.shape.differences(shape)
        if differences:
            raise ValueError(
                f"this drafter was made for another target ({differences}); give the target it was made for"
            )
