"""Prompt lookup: the newest tokens are searched in the text so far, and what followed them there is proposed (Saxena 2023,
github.com/apoorvumang/prompt-lookup-decoding; Yang et al. 2023, arXiv 2304.04487). No weights, no logits, chains only.

The longest n-gram that occurs earlier in a row's own prompt and output wins, of several occurrences the latest. A match that
reaches the end of the text goes on into its own draft, so a text that repeats itself is drafted to any depth. All rows of a batch
propose the same number of tokens: a row without a match repeats its newest token, which is merely rejected most of the time, and
counts as drafted in acceptance rates.

It works on the host and needs the committed ids there: one device-to-host read per observation, one copy back per proposal. Every
token is indexed once, when it is observed.

Letters: B sequences, C observed tokens, N drafted tokens.
"""

import dataclasses

import torch
from torch import Tensor

from draftsmith.drafters.base import Drafter, Pick, Proposal, TargetHead
from draftsmith.drafters.tree import Fixed, Plan, fixed


class Text:
    """The tokens of one row, and where each n-gram went on the last time."""

    def __init__(self, lengths: range) -> None:
        self.ids: list[int] = []
        self._lengths = lengths
        self._follows: dict[tuple[int, ...], int] = {}

    def append(self, token: int) -> None:
        """Adds a token. The n-grams before it are indexed only now that something follows: the newest ones must not find
        themselves."""
        for n in self._lengths:
            if n <= len(self.ids):
                self._follows[tuple(self.ids[-n:])] = len(self.ids)
        self.ids.append(token)

    def continuation(self, count: int) -> list[int]:
        """`count` tokens that may follow."""
        start = len(self.ids) - 1  # no match: the newest token over and over
        for n in reversed(self._lengths):
            newest = tuple(self.ids[-n:])  # shorter than n at the beginning; then a smaller n finds the same
            if (found := self._follows.get(newest)) is not None:
                start = found
                break
        period = len(self.ids) - start
        return [self.ids[start + i % period] for i in range(count)]


@dataclasses.dataclass(frozen=True, slots=True)
class State:
    """The texts of all rows, and where proposals go."""

    texts: list[Text]
    device: torch.device


class NGram(Drafter):
    """Drafts what followed the newest n-gram before."""

    grows_trees = False

    def __init__(self, max_ngram: int = 3, min_ngram: int = 1) -> None:
        """Sets the n-grams that are searched, the longest first; ValueError unless 1 <= min_ngram <= max_ngram."""
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(
                f"min_ngram is {min_ngram} and max_ngram {max_ngram}; give 1 or more, and min_ngram up to max_ngram"
            )
        self._lengths = range(min_ngram, max_ngram + 1)

    def bind(self, target: TargetHead) -> None:
        """Any target will do: drafted tokens are its own."""

    def init(self, batch: int, capacity: int) -> State:
        return State([Text(self._lengths) for _ in range(batch)], torch.device("cpu"))

    def observe(self, state: State, ids_BC: Tensor, features_BCF: Tensor, next_B: Tensor, counts: list[int]) -> State:
        rows = torch.cat([ids_BC, next_B[:, None]], 1).tolist()  # the one read
        for text, ids, count in zip(state.texts, rows, counts, strict=True):
            if count:
                for token in ids[1 if text.ids else 0 : count]:  # the first was the last root
                    text.append(token)
                text.append(ids[-1])
        return State(state.texts, ids_BC.device)

    def propose(self, state: State, plan: Plan, pick: Pick) -> Proposal:
        assert isinstance(plan, Fixed) and plan.is_chain, "grows_trees is False"
        tokens = [text.continuation(plan.nodes) for text in state.texts]
        tokens_BN = torch.tensor(tokens, dtype=torch.int64).to(state.device)
        return Proposal(tokens_BN, fixed(plan.parents, state.device), "fixed")

    def select(self, state: State, rows_B: Tensor) -> State:
        return State([state.texts[row] for row in rows_B.tolist()], state.device)

    def replace(self, state: State, rows_B: Tensor, other: State) -> State:
        texts = list(state.texts)
        for row, text in zip(rows_B.tolist(), other.texts, strict=True):
            texts[row] = text
        return State(texts, other.device)
