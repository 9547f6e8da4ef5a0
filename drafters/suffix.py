"""Suffix decoding: what followed the newest tokens before, in a row's own text and in all texts that this drafter has seen, is
proposed; chains and trees, no weights, no logits (SuffixDecoding, Oliaro et al. 2024, arXiv 2411.04975).

The longest match wins, of equally long ones the most frequent continuation, of equally frequent ones the row's own, then the
latest. The matches are followed together: a token keeps those that agree with it, and where none goes on, the newest tokens with
the draft behind them are searched again, so a text that repeats itself is drafted to any depth. Where there is no match the newest
token is repeated, as in `ngram`: all rows of a batch propose the same number of tokens.

Instead of the paper's suffix trees each text has an index of hashed n-grams (of `LENGTHS` tokens; the latest `max_matches`
places of each), whose places are extended backwards to the length of the match: every token is indexed once when it is observed,
in the row's own index and in the shared one, and both insertion and search take a bounded time. The shared index holds the newest
`max_tokens` tokens and drops the oldest; they take about 0.9 kB each on the host.

What others have written changes drafts, never the output, but it does change acceptance: a prompt that is decoded twice finds its
own answer. `forget` is for measurements that must not profit from that.

Letters: B sequences, N drafted tokens.
"""

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Sequence

import torch

from draftsmith.drafters.base import Pick, Proposal
from draftsmith.drafters.texts import State, TextDrafter
from draftsmith.drafters.tree import Dynamic, Plan, Tree, fixed

LENGTHS = (1, 2, 4, 8, 16)
"""Of the n-grams that are looked up, shortest first."""

Place = tuple[list[int], int]
"""The ids of a text, and the index of a token in it that follows a match."""


class Index:
    """Where n-grams went on, the latest places of each."""

    def __init__(self, max_matches: int, max_tokens: int | None = None) -> None:
        self._max_matches, self._max_tokens = max_matches, max_tokens
        self._places: dict[tuple[int, ...], list[Place]] = {}
        self._order: deque[Place] = deque()

    def __len__(self) -> int:
        """Places that it knows."""
        return len(self._order)

    def add(self, place: Place) -> None:
        """Takes in a token that follows others."""
        for ngram in _ngrams(*place):
            places = self._places.setdefault(ngram, [])
            places.append(place)
            if len(places) > self._max_matches:
                del places[0]
        self._order.append(place)
        if self._max_tokens is not None and len(self._order) > self._max_tokens:
            self._drop(self._order.popleft())

    def _drop(self, place: Place) -> None:
        for ngram in _ngrams(*place):
            places = self._places.get(ngram)
            if places and places[0] is place:  # else later ones have pushed it out
                del places[0]
                if not places:
                    del self._places[ngram]

    def find(self, newest: Sequence[int]) -> list[Place]:
        """Places behind the longest n-gram at the end of `newest`, the latest last; none if not even one token occurs."""
        for n in reversed(LENGTHS):
            if n <= len(newest) and (places := self._places.get(tuple(newest[-n:]))):
                return places
        return []

    def clear(self) -> None:
        self._places.clear()
        self._order.clear()


class Text:
    """The tokens of one row, and where they may go on."""

    def __init__(self, corpus: Index, max_match: int, max_matches: int) -> None:
        self.ids: list[int] = []
        self._own, self._corpus, self._max_match = Index(max_matches), corpus, max_match

    def append(self, token: int) -> None:
        self.ids.append(token)
        if len(self.ids) > 1:
            place = (self.ids, len(self.ids) - 1)
            self._own.add(place)
            self._corpus.add(place)

    def matches(self, drafted: list[int]) -> list[Place]:
        """The places behind the longest match of the text with a draft behind it; the best one of a draw last."""
        newest = (self.ids[-self._max_match :] + drafted)[-self._max_match :]
        places = [place for place in self._corpus.find(newest) if place[0] is not self.ids] + self._own.find(newest)
        lengths = [_common(newest, ids, at) for ids, at in places]
        longest = max(lengths, default=0)
        return [place for place, length in zip(places, lengths, strict=True) if length == longest]


