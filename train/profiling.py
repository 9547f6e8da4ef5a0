"""A window of training steps under PyTorch's profiler: a Chrome trace and a table of the operators that take longest."""

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

ROWS = 40
"""Of the table."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProfileConfig:
    start: int = 10
    """First step that is profiled; the first ones of a run are slower than the rest."""
    steps: int = 3
    """How many."""

    def __post_init__(self) -> None:
        for name in ("start", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give 1 or more")


class Profile:
    """The window; told of every step, it does nothing outside of it. Each process may have one, only one should.

    Args:
        config: which steps; None for none.
        folder: where profile/trace.json (chrome://tracing, ui.perfetto.dev) and profile/operators.txt go.
        device: that training runs on.
    """

    def __init__(self, config: ProfileConfig | None, folder: Path, device: torch.device) -> None:
        self.config, self.folder, self.device = config, folder / "profile", device
        self._running: profile | None = None

    def before(self, step: int) -> None:
        """Step 1, 2, … begins."""
        if self.config is not None and step == self.config.start:
            activities = [ProfilerActivity.CPU]
            if self.device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            self._running = profile(activities=activities)
            self._running.start()

    def after(self, step: int, last: bool) -> None:
        """It is done, or the run is."""
        if self._running is None or self.config is None:
            return
        if last or step == self.config.start + self.config.steps - 1:
            self._write(self._running, step)
            self._running = None

    def _write(self, running: profile, step: int) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        running.stop()
        self.folder.mkdir(parents=True, exist_ok=True)
        running.export_chrome_trace(str(self.folder / "trace.json"))
        averages: Any = running.key_averages()
        on = "cuda" if self.device.type == "cuda" else "cpu"
        table = averages.table(sort_by=f"self_{on}_time_total", row_limit=ROWS, max_name_column_width=60)
        assert self.config is not None
        (self.folder / "operators.txt").write_text(f"steps {self.config.start} to {step}\n{table}\n")
