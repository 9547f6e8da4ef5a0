"""What makes a run suspicious while it trains. A warning never stops it; it is given once and says what to check.

The figures come from log lines and evaluations that are made anyway. What is not finite does stop a run: `finite`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

SMALLEST_GAP = 0.2
"""Tokens per round by which real and predicted acceptance may differ in any case: an untrained drafter has hardly any."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GuardConfig:
    loss_above_uniform: float = 1.5
    """Warn if, behind the warm-up, the loss of the first draft position exceeds so many times that of a uniform guess, the log of
    the draft vocabulary's size."""
    tau_gap: float = 0.5
    """Warn if really accepted tokens per round and those that training predicts differ by more than this share of the larger one
    (and by more than the measurement is uncertain)."""
    ngram_after: float = 0.5
    """Warn if, behind this share of the run, prompt lookup would have had more accepted on the same answers."""

    def __post_init__(self) -> None:
        for name in ("loss_above_uniform", "tau_gap"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; give a number above 0")
        if not 0 <= self.ngram_after <= 1:
            raise ValueError(f"ngram_after is {self.ngram_after}; give a share from 0 to 1")


class Warned(NamedTuple):
    """A warning: a name that stays, a line for a title, and what it means and what to check."""

    name: str
    title: str
    text: str


class Guard:
    """Looks at what a run logs.

    Args:
        config: when to warn.
        warmup: share of the run in which the learning rate rises.
        uniform: loss of a uniform guess.
        greedy: whether acceptance is measured at temperature 0, which is what training predicts.
        warn: is handed the warnings, of each name possibly several.
    """

    def __init__(
        self, config: GuardConfig, warmup: float, uniform: float, greedy: bool, warn: Callable[[int, Warned], None]
    ) -> None:
        self.config, self.warmup, self.uniform, self.greedy, self.warn = config, warmup, uniform, greedy, warn
        self._predicted: list[float] = []

    def window(self, step: int, share: float, values: Mapping[str, float], supervised: list[int]) -> None:
        """Looks at a log line.

        Args:
            step: that was just done.
            share: of the run that is done.
            values: of the line.
            supervised: tokens that count in the loss in each of its steps, of all processes.
        """
        survived = (values.get(f"survived/{j}") for j in range(len(values)))
        self._predicted = [value for value in survived if value is not None]
        empty = [step - len(supervised) + 1 + i for i, tokens in enumerate(supervised) if tokens == 0]
        if empty:
            self.warn(step, _nothing_supervised(empty, len(supervised)))
        elif share > self.warmup and values["loss/0"] > self.config.loss_above_uniform * self.uniform:
            self.warn(step, _above_uniform(values["loss/0"], self.uniform))

    def evaluated(self, step: int, share: float, report: Mapping[str, Any]) -> None:
        """Looks at the report of an evaluation."""
        tau, ngram_tau = report["tokens_per_round"], report["ngram_tau"]
        together = list(zip(self._predicted, report["uncond_accept"], strict=False))
        if self.greedy and together:
            predicted, real = (sum(column) for column in zip(*together, strict=True))
            difference, uncertain = abs(predicted - real), (tau["high"] - tau["low"]) / 2
            if difference > max(self.config.tau_gap * max(predicted, real), uncertain, SMALLEST_GAP):
                self.warn(step, _taus_disagree(1 + predicted, 1 + real, len(together)))
        if share >= self.config.ngram_after and tau["value"] < ngram_tau:
            self.warn(step, _below_ngram(tau["value"], ngram_tau, share))


def _nothing_supervised(empty: list[int], num_steps: int) -> Warned:
    some = f"{len(empty)} of the last {num_steps} steps, the first of them step {empty[0]}"
    return Warned(
        "nothing_supervised",
        "nothing to learn from",
        f"no token was supervised in {f'step {empty[0]}' if len(empty) == 1 else some}; look at the loss masks, which "
        "draftsmith doctor CONFIG shows, and whether data.max_length cuts the answers off",
    )


def _above_uniform(loss: float, uniform: float) -> Warned:
    return Warned(
        "above_uniform",
        "the loss is far above a uniform guess",
        f"the loss of the first draft position is {loss:.2f}, a uniform guess over the draft vocabulary has {uniform:.2f}; "
        "lower optim.learning_rate or lengthen optim.warmup, and run draftsmith doctor CONFIG, which overfits one "
        "conversation: if that fails, features, labels or the draft vocabulary do not belong together",
    )


def _taus_disagree(predicted: float, real: float, positions: int) -> Warned:
    figures = (
        f"over the first {positions} draft positions training predicts tau {predicted:.2f}, and decoding held-out "
        f"prompts gives {real:.2f}; "
    )
    if real < predicted:
        return Warned(
            "real_below_predicted",
            "real acceptance is far below the predicted one",
            f"{figures}decoding shows the drafter something else than training does. Check that the answers in "
            "data.train are this target's own, under the same chat template, system prompt and temperature (draftsmith "
            "data makes such); that draftsmith doctor CONFIG passes (captured layers, final norm, masks, draft "
            "vocabulary); that held-out prompts are of the kind and length of the training data; and that a small data "
            "set is not learned by heart (more data, fewer epochs)",
        )
    return Warned(
        "real_above_predicted",
        "real acceptance is far above the predicted one",
        f"{figures}held-out answers are easier than the training data. Check what is supervised, which draftsmith doctor "
        "CONFIG shows (prompts, template tokens and answers of another model are hard to predict), whether held-out "
        "answers merely repeat themselves (traces.jsonl), and whether held-out prompts are in the training data",
    )


def _below_ngram(tau: float, ngram_tau: float, share: float) -> Warned:
    return Warned(
        "below_ngram",
        "prompt lookup would have more accepted",
        f"{share:.0%} of the run is done and tau is {tau:.2f}; copying what followed the newest words before (the drafter "
        f"ngram, nothing to train) reaches {ngram_tau:.2f} on the same answers. Check that the loss falls, that there "
        "are enough training tokens, and that draftsmith doctor CONFIG passes; on answers that repeat themselves, which "
        "traces.jsonl shows, prompt lookup may stay ahead",
    )
