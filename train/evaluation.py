"""What one evaluation during training says: scalars for the metrics, the whole report, and decode traces to read."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from draftsmith.drafters.base import TrainableDrafter
from draftsmith.inference import metrics
from draftsmith.inference.evaluate import draft_and_verify, spread
from draftsmith.inference.replay import ngram_rounds
from draftsmith.inference.target import Target
from draftsmith.inference.traces import Trace, trace
from draftsmith.train.config import RunConfig


@dataclasses.dataclass(frozen=True, slots=True)
class Evaluation:
    """Real acceptance on held-out prompts.

    Attributes:
        values: the scalars of metrics.jsonl, acceptance/…
        report: all of `metrics.acceptance`, how it was measured, and prompt lookup's tau on the same answers.
        traces: the rounds of some prompts; their number is that of the prompt.
    """

    values: dict[str, float]
    report: dict[str, Any]
    traces: dict[int, list[Trace]]

    @property
    def tau(self) -> float:
        return self.values["acceptance/tau"]


def evaluate_now(
    config: RunConfig, target: Target, drafter: TrainableDrafter, held_out: Sequence[list[int]]
) -> Evaluation:
    """Measures the drafter as it would be served: a copy in the target's dtype, through the verify loop."""
    section = config.eval
    copy = drafter.served(target.shape).to(target.device, target.dtype).eval()
    outputs = draft_and_verify(
        target,
        copy,
        held_out,
        depth=section.depth,
        temperature=section.temperature,
        max_new=section.max_new,
        batch_size=section.batch_size,
        drafts=config.tracking.traces > 0,
    )
    measured: dict[str, Any] = metrics.acceptance(outputs)
    depth = max((round_.proposed for output in outputs for round_ in output.rounds), default=section.depth)
    ngram_tau = metrics.tokens_per_round(
        [ngram_rounds(prompt, output.ids, depth) for prompt, output in zip(held_out, outputs, strict=True)]
    )
    report = {
        "depth": depth,
        "temperature": section.temperature,
        "prompts": len(held_out),
        **measured,
        "ngram_tau": ngram_tau,
    }
    traced = spread(len(held_out), config.tracking.traces)
    assert target.tokenizer is not None
    traces = {i: trace(target.tokenizer, held_out[i], outputs[i]) for i in traced}
    return Evaluation(scalars(report), report, traces)


def scalars(report: dict[str, Any]) -> dict[str, float]:
    """The report's numbers by their names in metrics.jsonl; a share of nothing is left out."""
    values = {"acceptance/tau": report["tokens_per_round"]["value"], "acceptance/ngram_tau": report["ngram_tau"]}
    for name in ("cond", "uncond"):
        shares = enumerate(report[f"{name}_accept"], start=1)
        values |= {f"acceptance/{name}_{i}": share for i, share in shares if share is not None}
    return values
