"""A small language model as drafter: any causal LM that predicts tokens of the target's text (Leviathan et al. 2022, arXiv
2211.17192; Chen et al. 2023, arXiv 2302.01318).

It is never changed here: loaded as it is (`inference.tokenizers.load_draft_lm`), or trained by the kind `draft_lm`. It reads
every committed token, the root included, with a cache of its own, so a proposal of depth P costs P - 1 passes; the nodes of a
depth are read together, behind the nodes above them, and nothing of it is committed.

Vocabularies. Without a `TokenMap`, draft ids are target ids. The sizes may differ (padding): draft ids that the target lacks are
never drafted, target ids that the draft lacks are read as id 0. A head may have rows for some target ids only (`head_ids_W`). With
a map the tokenizers differ: only tokens that both have are
drafted, under the draft's law renormalised over them (token-level intersection, Timor et al. 2025, arXiv 2502.05202), and a
committed token that the draft lacks is read as several draft tokens with the same text. This costs one device-to-host read per
round, because only the host knows how many they are.

All of that touches acceptance alone: the target verifies whatever comes.

Letters: B sequences, C observed tokens, M nodes expanded together, V target vocabulary, U the draft model's vocabulary, W draft
ids that can be proposed.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from draftsmith.drafters.base import Drafter, Pick, Proposal, Shape, TargetHead
from draftsmith.drafters.grow import Frontier, grow
from draftsmith.drafters.tree import Plan

SMALLEST_RATIO = 0.75
"""Without a token map, vocabularies of which the smaller has less than this share of the larger cannot be meant to be the same."""

STRETCH = 2
"""Draft tokens per target token for which a mapped vocabulary has room; of a text that needs more the rest is not read."""


class LanguageModel(Protocol):
    """What a draft model has to offer (`inference.target.Target` fulfils it)."""

    shape: Shape
    model: Any

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def compile(self) -> None: ...

    def new_cache(self, batch: int, capacity: int) -> Any:
        """A cache with `capacity`, `lengths`, `commit`, `select` and `replace` (`inference.cache.KVCache`)."""

    def forward(
        self,
        ids_BR: Tensor,
        cache: Any,
        *,
        logits_at_B: Tensor | None = None,
        frontier: Frontier | None = None,
        behind: int = 0,
    ) -> Any:
        """An output whose `logits` are (B, R, U), or (B, 1, U) for the asked rows only."""


@dataclasses.dataclass(frozen=True, slots=True)
class TokenMap:
    """How the draft's tokens and the target's correspond (`inference.tokenizers.compare` makes it).

    Attributes:
        draft_ids_W: int64, the draft ids that can be proposed.
        target_ids_W: int64, the target id of each; ascending, so that among equals the lowest target id is drafted.
        readings: for each target id the draft ids as which it is read, at least one.
        begin: draft ids in front of a text that does not begin with them.
    """

    draft_ids_W: Tensor
    target_ids_W: Tensor
    readings: tuple[tuple[int, ...], ...]
    begin: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class State:
    """What the draft model has read.

    Attributes:
        cache: keys and values of all committed tokens, the root included.
        logits_BW: for the token behind the root.
    """

    cache: Any
    logits_BW: Tensor


class DraftLM(Drafter):
    """Drafts with a language model, chains and trees."""

    def __init__(self, lm: LanguageModel, token_map: TokenMap | None = None, head_ids_W: Tensor | None = None) -> None:
        """Wraps a draft model.

        Args:
            lm: the model; it may be the target itself, or live on another device.
            token_map: how the vocabularies correspond; None if equal ids mean equal tokens.
            head_ids_W: int64, ascending, the target id of each row of a reduced head; excludes a token map.

        Raises:
            ValueError: the map names ids that the draft model lacks.
        """
        assert token_map is None or head_ids_W is None
        self.lm, self._map, self._head_ids_W = lm, token_map, head_ids_W
        self.max_positions = lm.shape.max_positions
        if token_map is not None:
            _check_ids("draft", token_map.draft_ids_W, lm.shape.vocab_size)
            self._draft_ids_W = token_map.draft_ids_W.to(lm.device)
            self._first_reading_V = torch.tensor([reading[0] for reading in token_map.readings], device=lm.device)
        self.bytes_per_token = lm.shape.kv_bytes(lm.shape.num_layers, lm.dtype.itemsize)
        self._vocab_size = 0

    def weights(self) -> Iterable[Tensor]:
        parameters: Iterable[Tensor] = self.lm.model.parameters()
        return parameters

    def compile_drafting(self) -> None:
        self.lm.compile()

    def bind(self, target: TargetHead) -> None:
        vocab_size, own = target.shape.vocab_size, self.lm.shape.vocab_size
        if self._map is not None:
            _check_ids("target", self._map.target_ids_W, vocab_size)
        elif self._head_ids_W is None and min(vocab_size, own) < SMALLEST_RATIO * max(vocab_size, own):
            raise ValueError(
                f"the draft model has {own} tokens and the target {vocab_size}, so their ids cannot mean the same; give a "
                "draft model with the target's tokenizer, or a token map (inference.tokenizers.load_draft_lm makes one)"
            )
        self._vocab_size, self._device = vocab_size, target.head_weight().device
        ids_W = self._head_ids_W if self._map is None else self._map.target_ids_W
        self.token_ids_W = None if ids_W is None else ids_W.to(self._device)

    def init(self, batch: int, capacity: int) -> State:
        assert self._vocab_size, "bind() comes before init()"
        ids_W = self.token_ids_W
        width = min(self._vocab_size, self.lm.shape.vocab_size) if ids_W is None else len(ids_W)
        # With a map a text of `capacity` tokens may be longer for the draft, and scratch rows must fit behind it all the same.
        capacity = capacity if self._map is None else (STRETCH + 1) * capacity
        logits_BW = torch.zeros(batch, width, dtype=self.lm.dtype, device=self._device)
        return State(self.lm.new_cache(batch, capacity), logits_BW)

    def observe(self, state: State, ids_BC: Tensor, features_BCF: Tensor, next_B: Tensor, counts: list[int]) -> State:
        if self._map is None:
            read_BC, counts = self._unread(state, ids_BC, next_B, counts)
        else:
            read_BC, counts = self._reread(state, self._map, ids_BC, next_B, counts)
        if not any(counts):
            return state
        counts_B = torch.tensor(counts, device=self.lm.device)
        out = self.lm.forward(read_BC, state.cache, logits_at_B=(counts_B - 1).clamp_min(0))
        state.cache.commit(counts)
        logits_BW = self._draft_logits(out.logits[:, 0])
        if not all(counts):  # what waits keeps its logits
            logits_BW = torch.where(counts_B.to(self._device)[:, None] > 0, logits_BW, state.logits_BW)
        return State(state.cache, logits_BW)

    def propose(self, state: State, plan: Plan, pick: Pick) -> Proposal:
        num_expanded = 0

        def expand(frontier: Frontier) -> Tensor:
            nonlocal num_expanded
            here = _moved(frontier, self.lm.device)
            ids_BM = self._known(here.tokens_BM)
            out = self.lm.forward(ids_BM, state.cache, frontier=here, behind=num_expanded)
            num_expanded += ids_BM.shape[1]
            return self._draft_logits(out.logits)

        return grow(plan, state.logits_BW, expand, pick, self.token_ids_W)

    def select(self, state: State, rows_B: Tensor) -> State:
        state.cache.select(rows_B.to(self.lm.device))
        return State(state.cache, state.logits_BW[rows_B])

    def replace(self, state: State, rows_B: Tensor, other: State) -> State:
        state.cache.replace(rows_B.to(self.lm.device), other.cache)
        return State(state.cache, state.logits_BW.index_copy(0, rows_B, other.logits_BW))

    # ---- vocabularies -------------------------------------------------------------------------------------------------

    def _draft_logits(self, logits: Tensor) -> Tensor:
        """Logits of the ids that can be proposed: (…, U) → (…, W)."""
        kept = logits[..., : self._vocab_size] if self._map is None else logits.index_select(-1, self._draft_ids_W)
        return kept.to(self._device)

    def _known(self, ids: Tensor) -> Tensor:
        """Draft ids of target ids, one for one."""
        if self._map is not None:
            return self._first_reading_V[ids]
        return torch.where(ids < self.lm.model.get_input_embeddings().num_embeddings, ids, 0)

    def _unread(self, state: State, ids_BC: Tensor, next_B: Tensor, counts: list[int]) -> tuple[Tensor, list[int]]:
        """What the draft model has to read, and how much of it for each row: the root is new to it, and of what was committed
        the first token is not (it was the last root), except for the prompt."""
        first = not any(state.cache.lengths)
        read_BC = torch.cat([ids_BC[:, 0 if first else 1 :], ids_BC[:, :1]], 1)  # the last column makes room
        new = [count + 1 for count in counts] if first else counts
        newest_B = torch.tensor(new, device=ids_BC.device) - 1
        read_BC[torch.arange(len(new), device=ids_BC.device), newest_B] = next_B
        return self._known(read_BC.to(self.lm.device)), new

    def _reread(
        self, state: State, token_map: TokenMap, ids_BC: Tensor, next_B: Tensor, counts: list[int]
    ) -> tuple[Tensor, list[int]]:
        """The same in the draft's own tokens, on the host."""
        cache, readings = state.cache, token_map.readings
        free = cache.capacity - max(cache.lengths)
        rows: list[list[int]] = []
        for ids, length, count in zip(
            torch.cat([ids_BC, next_B[:, None]], 1).tolist(), cache.lengths, counts, strict=True
        ):
            new = [*ids[1 if length else 0 : count], ids[-1]] if count else []
            row = [token for target_id in new for token in (readings[target_id] if target_id < len(readings) else (0,))]
            if row and not length and tuple(row[: len(token_map.begin)]) != token_map.begin:
                row = [*token_map.begin, *row]
            room = min(free, cache.capacity // (STRETCH + 1) * STRETCH - length)
            rows.append(row[max(0, len(row) - room) :])
        new_counts = [len(row) for row in rows]
        read_BC = torch.tensor([row + [0] * (max(new_counts) - len(row)) for row in rows], dtype=torch.int64)
        return read_BC.to(self.lm.device), new_counts


def _moved(frontier: Frontier, device: torch.device) -> Frontier:
    """The frontier on the draft model's device."""
    if frontier.tokens_BM.device == device:
        return frontier
    visible = frontier.visible_bMA
    return Frontier(
        frontier.depth,
        frontier.tokens_BM.to(device),
        frontier.parents_bM.to(device),
        None if visible is None else visible.to(device),
    )


def _check_ids(whose: str, ids_W: Tensor, vocab_size: int) -> None:
    if not len(ids_W) or int(ids_W.min()) < 0 or int(ids_W.max()) >= vocab_size:
        raise ValueError(
            f"the token map does not fit: it names {whose} ids {sorted(ids_W.tolist())[:1]} to {sorted(ids_W.tolist())[-1:]}, "
            f"and the {whose} model has 0 to {vocab_size - 1}; make it with the tokenizers of these two models"
        )
