"""What the doctor's checks share: what a finding is, and the run that they look at.

A check is a function from `Subject` to `Finding`; its name is the function's. The checks stand in `checks_data`, `checks_target`,
`checks_drafter` and `checks_costs`, by what they look at; `doctor` runs them.
"""

import dataclasses
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from draftsmith import drafters
from draftsmith.drafters.base import LayerId, TrainableDrafter, TrainingBatch
from draftsmith.drafters.vocabulary import check_fill
from draftsmith.inference.conversations import read_conversations
from draftsmith.inference.evaluate import spread
from draftsmith.inference.records import Conversation
from draftsmith.inference.target import Target
from draftsmith.train import warm_start
from draftsmith.train.config import FeaturesConfig, RunConfig
from draftsmith.train.data import Sequence, count_answer_tokens, sequences_of
from draftsmith.train.features import FeatureStore
from draftsmith.train.sources import Settings, gather

Verdict = Literal["pass", "warn", "fail"]
FEW_ROWS, FEW_TOKENS = 12, 4096
"""What goes through the target: so many rows, and no more tokens than that."""


class Finding(NamedTuple):
    """What a check found.

    Attributes:
        verdict: warn leaves the run usable.
        found: one line with its figures.
        mend: what to change; empty where nothing is wrong.
        figures: the same for programs.
    """

    verdict: Verdict
    found: str
    mend: str
    figures: dict[str, Any]


def judge(
    found: str, mend: str = "", *, fail: bool = False, warn: bool = False, figures: dict[str, Any] | None = None
) -> Finding:
    """The finding of a check that has decided; the mend is left out where nothing is wrong."""
    verdict: Verdict = "fail" if fail else "warn" if warn else "pass"
    return Finding(verdict, found, mend if verdict != "pass" else "", figures or {})


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """A training row: where it comes from, at full length, and as `data.max_length` cuts it."""

    source: str
    conversation: Conversation
    full: Sequence
    cut: Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class Read:
    """What the sources hold.

    Attributes:
        conversations: each with its source.
        unread: of each source that cannot be read, why.
        rejected: of each row that cannot be used, the message of the first one with its reason.
    """

    conversations: list[tuple[str, Conversation]]
    unread: list[str]
    rejected: list[str]


class Subject:
    """A run before it begins. Everything is made when a check first asks for it, and only once."""

    def __init__(
        self,
        config: RunConfig,
        target: Target,
        *,
        num_rows: int = 1000,
        serving_template: str | None = None,
        serving_length: int | None = None,
    ) -> None:
        """
        Args:
            config: of the run.
            target: its target.
            num_rows: conversations that are rendered, evenly spread over the data.
            serving_template: text of the chat template that the server uses; None for the target's own.
            serving_length: tokens of prompt and answer that will be served; None if not known.
        """
        self.config, self.target, self.num_rows = config, target, num_rows
        self.serving_template, self.serving_length = serving_template, serving_length

    @cached_property
    def tokenizer(self) -> Any:
        if self.target.tokenizer is None:
            raise ValueError(f"{self.target.name} has no tokenizer; training needs one")
        return self.target.tokenizer

    @cached_property
    def gathered(self) -> Read:
        """All conversations with their source, and what could not be read."""
        data = self.config.data
        conversations, unread, rejected = list[tuple[str, Conversation]](), list[str](), list[str]()
        for source in data.train:
            try:
                found = gather([source], Settings(max_bad_share=1.0, salvage=data.salvage, seed=self.config.seed))
            except ValueError as error:
                unread.append(str(error))
                continue
            conversations += [(source, conversation) for conversation in found.conversations]
            examples = found.report.examples
            rejected += [examples[reason] for reason in found.report.rejected.elements()]
        return Read(conversations, unread, rejected)

    @cached_property
    def rendered(self) -> tuple[list[Row], list[str]]:
        """The rows of some conversations, and why others have none."""
        conversations, rows, refused = self.gathered.conversations, list[Row](), list[str]()
        for source, conversation in (conversations[i] for i in spread(len(conversations), self.num_rows)):
            try:
                sequences = sequences_of(self.tokenizer, conversation, self.config.data.reasoning)
            except ValueError as error:
                refused.append(str(error))
                continue
            rows += [Row(source, conversation, sequence, self._cut(sequence)) for sequence in sequences]
        return rows, refused

    @property
    def complete(self) -> bool:
        """Whether all conversations are rendered."""
        return len(self.gathered.conversations) <= self.num_rows

    def _cut(self, sequence: Sequence) -> Sequence:
        longest = self.config.data.max_length
        return Sequence(sequence.ids[:longest], sequence.loss_mask[:longest])

    @property
    def rows(self) -> list[Row]:
        """Those that train something; ValueError if there is none."""
        rows = [row for row in self.rendered[0] if any(row.cut.loss_mask[2:])]
        if not rows:
            raise ValueError("no usable row: see the checks of rows and masks")
        return rows

    @cached_property
    def few(self) -> list[Row]:
        """Some rows for the target, spread over all."""
        chosen: list[Row] = []
        for row in (self.rows[i] for i in spread(len(self.rows), FEW_ROWS)):
            if chosen and sum(len(r.cut.ids) for r in chosen) + len(row.cut.ids) > FEW_TOKENS:
                break
            chosen.append(row)
        return chosen

    @cached_property
    def prompts(self) -> list[Conversation]:
        return read_conversations(self.config.eval.prompts)

    @cached_property
    def layers(self) -> tuple[LayerId, ...]:
        """Which states of the target the kind reads."""
        return drafters.build(self.config.kind, self.config.drafter_settings, self.target.shape).feature_layers

    @cached_property
    def drafter(self) -> TrainableDrafter:
        """As training begins, with the draft vocabulary of these rows."""
        config, sequences = self.config, [row.cut for row in self.rows]
        counts_V = count_answer_tokens(sequences, self.target.shape.vocab_size)
        if self.complete and config.data.vocabulary == "data":  # some rows have fewer different tokens than all
            check_fill(counts_V, config.drafter_settings.get("draft_vocab_size"), config.data.vocabulary_fill)
        start = warm_start.read(config)
        drafter = self.build({}, sequences, warm_start.counts_for_the_map(config, start, counts_V))
        if start is not None and (self.complete or config.data.vocabulary == "start"):
            warm_start.take_over(config, start, drafter, counts_V)
        return drafter

    def build(
        self, changes: dict[str, Any], sequences: list[Sequence], counts_V: Tensor | None = None
    ) -> TrainableDrafter:
        """A drafter with some settings changed, ready to be trained on some sequences; `counts_V` choose its draft vocabulary, by
        default their own."""
        config = self.config
        if counts_V is None:
            counts_V = count_answer_tokens(sequences, self.target.shape.vocab_size)
        torch.manual_seed(config.seed)
        drafter = drafters.build(config.kind, config.drafter_settings | changes, self.target.shape)
        drafter.initialise(self.target, counts_V, [self.batch(drafter, sequences[:FEW_ROWS])])
        return drafter.to(self.target.device, torch.promote_types(self.target.dtype, torch.float32))

    def batch(self, drafter: TrainableDrafter, sequences: list[Sequence]) -> TrainingBatch:
        """The training batch of some sequences, as `features.store: online` makes it."""
        features = FeaturesConfig(top_k=self.config.features.top_k)
        return FeatureStore(self.target, sequences, drafter.feature_layers, features).batch(range(len(sequences)))
