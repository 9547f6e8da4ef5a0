"""The reduced draft vocabulary: which target tokens a draft head can propose, and the map between the two id spaces.

The map travels in the checkpoint as the buffer `d2t` of offsets, as serving engines store it: target_id = draft_id +
d2t[draft_id], for kept ids in ascending order (so a zero means "the same id", not "unused"). Its hash stands in the config
beside it, and whoever continues or loads a drafter with another map is refused: a head whose rows mean other tokens still
trains and loads, and is accepted on nothing. The whole vocabulary needs no map.

Letters: V target vocabulary, W draft vocabulary, D width.
"""

import hashlib
from typing import Literal

import torch
from torch import Tensor

from draftsmith.drafters.base import Shape

Fill = Literal["rank", "none"]


def choose_draft_vocabulary(token_counts_V: Tensor, size: int) -> Tensor:
    """The `size` most frequent target ids, ascending int64 (W); ties and unseen tokens are taken from the lowest id up.

    Args:
        token_counts_V: int64, how often each target id occurs among the supervised training tokens.
        size: W, at most V.

    Raises:
        ValueError: a reduced vocabulary, and nothing counted: the lowest ids would be a guess.
    """
    if size < len(token_counts_V) and not bool(token_counts_V.any()):
        raise ValueError(
            f"a draft vocabulary of {size} tokens is chosen by counting, and no token was counted; give training data with "
            "supervised tokens, or leave draft_vocab_size out for the whole vocabulary"
        )
    order_V = torch.sort(token_counts_V, descending=True, stable=True).indices
    return order_V[:size].sort().values


def check_fill(token_counts_V: Tensor, size: int | None, fill: Fill) -> None:
    """ValueError if a vocabulary of that size needs tokens that never occur, and they are not wanted."""
    distinct = int((token_counts_V > 0).sum())
    if fill == "none" and size is not None and distinct < size < len(token_counts_V):
        raise ValueError(
            f"draft_vocab_size is {size}, but only {distinct} different tokens are supervised in the training data; give at most "
            f"{distinct}, more data, or data.vocabulary_fill=rank, which fills up with the tokenizer's lowest ids"
        )


def coverage(token_counts_V: Tensor, kept_W: Tensor) -> float:
    """Share of the counted tokens that the kept ids cover, 0 to 1."""
    total = int(token_counts_V.sum())
    return int(token_counts_V[kept_W].sum()) / total if total else 0.0


def filled_up(token_counts_V: Tensor, kept_W: Tensor) -> int:
    """How many kept ids were never counted."""
    return int((token_counts_V[kept_W] == 0).sum())


def offsets(kept_W: Tensor) -> Tensor:
    """d2t (int64, W) for ascending kept ids."""
    return kept_W - torch.arange(len(kept_W), device=kept_W.device)


def choose_offsets(token_counts_V: Tensor, size: int) -> Tensor:
    """d2t of the `size` most frequent target ids."""
    return offsets(choose_draft_vocabulary(token_counts_V, size))


def check_offsets(d2t_W: Tensor, vocab_size: int) -> None:
    """ValueError unless `d2t_W` maps every draft id to a target id of its own, in ascending order."""
    ids_W = d2t_W + torch.arange(len(d2t_W), device=d2t_W.device)
    if len(ids_W) and (int(ids_W[0]) < 0 or int(ids_W[-1]) >= vocab_size or not bool((ids_W.diff() > 0).all())):
        raise ValueError(
            "the draft vocabulary map (d2t) is broken: draft_id + d2t[draft_id] must ascend within the target's "
            f"{vocab_size} tokens; export or train the drafter again"
        )


def vocabulary_hash(draft_to_target_W: Tensor | None) -> str:
    """Names a draft vocabulary: a hash of its target ids in order, "full" if it is the target's."""
    if draft_to_target_W is None:
        return "full"
    return hashlib.sha256(draft_to_target_W.cpu().to(torch.int64).numpy().tobytes()).hexdigest()[:12]


def check_hash(found: str, expected: str, what: str, mend: str) -> None:
    """ValueError if a draft vocabulary is not the one that it has to be.

    Args:
        found, expected: `vocabulary_hash` of both.
        what: names the place of the one that was found.
        mend: what to change.
    """
    if found != expected:
        raise ValueError(
            f"{what} has another draft vocabulary (its map's hash is {found}, expected {expected}), so the head's rows would mean "
            f"other tokens; {mend}"
        )


def check_draft_vocab_size(size: int | None) -> None:
    """ValueError unless a config's `draft_vocab_size` can be one."""
    if size is not None and size < 1:
        raise ValueError(f"draft_vocab_size is {size}; give 1 or more, or leave it out")


def draft_vocab_size(size: int | None, shape: Shape) -> int:
    """W: what a config asks for, or the target's whole vocabulary; ValueError if it asks for more."""
    if size is not None and size > shape.vocab_size:
        raise ValueError(f"draft_vocab_size is {size}, above the target's vocabulary of {shape.vocab_size}")
    return size or shape.vocab_size
