"""Where a run's figures go: always into files in the run folder, and to a tracker if the config names one: scalars through
accelerate, the rest of W&B through its run object (`wandb_run`).

    metrics.jsonl      the scalars of each log line and evaluation
    acceptance.jsonl   the whole report of each evaluation
    traces.jsonl       decode traces, a round per line
    warnings.jsonl     what `guard` warned of

A run that continues from a checkpoint drops what the files hold beyond it. W&B is then asked for the last step that it has: later
ones that a kill took from it are told from the files, and none is told twice. A tracker that fails is given up, with a warning; the
files go on.
"""

import json
import math
import netrc
import os
import sys
import urllib.parse
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from draftsmith.train.config import RunConfig, TrackingConfig, to_plain
from draftsmith.train.evaluation import Evaluation
from draftsmith.train.guard import Warned
from draftsmith.train.wandb_run import WandbRun


def prepare(tracking: TrackingConfig) -> str | None:
    """accelerate's name of the tracker, None for none; ValueError if its package is missing.

    W&B without a key records offline: a run must not stop to ask for one.
    """
    name = tracking.tracker
    if name == "none":
        return None
    try:
        if name == "wandb":
            if not os.environ.get("WANDB_MODE") and not has_wandb_key():
                os.environ["WANDB_MODE"] = "offline"  # before the import, which reads it
            import wandb  # noqa: F401
        else:
            import tensorboard  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name == name:
            raise ValueError(
                f"tracking.tracker is {name!r}, which is not installed; "
                f"pip install 'draftsmith[{name}]' or set tracking.tracker=none"
            ) from error
        _given_up(name, error)
        return None
    except Exception as error:  # a broken installation raises anything
        _given_up(name, error)
        return None
    return name


