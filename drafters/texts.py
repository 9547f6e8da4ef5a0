"""Drafters that read texts alone, no weights and no logits: what prompt lookup and suffix decoding share.

They work on the host and need the committed ids there: one device-to-host read per observation, one copy back per proposal. Every
token is handed to its row's text once, when it is observed.

Letters: B sequences, C observed tokens, N drafted tokens.
"""

import abc
import dataclasses
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from draftsmith.drafters.base import Drafter, TargetHead


class Growing(Protocol):
    """The text of one row."""

    ids: list[int]

    def append(self, token: int) -> None: ...


T = TypeVar("T", bound=Growing)


@dataclasses.dataclass(frozen=True, slots=True)
class State(Generic[T]):
    """The texts of all rows, and where proposals go."""

    texts: list[T]
    device: torch.device


class TextDrafter(Drafter, Generic[T]):
    """Keeps one text per row; a drafter says what a text is and drafts from it."""

    @abc.abstractmethod
    def new_text(self) -> T:
        """An empty text."""

    def bind(self, target: TargetHead) -> None:
        """Any target will do: drafted tokens are its own."""

    def init(self, batch: int, capacity: int) -> State[T]:
        return State([self.new_text() for _ in range(batch)], torch.device("cpu"))

    def observe(self, state: Any, ids_BC: Tensor, features_BCF: Tensor, next_B: Tensor, counts: list[int]) -> State[T]:
        rows = torch.cat([ids_BC, next_B[:, None]], 1).tolist()  # the one read
        for text, ids, count in zip(state.texts, rows, counts, strict=True):
            if count:
                for token in ids[1 if text.ids else 0 : count]:  # the first was the last root
                    text.append(token)
                text.append(ids[-1])
        return State(state.texts, ids_BC.device)

    def select(self, state: State[T], rows_B: Tensor) -> State[T]:
        return State([state.texts[row] for row in rows_B.tolist()], state.device)

    def replace(self, state: State[T], rows_B: Tensor, other: State[T]) -> State[T]:
        texts = list(state.texts)
        for row, text in zip(rows_B.tolist(), other.texts, strict=True):
            texts[row] = text
        return State(texts, other.device)
