"""A small language model that is trained to draft: distilled from the target whose text it continues.

It reads the text alone, nothing of the target, and predicts the next token as any language model does; training pulls its law
towards the target's (Hinton et al. 2015, arXiv 1503.02531; DistillSpec, Zhou et al. 2023, arXiv 2310.08461, with forward KL,
reverse KL, JSD or total variation: `loss.divergence`). It begins as a few layers of the target, as another checkpoint, or from
nothing.

- answers that the draft writes itself and the target scores (`on_policy`, DistillSpec; `train.on_policy` writes them)
- only the tokens that a distilled reference copy finds easier than the draft does (AdaSPEC, Hu et al. 2025, arXiv 2510.19779)
- low-rank adapters instead of all weights

Drafting is `language_model.DraftLM`. In the conventions of `losses`, the state at position p + 1 is depth 0 of start p; deeper
drafts are the same law on a longer text, so depth 0 is all that is trained and drafts may be of any depth.

Departures: the head is never tied to the embedding and may lack tokens, all of which are read; AdaSPEC's share is taken of each
conversation, so that no selection depends on what else is in a batch.

Letters: B sequences, T positions, D width of the draft, V target vocabulary, U tokens that the draft reads, W draft vocabulary.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from draftsmith.drafters import causal_lm, checkpoint
from draftsmith.drafters.base import Load, LossParts, Pick, Proposal, Shape, TargetHead, TrainableDrafter, TrainingBatch
from draftsmith.drafters.language_model import DraftLM, LanguageModel, State
from draftsmith.drafters.layout import sent
from draftsmith.drafters.losses import Distilled, LossConfig, distill
from draftsmith.drafters.starts import Starts, trained_starts
from draftsmith.drafters.tree import Plan
from draftsmith.drafters.unpack import apart, recompute_layers, text_by_text, together
from draftsmith.drafters.vocabulary import check_draft_vocab_size, choose_draft_vocabulary, draft_vocab_size, offsets

SIZES = ("hidden_size", "num_layers", "num_heads", "intermediate_size")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    source: str = "target"
    """Where the weights start: "target" (some of its layers, with its embedding, norm and head), "scratch" (a random Llama of the
    given sizes), or a model folder or hub id with the target's tokenizer."""
    layers: tuple[int, ...] | None = None
    """Of source target: the decoder layers that are kept, ascending, the first is 0; default a fifth of them, half of these the
    first and half the last (SmolLM2 before training: forward KL 10.2, against 13.7 evenly spread and 14.9 for the first alone)."""
    hidden_size: int | None = None
    """Of source scratch: width."""
    num_layers: int | None = None
    """Of source scratch: decoder layers (shallow and wide drafts cost least for what they get accepted)."""
    num_heads: int | None = None
    """Of source scratch: attention heads."""
    intermediate_size: int | None = None
    """Of source scratch: inner width of the MLP."""
    draft_vocab_size: int | None = None
    """Tokens the draft can propose, the most frequent ones of the training answers; None means all. All are read."""
    lora_rank: int = 0
    """Rank of adapters that are trained instead of the weights; what is saved has them merged. 0 trains all weights."""
    loss: LossConfig = dataclasses.field(default_factory=LossConfig)
    """What is minimised (`drafters.losses`)."""
    reference: str | None = None
    """A run or drafter folder with a distilled draft LM, for AdaSPEC's selection of tokens."""
    keep: float = 1.0
    """With a reference: share of each conversation's tokens that is trained, those with the largest loss minus reference loss."""
    on_policy: float = 0.0
    """Share of the training batches whose answers the draft writes itself; 1 is on-policy, between 0 and 1 mixed distillation."""
    lm: dict[str, Any] | None = None
    """The draft LM's own Hugging Face config; filled in when the weights are set. Given in a run config it saves reading `source`
    to know the sizes."""

    def __post_init__(self) -> None:
        check_draft_vocab_size(self.draft_vocab_size)
        if not self.source:
            raise ValueError("source is empty; give 'target', 'scratch', a model folder or a hub id")
        if self.layers is not None and self.source != "target":
            raise ValueError(f"layers belongs to source: target, not to {self.source!r}; leave it out")
        if self.layers is not None and (not self.layers or list(self.layers) != sorted({abs(i) for i in self.layers})):
            raise ValueError(f"layers is {list(self.layers)}; give distinct layer numbers from 0 in ascending order")
        sizes = {name: getattr(self, name) for name in SIZES}
        if self.source != "scratch" and any(size is not None for size in sizes.values()):
            given = ", ".join(name for name, size in sizes.items() if size is not None)
            raise ValueError(f"{given}: sizes belong to source: scratch, not to {self.source!r}; leave them out")
        if self.source == "scratch":
            if not all(size is not None and size >= 1 for size in sizes.values()):
                raise ValueError(f"source scratch needs {', '.join(SIZES)}, each 1 or more; it has {sizes}")
            assert self.hidden_size is not None and self.num_heads is not None
            if self.hidden_size % (2 * self.num_heads):
                raise ValueError(
                    f"hidden_size is {self.hidden_size} and num_heads {self.num_heads}; give a width that is an even multiple"
                )
        if self.lora_rank < 0 or (self.lora_rank and self.source == "scratch"):
            raise ValueError(f"lora_rank is {self.lora_rank}; give 0 or more, and 0 for source: scratch")
        if not 0 < self.keep <= 1 or not 0 <= self.on_policy <= 1:
            raise ValueError(f"keep is {self.keep} and on_policy {self.on_policy}; give (0, 1] and [0, 1]")
        if (self.reference is not None) != (self.keep < 1):
            raise ValueError("reference and a keep below 1 belong together; give both or neither")