def has_wandb_key() -> bool:
    """Whether W&B would find a key: in the environment or in the netrc file that `wandb login` writes."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urllib.parse.urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    try:
        return host is not None and netrc.netrc().authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


class Metrics:
    """Writes the files and tells the tracker; only the main process does either.

    Args:
        accelerator: with the tracker that `prepare` named.
        config: of the run.
        resumed_step: of the checkpoint that the run continues from; 0 for a new one.
    """

    def __init__(self, accelerator: Accelerator, config: RunConfig, resumed_step: int) -> None:
        self.accelerator, self.config = accelerator, config
        folder = Path(config.output)
        self.metrics, self.acceptance, self.traces, self.warnings = (
            folder / f"{name}.jsonl" for name in ("metrics", "acceptance", "traces", "warnings")
        )
        self._known = -1  # the last step that the tracker has
        self._warned: set[str] = set()
        self._wandb: WandbRun | None = None
        if not accelerator.is_main_process:
            return
        self._known = max((line["step"] for line in _lines(self.metrics)), default=-1)
        self._warned = {line["name"] for line in _lines(self.warnings)}
        for file in (self.metrics, self.acceptance, self.traces):
            _drop_beyond(file, resumed_step)
        self._tell(self._start)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Scalars under their names."""
        if not self.accelerator.is_main_process:
            return
        clean = {name: value if math.isfinite(value) else None for name, value in values.items()}
        _append(self.metrics, {"step": step, **clean})
        if step > self._known:
            self._tell(lambda: self.accelerator.log(values, step=step))

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        """An evaluation: scalars, report and traces."""
        if not self.accelerator.is_main_process:
            return
        self.log(step, evaluation.values)
        _append(self.acceptance, {"step": step, **evaluation.report})
        rounds = [(prompt, trace) for prompt, traces in evaluation.traces.items() for trace in traces]
        _append(self.traces, *({"step": step, "prompt": prompt, **trace} for prompt, trace in rounds))
        if self._wandb is not None and step > self._known:
            wandb = self._wandb
            self._tell(lambda: wandb.evaluated(step, evaluation))

    def warn(self, step: int, warned: Warned) -> None:
        """A warning, unless the run has had it."""
        if not self.accelerator.is_main_process or warned.name in self._warned:
            return
        self._warned.add(warned.name)
        _append(self.warnings, {"step": step, **warned._asdict()})
        _say(f"warning: step {step}: {warned.title}: {warned.text}")
        if self._wandb is not None:
            wandb = self._wandb
            self._tell(lambda: wandb.warned(step, warned))

    def finish(self, drafter: Path, best_step: int, best_tau: float) -> None:
        """The run is complete; `drafter` is the folder of its best drafter, measured at that step."""
        if self._wandb is not None and self.config.tracking.upload_drafter:
            wandb = self._wandb
            self._tell(lambda: wandb.finished(drafter, best_step, best_tau))

    def close(self) -> None:
        """No more is coming, from any process."""
        self._tell(self.accelerator.end_training)

    def _start(self) -> None:
        section, settings = self.config.tracking, to_plain(self.config)
        if section.tracker == "wandb":
            options = {"wandb": _wandb_options(self.config, settings)}
            self.accelerator.init_trackers(section.project, init_kwargs=options)
            if self.accelerator.trackers:
                self._wandb = WandbRun(self.accelerator.get_tracker("wandb", unwrap=True))
                self._known = self._wandb.last_step(Path(self.config.output))
                self._catch_up(self._wandb)
        elif section.tracker == "tensorboard":
            flat = {k: v if isinstance(v, int | float | str | bool) else str(v) for k, v in settings.items()}
            self.accelerator.init_trackers(section.project, config=flat)

    def _catch_up(self, wandb: WandbRun) -> None:
        """Tells W&B what the files have and it has not."""
        reports = {line.pop("step"): line for line in _lines(self.acceptance)}
        traces: dict[int, dict[int, list[Any]]] = {}  # by step and prompt
        for trace in _lines(self.traces):
            traces.setdefault(trace.pop("step"), {}).setdefault(trace.pop("prompt"), []).append(trace)
        for line in _lines(self.metrics):
            step = line.pop("step")
            if step > self._known:
                self.accelerator.log(
                    {name: math.nan if value is None else value for name, value in line.items()}, step=step
                )
                if "acceptance/tau" in line:
                    wandb.evaluated(step, Evaluation(line, reports[step], traces.get(step, {})))

    def _tell(self, tell: Callable[[], object]) -> None:
        try:
            tell()
        except Exception as error:  # whatever a tracker's code meets, a full disk or a dead service, training goes on
            _given_up(self.config.tracking.tracker, error)
            self.accelerator.trackers.clear()
            self._wandb = None


def _wandb_options(config: RunConfig, settings: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `wandb.init`. The id lies in the run folder: after a kill it is the same W&B run."""
    folder = Path(config.output)
    identifier = folder / "wandb-id"
    if not identifier.exists():
        identifier.write_text(uuid.uuid4().hex[:8])
    section = config.tracking
    options = {
        "name": section.name or folder.resolve().name,
        "group": section.group,
        "tags": list(section.tags),
        "dir": str(folder),
        "config": settings,
        "id": identifier.read_text(),
        "resume": "allow",
    }
    mode = os.environ.get("WANDB_MODE")
    return {**options, "mode": mode} if mode else options


def _lines(file: Path) -> list[dict[str, Any]]:
    """The lines of a file, up to one that a kill cut off."""
    found = []
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            values = json.loads(line)
        except ValueError:
            break
        if not isinstance(values, dict) or "step" not in values:
            break
        found.append(values)
    return found


def _drop_beyond(file: Path, step: int) -> None:
    if file.exists():
        kept = [line for line in _lines(file) if line["step"] <= step]
        temporary = file.with_suffix(".writing")
        temporary.write_text("".join(json.dumps(line) + "\n" for line in kept))
        temporary.replace(file)


def _append(file: Path, *lines: Mapping[str, Any]) -> None:
    with file.open("a") as out:
        out.write("".join(json.dumps(line) + "\n" for line in lines))


def _given_up(name: str, error: BaseException) -> None:
    if os.environ.get("RANK", "0") != "0":  # of a launcher; it may be too early for an accelerator
        return
    reason = " ".join(str(error).split()) or type(error).__name__
    _say(f"warning: {name} failed ({reason}); training goes on without it, the files in the run folder have everything")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
