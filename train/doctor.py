"""A preflight: every check on a run's config, real rows, target and drafter, before any GPU hour.

One check that fails or breaks does not stop the others. Nothing is trained or written that outlives it.
"""

import dataclasses
import sys
import time
from collections.abc import Callable
from typing import Any

from draftsmith.train import checks_costs, checks_data, checks_drafter, checks_target
from draftsmith.train.checks import Finding, Subject, Verdict

CHECKS: tuple[Callable[[Subject], Finding], ...] = (
    checks_data.rows_usable,
    checks_data.mask_coverage,
    checks_data.answer_ends,
    checks_data.supervised_text,
    checks_data.one_bos,
    checks_data.prefix_stability,
    checks_data.serving_template,
    checks_data.truncation,
    checks_data.duplicates,
    checks_data.answers_of_the_target,
    checks_target.head_gives_the_logits,
    checks_target.captured_layers,
    checks_target.batch_of_one,
    checks_target.finite_features,
    checks_target.rope_and_norms,
    checks_target.precision,
    checks_drafter.draft_vocabulary,
    checks_drafter.draft_tokenizer,
    checks_drafter.prompt_gradients,
    checks_drafter.target_frozen,
    checks_drafter.one_batch_overfit,
    checks_costs.lengths,
    checks_costs.time_of_training,
    checks_costs.disk,
    checks_costs.memory,
    checks_costs.versions,
    checks_costs.feature_folder,
    checks_costs.output_folder,
)
"""In this order; the cheap ones of the data first."""


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    """One line of the table; see `checks.Finding`."""

    name: str
    verdict: Verdict
    found: str
    mend: str
    figures: dict[str, Any]
    seconds: float


def examine(subject: Subject, checks: tuple[Callable[[Subject], Finding], ...] = CHECKS) -> list[Check]:
    """Runs all checks; says on stderr which one is at work."""
    return [_run(check, subject) for check in checks]


def failed(checks: list[Check]) -> bool:
    return any(check.verdict == "fail" for check in checks)


def _run(check: Callable[[Subject], Finding], subject: Subject) -> Check:
    name, start = check.__name__.replace("_", " "), time.perf_counter()
    if sys.stderr.isatty():
        print(f"\r\033[K{name} …", end="", file=sys.stderr, flush=True)
    try:
        finding = check(subject)
    except Exception as error:  # whatever breaks a check would break the run too, and the other checks are still wanted
        what = " ".join(str(error).split()) or type(error).__name__
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        finding = Finding("fail", kind + what, "put right what the message says; the other checks went on", {})
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    return Check(name, finding.verdict, finding.found, finding.mend, finding.figures, time.perf_counter() - start)
