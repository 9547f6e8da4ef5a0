"""Prompt lookup: the newest tokens are searched in the text so far, and what followed them there is proposed (Saxena 2023,
github.com/apoorvumang/prompt-lookup-decoding; Yang et al. 2023, arXiv 2304.04487). No weights, no logits, chains only.

The longest n-gram that occurs earlier in a row's own prompt and output wins, of several occurrences the latest. A match that
reaches the end of the text goes on into its own draft, so a text that repeats itself is drafted to any depth. All rows of a batch
propose the same number of tokens: a row without a match repeats its newest token, which is merely rejected most of the time, and
counts as drafted in acceptance rates.

It works on the host (`texts`). Every token is indexed once, when it is observed.

Letters: B sequences, N drafted tokens.
"""

import torch

from draftsmith.drafters.base import Pick, Proposal
from draftsmith.drafters.texts import State, TextDrafter
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


class NGram(TextDrafter[Text]):
    """Drafts what followed the newest n-gram before."""

    grows_trees = False

    def __init__(self, max_ngram: int = 3, min_ngram: int = 1) -> None:
        """Sets the n-grams that are searched, the longest first; ValueError unless 1 <= min_ngram <= max_ngram."""
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(
                f"min_ngram is {min_ngram} and max_ngram {max_ngram}; give 1 or more, and min_ngram up to max_ngram"
            )
        self._lengths = range(min_ngram, max_ngram + 1)

    def new_text(self) -> Text:
        return Text(self._lengths)

    def propose(self, state: State[Text], plan: Plan, pick: Pick) -> Proposal:
        assert isinstance(plan, Fixed) and plan.is_chain, "grows_trees is False"
        tokens = [text.continuation(plan.nodes) for text in state.texts]
        tokens_BN = torch.tensor(tokens, dtype=torch.int64).to(state.device)
        return Proposal(tokens_BN, fixed(plan.parents, state.device), "fixed")
