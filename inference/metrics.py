"""The numbers of a decoding, with one definition each (printed with every report). A share of nothing is None.

Per round: n nodes proposed, k deep, a accepted by the rule, c committed after end-of-sequence and budget.
Pooled values carry a bootstrap interval over prompts (rounds of one prompt are not independent).
"""

from collections.abc import Callable, Sequence
from typing import TypedDict, TypeVar

import numpy as np

from draftsmith.inference.output import Output, Round

DEFINITIONS = {
    "tokens_per_round": "tokens committed / rounds, pooled; the token that the prefill yields is not counted",
    "acceptance_length_raw": "mean of accepted + 1 per round, before truncation at end-of-sequence or budget",
    "draft_acceptance_rate": "accepted / proposed draft tokens, pooled (chains)",
    "node_utilisation": "accepted / proposed nodes, pooled (trees)",
    "path_acceptance": "accepted / depth of the tree, pooled (trees)",
    "cond_accept": "for i = 1..K: rounds with >= i accepted / rounds with >= i - 1 accepted",
    "uncond_accept": "for i = 1..K: rounds with >= i accepted / rounds",
    "contexts": "tokens_per_round by the tokens before each round, in buckets that double",
    "memory": "bytes that speculation adds, by what they are for; peak_delta is measured against plain decoding, on a GPU only",
    "speedup": "tokens/s with / without speculation, the same prompts at batch 1, interleaved in one run, prefill excluded",
    "speedup_predicted": "tokens_per_round / (draft + verify + other time of a round on the speed prompts, in plain steps)",
}

SMALLEST_CONTEXT = 32
"""Contexts below twice this share the first bucket."""

Rounds = Sequence[Round]
Item = TypeVar("Item")


class Interval(TypedDict):
    """A pooled value and its 95 % bootstrap interval over prompts."""

    value: float
    low: float
    high: float


def acceptance(outputs: Sequence[Output]) -> dict[str, object]:
    """All acceptance metrics of a set of outputs; empty rounds (answers of one token) are fine."""
    rounds = [round_ for output in outputs for round_ in output.rounds]
    depth = max((round_.proposed for round_ in rounds), default=0)
    reached = [sum(round_.accepted >= i for round_ in rounds) for i in range(depth + 1)]
    eligible = [sum(r.accepted >= i - 1 and r.proposed >= i for r in rounds) for i in range(1, depth + 1)]
    return {
        "rounds": len(rounds),
        "tokens": sum(len(output.ids) for output in outputs),
        "tokens_per_round": pooled([output.rounds for output in outputs], tokens_per_round),
        "acceptance_length_raw": _share(sum(r.accepted + 1 for r in rounds), len(rounds)),
        **_rates(rounds),
        "cond_accept": [_share(reached[i], eligible[i - 1]) for i in range(1, depth + 1)],
        "uncond_accept": [_share(reached[i], len(rounds)) for i in range(1, depth + 1)],
    }


def _rates(rounds: Rounds) -> dict[str, float | None]:
    """Accepted per proposed; a tree has other names, because its siblings exclude each other."""
    accepted, deep, nodes = (sum(r[i] for r in rounds) for i in (1, 0, 3))
    if nodes == deep:
        return {"draft_acceptance_rate": _share(accepted, deep)}
    return {"node_utilisation": _share(accepted, nodes), "path_acceptance": _share(accepted, deep)}


def tokens_per_round(prompts: Sequence[Rounds]) -> float:
    """Tokens committed per round; 1 without a round, as plain decoding."""
    rounds = [round_ for prompt in prompts for round_ in prompt]
    return sum(round_.committed for round_ in rounds) / len(rounds) if rounds else 1.0


def by_context(prompt_lengths: Sequence[int], outputs: Sequence[Output]) -> dict[str, Interval]:
    """tokens_per_round by the length of the text before each round, in buckets that double: "<64", "64-127", "128-255", …"""
    buckets: dict[int, list[list[Round]]] = {}
    for length, output in zip(prompt_lengths, outputs, strict=True):
        context = length + 1  # the prefill's token
        mine: dict[int, list[Round]] = {}
        for round_ in output.rounds:
            mine.setdefault(max(SMALLEST_CONTEXT, 1 << (context.bit_length() - 1)), []).append(round_)
            context += round_.committed
        for low, rounds in mine.items():
            buckets.setdefault(low, []).append(rounds)

    def name(low: int) -> str:
        return f"<{2 * low}" if low == SMALLEST_CONTEXT else f"{low}-{2 * low - 1}"

    return {name(low): pooled(buckets[low], tokens_per_round) for low in sorted(buckets)}


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
