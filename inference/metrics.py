"""The numbers of a decoding, with one definition each (printed with every report). A share of nothing is None.

Per round: k tokens proposed along the path, a accepted by the rule, c committed after end-of-sequence and budget.
Pooled values carry a bootstrap interval over prompts (rounds of one prompt are not independent).
"""

from collections.abc import Callable, Sequence
from typing import TypedDict, TypeVar

import numpy as np

from draftsmith.inference.decode import Output

DEFINITIONS = {
    "tokens_per_round": "tokens committed / rounds, pooled; the token that the prefill yields is not counted",
    "acceptance_length_raw": "mean of accepted + 1 per round, before truncation at end-of-sequence or budget",
    "draft_acceptance_rate": "accepted / proposed draft tokens, pooled",
    "cond_accept": "for i = 1..K: rounds with >= i accepted / rounds with >= i - 1 accepted",
    "uncond_accept": "for i = 1..K: rounds with >= i accepted / rounds",
    "speedup": "tokens/s with / without speculation, the same prompts at batch 1, interleaved in one run, prefill excluded",
    "speedup_predicted": "tokens_per_round / (draft + verify + other time of a round on the speed prompts, in plain steps)",
}

Rounds = Sequence[tuple[int, int, int]]
Item = TypeVar("Item")


class Interval(TypedDict):
    """A pooled value and its 95 % bootstrap interval over prompts."""

    value: float
    low: float
    high: float


def acceptance(outputs: Sequence[Output]) -> dict[str, object]:
    """All acceptance metrics of a set of outputs; empty rounds (answers of one token) are fine."""
    rounds = [round_ for output in outputs for round_ in output.rounds]
    depth = max((k for k, _, _ in rounds), default=0)
    reached = [sum(a >= i for _, a, _ in rounds) for i in range(depth + 1)]
    eligible = [sum(a >= i - 1 and k >= i for k, a, _ in rounds) for i in range(1, depth + 1)]
    return {
        "rounds": len(rounds),
        "tokens": sum(len(output.ids) for output in outputs),
        "tokens_per_round": pooled([output.rounds for output in outputs], tokens_per_round),
        "acceptance_length_raw": _share(sum(a + 1 for _, a, _ in rounds), len(rounds)),
        "draft_acceptance_rate": _share(sum(a for _, a, _ in rounds), sum(k for k, _, _ in rounds)),
        "cond_accept": [_share(reached[i], eligible[i - 1]) for i in range(1, depth + 1)],
        "uncond_accept": [_share(reached[i], len(rounds)) for i in range(1, depth + 1)],
    }


def tokens_per_round(prompts: Sequence[Rounds]) -> float:
    """Tokens committed per round; 1 without a round, as plain decoding."""
    rounds = [round_ for prompt in prompts for round_ in prompt]
    return sum(c for _, _, c in rounds) / len(rounds) if rounds else 1.0


def pooled(items: Sequence[Item], statistic: Callable[[Sequence[Item]], float], *, samples: int = 1000) -> Interval:
    """A statistic of all prompts' items, with its bootstrap interval from resampled prompts (fixed seed)."""
    generator = np.random.default_rng(0)
    values = [
        statistic([items[i] for i in generator.integers(0, len(items), len(items))])
        for _ in range(samples if items else 0)
    ]
    low, high = np.percentile(values, [2.5, 97.5]) if values else (statistic(items),) * 2
    return {"value": statistic(items), "low": float(low), "high": float(high)}


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
