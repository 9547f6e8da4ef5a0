"""The reduced draft vocabulary: which target tokens a draft head can propose, and the map between the two id spaces.

Serving engines store the map as offsets: target_id = draft_id + d2t[draft_id], for kept ids in ascending order.

Letters: V target vocabulary, W draft vocabulary, D width.
"""

import torch
from torch import Tensor

from draftsmith.drafters.base import Shape


def choose_draft_vocabulary(token_counts_V: Tensor, size: int) -> Tensor:
    """The `size` most frequent target ids, ascending int64 (W); ties and unseen tokens are taken from the lowest id up.

    Args:
        token_counts_V: int64, how often each target id occurs among the supervised training tokens.
        size: W, at most V.
    """
    order_V = torch.sort(token_counts_V, descending=True, stable=True).indices
    return order_V[:size].sort().values


def coverage(token_counts_V: Tensor, kept_W: Tensor) -> float:
    """Share of the counted tokens that the kept ids cover, 0 to 1."""
    total = int(token_counts_V.sum())
    return int(token_counts_V[kept_W].sum()) / total if total else 0.0


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


def check_draft_vocab_size(size: int | None) -> None:
    """ValueError unless a config's `draft_vocab_size` can be one."""
    if size is not None and size < 1:
        raise ValueError(f"draft_vocab_size is {size}; give 1 or more, or leave it out")


def draft_vocab_size(size: int | None, shape: Shape) -> int:
    """W: what a config asks for, or the target's whole vocabulary; ValueError if it asks for more."""
    if size is not None and size > shape.vocab_size:
        raise ValueError(f"draft_vocab_size is {size}, above the target's vocabulary of {shape.vocab_size}")
    return size or shape.vocab_size