class Node:
    """A place in a draft, and its continuations: token, share of the matches, and the matches that agree, the best first."""

    def __init__(self, text: Text, drafted: list[int], places: list[Place]) -> None:
        self._text, self.drafted = text, drafted
        here = [(ids, at) for ids, at in places if at < len(ids)] or text.matches(drafted)
        tokens = [ids[at] for ids, at in here]
        latest = {token: number for number, token in enumerate(tokens)}
        ranked = sorted(Counter(tokens).items(), key=lambda item: (item[1], latest[item[0]]), reverse=True)
        self.options = [(token, count / len(here)) for token, count in ranked]
        self._here = here
        self._given: set[int] = set()

    def child(self) -> "Node":
        """The best continuation that was not given yet; the newest token again, or any other one, where there are no more."""
        if len(self._given) < len(self.options):
            token = self.options[len(self._given)][0]
        else:
            newest = (self.drafted or self._text.ids)[-1:]
            token = next(token for token in itertools.chain(newest, itertools.count()) if token not in self._given)
        self._given.add(token)
        places = [(ids, at + 1) for ids, at in self._here if ids[at] == token]
        return Node(self._text, [*self.drafted, token], places)


class Suffix(TextDrafter[Text]):
    """Drafts the most frequent continuations of the longest match."""

    def __init__(self, max_tokens: int = 1 << 16, max_match: int = 64, max_matches: int = 32) -> None:
        """An empty corpus.

        Args:
            max_tokens: tokens of all texts that it remembers; 0 keeps to each row's own.
            max_match: tokens by which matches are compared.
            max_matches: places of one n-gram that are looked at.

        Raises:
            ValueError: a bound that cannot be.
        """
        if max_tokens < 0 or max_match < 1 or max_matches < 1:
            raise ValueError(
                f"max_tokens is {max_tokens}, max_match {max_match} and max_matches {max_matches}; give 0 or more tokens and "
                "1 or more of the others"
            )
        self.corpus = Index(max_matches, max_tokens)
        self._max_match, self._max_matches = max_match, max_matches

    def forget(self) -> None:
        self.corpus.clear()

    def new_text(self) -> Text:
        return Text(self.corpus, self._max_match, self._max_matches)

    def propose(self, state: State[Text], plan: Plan, pick: Pick) -> Proposal:
        grown = [_grow(Node(text, [], []), plan) for text in state.texts]
        tokens_BN = torch.tensor([tokens for tokens, _ in grown], dtype=torch.int64).to(state.device)
        if isinstance(plan, Dynamic):
            parents_BN = torch.tensor([parents for _, parents in grown], dtype=torch.int64).to(state.device)
            return Proposal(tokens_BN, Tree(parents_BN, plan.depth), "fixed")
        return Proposal(tokens_BN, fixed(plan.parents, state.device), "fixed")


def _grow(root: Node, plan: Plan) -> tuple[list[int], list[int]]:
    """Tokens and parents of one row's draft."""
    nodes = [root]
    if not isinstance(plan, Dynamic):
        for parent in plan.parents:
            nodes.append(nodes[parent + 1].child())
        return [node.drafted[-1] for node in nodes[1:]], list(plan.parents)
    # The best paths first, by the product of their shares; what is missing then are guesses behind the root.
    parents: list[int] = []
    waiting: list[tuple[float, int, int]] = []  # minus the score, a number for draws, the node that is continued
    numbers = itertools.count()

    def offer(parent: int, score: float) -> None:
        if len(nodes[parent].drafted) < plan.depth:
            for _, share in nodes[parent].options[: plan.width]:
                heapq.heappush(waiting, (-score * share, next(numbers), parent))

    offer(0, 1.0)
    while len(parents) < plan.nodes:
        score, _, parent = heapq.heappop(waiting) if waiting else (0.0, 0, 0)
        nodes.append(nodes[parent].child())
        parents.append(parent - 1)
        offer(len(nodes) - 1, -score)
    return [node.drafted[-1] for node in nodes[1:]], parents


def _ngrams(ids: list[int], at: int) -> list[tuple[int, ...]]:
    """The n-grams in front of a place."""
    return [tuple(ids[at - n : at]) for n in LENGTHS if n <= at]


def _common(newest: Sequence[int], ids: Sequence[int], at: int) -> int:
    """How many tokens at the end of `newest` are those in front of `at`."""
    length, limit = 0, min(at, len(newest))
    while length < limit and newest[-1 - length] == ids[at - 1 - length]:
        length += 1
    return length
