"""How metrics are summed between two lines, and where the lines go: always to `metrics.jsonl` in the run folder, and to a tracker
through accelerate if the config names one."""

import json
import math
import netrc
import os
import urllib.parse
import uuid
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from draftsmith.drafters.losses import summarise
from draftsmith.train.clock import Clock
from draftsmith.train.config import RunConfig, TrackingConfig


def prepare(tracking: TrackingConfig) -> str | None:
    """accelerate's name of the tracker, None for none; ValueError if its package is missing.

    W&B without a key records offline: a run must not stop to ask for one.
    """
    if tracking.tracker == "none":
        return None
    try:
        if tracking.tracker == "wandb":
            if not os.environ.get("WANDB_MODE") and not has_wandb_key():
                os.environ["WANDB_MODE"] = "offline"  # before the import, which reads it
            import wandb  # noqa: F401
        else:
            import tensorboard  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"tracking.tracker is {tracking.tracker!r}, which is not installed; "
            f"pip install 'draftsmith[{tracking.tracker}]' or set tracking.tracker=none"
        ) from error
    return tracking.tracker


def has_wandb_key() -> bool:
    """Whether W&B would find a key: in the environment or in the netrc file that `wandb login` writes."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urllib.parse.urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    try:
        return host is not None and netrc.netrc().authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def start(accelerator: Accelerator, config: RunConfig, settings: dict[str, Any]) -> None:
    """Opens the tracker, with the resolved config as the run's config."""
    if config.tracking.tracker == "none":
        return
    folder = Path(config.output)
    flat = {
        name: value if isinstance(value, int | float | str | bool) else str(value) for name, value in settings.items()
    }
    options = {"wandb": {"name": folder.name, "dir": str(folder), "config": settings, "resume": "allow"}}
    if os.environ.get("WANDB_MODE"):
        options["wandb"]["mode"] = os.environ["WANDB_MODE"]
    if config.tracking.tracker == "wandb":
        identifier = folder / "wandb-id"
        if not identifier.exists():
            identifier.write_text(uuid.uuid4().hex[:8])
        options["wandb"]["id"] = identifier.read_text()  # the same W&B run after a kill
    accelerator.init_trackers(
        config.tracking.project, config=flat if config.tracking.tracker == "tensorboard" else None, init_kwargs=options
    )


class Metrics:
    """Appends to metrics.jsonl and to the tracker; on resume, lines beyond the checkpoint are dropped first."""

    def __init__(self, accelerator: Accelerator, file: Path, resumed_step: int) -> None:
        self.accelerator, self.file = accelerator, file
        if not accelerator.is_main_process or not file.exists():
            return
        kept = []
        for line in file.read_text().splitlines():
            try:
                if json.loads(line)["step"] <= resumed_step:
                    kept.append(line)
            except (ValueError, KeyError):  # the last line, cut off by a kill
                break
        temporary = file.with_suffix(".writing")
        temporary.write_text("".join(line + "\n" for line in kept))
        temporary.replace(file)

    def log(self, step: int, values: dict[str, float]) -> None:
        if self.accelerator.is_main_process:
            clean = {name: value if math.isfinite(value) else None for name, value in values.items()}
            with self.file.open("a") as file:
                file.write(json.dumps({"step": step, **clean}) + "\n")
        self.accelerator.log(values, step=step)


class Window:
    """Metrics summed since the last line, and the time of training they took."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.sums: dict[str, Tensor] = {}
        self.tokens = 0.0
        self.start = clock.training_seconds

    def add(self, metrics: dict[str, Tensor]) -> None:
        for name, value in metrics.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value.clone()

    def close(self, accelerator: Accelerator) -> dict[str, float]:
        sums = {name: accelerator.reduce(value, "sum") for name, value in self.sums.items()}
        tokens = float(accelerator.reduce(torch.tensor(self.tokens, device=accelerator.device), "sum"))
        elapsed = self.clock.training_seconds - self.start
        values = summarise(sums) | {"tokens_per_second": tokens / elapsed}
        values["loss"] = float((sums["loss"] / sums["supervised"].clamp_min(1)).mean())
        self.__init__(self.clock)  # type: ignore[misc]
        return values
