"""What speculation adds to a target's memory: sizes that follow from shapes, and on a GPU the measured peak.

Letters: B sequences, R rows of a verify pass (root first), V vocabulary, F captured width.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from draftsmith.drafters.base import Drafter
from draftsmith.drafters.tree import Plan, scratch_rows
from draftsmith.inference.target import Target


def footprint(target: Target, drafter: Drafter, plan: Plan, batch: int) -> dict[str, int]:
    """Bytes by what they are for, with `batch` sequences decoded together.

    Returns:
        drafter_weights: all parameters that drafting reads besides the target's own.
        draft_state_per_token: the drafter's keys and values per token of text.
        target_state_per_token: the target's, to compare with.
        verify_logits: (B, R, V) in the target's dtype.
        captured_features: (B, R, F) of one verify pass.
        prefill_features_per_token: F values per prompt token, until the drafter has read them.
        scratch_state: cache slots of both models for drafted tokens.
    """
    itemsize, rows = target.dtype.itemsize, plan.nodes + 1
    width = len(drafter.feature_layers) * target.shape.hidden_size * itemsize
    return {
        "drafter_weights": sum(p.numel() * p.element_size() for p in drafter.weights()),
        "draft_state_per_token": drafter.bytes_per_token,
        "target_state_per_token": target.bytes_per_token,
        "verify_logits": batch * rows * target.shape.vocab_size * itemsize,
        "captured_features": batch * rows * width,
        "prefill_features_per_token": width,
        "scratch_state": batch * (plan.depth + scratch_rows(plan)) * (target.bytes_per_token + drafter.bytes_per_token),
    }


@contextmanager
def peak(device: torch.device) -> Iterator[list[int]]:
    """Its list then holds the most bytes that were allocated within; nothing off a GPU, where nobody counts."""
    measured: list[int] = []
    if device.type != "cuda":
        yield measured
        return
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    yield measured
    measured.append(torch.cuda.max_memory_allocated(device) - before)


def describe(sizes: dict[str, Any]) -> str:
    """One line for people."""
    scratch = sizes["verify_logits"] + sizes["captured_features"] + sizes["scratch_state"]
    line = (
        f"{sizes['drafter_weights'] / 1e6:.1f} MB of drafter weights, {sizes['draft_state_per_token'] / 1e3:.2f} KB of "
        f"draft state per token (the target's own: {sizes['target_state_per_token'] / 1e3:.2f} KB), "
        f"{scratch / 1e6:.1f} MB while verifying {sizes['batch']} sequences"
    )
    if sizes["peak_delta"] is not None:
        line += f"; measured peak {sizes['peak_delta'] / 1e6:+.1f} MB against plain decoding"
    return line
