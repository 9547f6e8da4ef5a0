"""Which of several processes this one is; `accelerate launch` starts them, and without it there is one."""

import dataclasses
import datetime
import os
from collections.abc import Callable

import torch


def _nobody() -> None:
    """There is nobody to wait for."""


@dataclasses.dataclass(frozen=True, slots=True)
class Processes:
    """This process among all.

    Attributes:
        index: its number.
        count: of processes.
        wait: returns when all processes have called it.
        device: of this process; None leaves the choice to the caller.
    """

    index: int = 0
    count: int = 1
    wait: Callable[[], None] = _nobody
    device: torch.device | None = None

    @property
    def main(self) -> bool:
        return self.index == 0


def launched(cpu: bool) -> Processes:
    """The processes of this launch; joins their group if there are several. `cpu`: on the CPU even where there is a GPU."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Processes()
    from accelerate import PartialState

    # The first to finish waits for the last, however long that takes.
    state = PartialState(cpu=cpu, timeout=datetime.timedelta(days=30))
    return Processes(state.process_index, state.num_processes, state.wait_for_everyone, state.device)