class Model(TrainableDrafter):
    """A causal LM `lm` with the head rows of the draft vocabulary, and `d2t`, their target ids."""

    d2t: Tensor
    training_depth = 1

    def __init__(self, config: Config, shape: Shape) -> None:
        super().__init__()
        self.shape, self.on_policy, self.averages = shape, config.on_policy, config.lora_rank == 0
        self._runner: LanguageModel | None = None
        self._drafting: DraftLM | None = None
        self._references: tuple[Model, ...] = ()  # a tuple, so that the reference is no part of this module
        self.register_buffer("d2t", torch.zeros(0, dtype=torch.int64))
        self._build(config, config.lm or self._first_config(config))

    def _first_config(self, config: Config) -> dict[str, Any]:
        if config.source == "target":  # a target of another architecture says so itself (`initialise`)
            return causal_lm.llama(self.shape, num_hidden_layers=len(kept_layers(config, self.shape)))
        if config.source != "scratch":
            return causal_lm.read_config(config.source)
        sizes: dict[str, Any] = {
            "hidden_size": config.hidden_size,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_heads,
            "intermediate_size": config.intermediate_size,
            "head_dim": None,
        }
        return causal_lm.llama(self.shape, **sizes)

    def _build(self, config: Config, lm: dict[str, Any]) -> None:
        self.config = dataclasses.replace(config, lm=lm)
        readable = lm["vocab_size"]
        vocab = min(draft_vocab_size(config.draft_vocab_size, self.shape), readable)
        self.lm: Any = causal_lm.build(lm, vocab)
        self.max_positions = self.lm.config.max_position_embeddings
        self.d2t = self.d2t.new_zeros(vocab)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Model":
        """Moves and casts all but the LM's own buffers, which are moved only: rotary frequencies must stay exact."""
        exact = [(m, name, buffer) for m in self.lm.modules() for name, buffer in m.named_buffers(recurse=False)]
        super()._apply(fn, recurse)
        for module, name, buffer in exact:
            setattr(module, name, buffer.to(getattr(module, name).device))
        return self

    # ---- training ----------------------------------------------------------------------------------------------------

    def initialise(self, target: TargetHead, token_counts_V: Tensor, batches: Iterable[TrainingBatch] = ()) -> None:
        config, layers = self.config, kept_layers(self.config, self.shape)
        if config.source == "target":
            if target.not_plain:
                raise ValueError(
                    f"a draft LM with source: target begins as layers of the target, but {target.not_plain}; or give another source"
                )
            self._build(config, causal_lm.cut_config(target.model.config.get_text_config(), layers))
        kept_W = choose_draft_vocabulary(token_counts_V[: self.config.lm["vocab_size"]], len(self.d2t))
        self.d2t.copy_(offsets(kept_W))
        if config.source == "target":
            causal_lm.cut_weights(self.lm, target, layers, kept_W)
        elif config.source != "scratch":
            causal_lm.check_tokenizer(config.source, target.tokenizer)
            causal_lm.load_weights(self.lm, config.source, kept_W)
        if config.lora_rank:
            causal_lm.add_adapters(self.lm, config.lora_rank)
        self.bind(target)
        if config.reference is not None:
            self._references = (self._read_reference(config.reference, target),)

    def _read_reference(self, folder: str, target: TargetHead) -> "Model":
        head = target.head_weight()
        judge = checkpoint.load(folder, dtype=head.dtype, device=head.device)
        if not isinstance(judge, Model):
            raise ValueError(f"reference {folder!r} is no draft LM; give the folder of a run of kind draft_lm")
        judge.bind(target)
        if not torch.equal(judge.d2t.cpu(), self.d2t.cpu()):
            raise ValueError(
                f"reference {folder!r} has another draft vocabulary, so its losses cannot be compared; train it with the same "
                "data and draft_vocab_size"
            )
        return judge

    def positions(self, name: str, load: Load) -> float:
        return load.supervised if name.startswith("lm.lm_head.") else load.tokens

    def forward(self, batch: TrainingBatch) -> LossParts:
        if not self._references:
            return self._distilled(batch).parts
        with torch.no_grad():
            all_tokens = self._distilled(batch)
            easy = self._references[0]._distilled(batch, loss=self.config.loss)  # whatever it was distilled with itself
            trained = sent(trained_starts(batch, 1)[0], batch.ids_BT.device)
            gap, trained = (apart(x_BT, batch) for x_BT in ((all_tokens.loss_JBT - easy.loss_JBT)[0], trained))
            weight_BT = together(hardest(gap, trained, self.config.keep), batch)
        parts = self._distilled(batch, weight_BT[None]).parts
        return LossParts(parts.sum, parts.count, all_tokens.parts.metrics)

    def _distilled(
        self, batch: TrainingBatch, scale_1BT: Tensor | None = None, loss: LossConfig | None = None
    ) -> Distilled:
        recompute_layers(self.lm, self.activation_checkpointing)
        states_BTD = text_by_text(
            lambda ids: self.lm.base_model(input_ids=self._known(ids), use_cache=False).last_hidden_state, batch
        )
        head_WD, loss = self.lm.get_output_embeddings().weight, loss or self.config.loss
        starts = Starts.where(batch, trained_starts(batch, 1)[0])
        return distill(
            [starts.pick(states_BTD, 1)], [head_WD], batch, self.target, self.token_ids_W, loss, scale_JBT=scale_1BT
        )

    def _known(self, ids_BT: Tensor) -> Tensor:
        """Ids that the LM can read: one that it lacks is read as 0, as in drafting."""
        return torch.where(ids_BT < self.lm.get_input_embeddings().num_embeddings, ids_BT, 0)

    def served(self, shape: Shape) -> TrainableDrafter:
        """Without adapters: they are merged."""
        if not self.config.lora_rank:
            return super().served(shape)
        plain = Model(dataclasses.replace(self.config, lora_rank=0), shape)
        plain.lm.load_state_dict(causal_lm.merged(self.lm))
        plain.d2t.copy_(self.d2t)
        return plain

    # ---- drafting ----------------------------------------------------------------------------------------------------

    def bind(self, target: TargetHead) -> None:
        super().bind(target)
        if self._runner is None or self._runner.model is not self.lm:
            self._runner = target.drive(self.lm)

    @property
    def bytes_per_token(self) -> int:  # type: ignore[override]
        return self._bound().shape.kv_bytes(self.lm.config.num_hidden_layers, self.dtype.itemsize)

    def compile_drafting(self) -> None:
        self._bound().compile()

    def init(self, batch: int, capacity: int) -> State:
        self._drafting = DraftLM(self._bound(), head_ids_W=self.token_ids_W)
        self._drafting.bind(self.target)
        return self._drafting.init(batch, capacity)

    def observe(self, state: State, ids_BC: Tensor, features_BCF: Tensor, next_B: Tensor, counts: list[int]) -> State:
        return self._drafter().observe(state, ids_BC, features_BCF, next_B, counts)

    def propose(self, state: State, plan: Plan, pick: Pick) -> Proposal:
        return self._drafter().propose(state, plan, pick)

    def select(self, state: State, rows_B: Tensor) -> State:
        return self._drafter().select(state, rows_B)

    def replace(self, state: State, rows_B: Tensor, other: State) -> State:
        return self._drafter().replace(state, rows_B, other)

    def _bound(self) -> LanguageModel:
        assert self._runner is not None, "bind() comes first"
        return self._runner

    def _drafter(self) -> DraftLM:
        assert self._drafting is not None, "init() comes first"
        return self._drafting


def kept_layers(config: Config, shape: Shape) -> tuple[int, ...]:
    """The decoder layers that are cut out of the target; ValueError if it has not that many."""
    total = shape.num_layers
    if config.layers is None:
        count = max(1, round(total / 5))
        return (*range(count - count // 2), *range(total - count // 2, total))
    if config.layers[-1] >= total:
        raise ValueError(f"layers is {list(config.layers)}; the target has {total} layers: give numbers below {total}")
    return config.layers


def hardest(gap_BT: Tensor, trained_BT: Tensor, keep: float) -> Tensor:
    """Weights (B, T) that keep a share of each sequence's trained starts, rounded up: those with the largest gap, of equal ones the
    first. Kept starts weigh as much together as all of them would."""
    order_BT = torch.where(trained_BT, gap_BT, -math.inf).argsort(dim=1, descending=True, stable=True)
    rank_BT = order_BT.argsort(dim=1)
    total_B1 = trained_BT.sum(1, keepdim=True)
    kept_B1 = (keep * total_B1).ceil()
    return (trained_BT & (rank_BT < kept_B1)) * (total_B1 / kept_B1.clamp_min(1))
