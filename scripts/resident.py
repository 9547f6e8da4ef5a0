"""What a process occupies, by the kernel's account (Linux): for comparing what training takes on a CPU."""

import ctypes
import gc
import re
from pathlib import Path

import torch


class Memory:
    """What the process occupies, in MiB, above what it did when this was made."""

    def __init__(self) -> None:
        # The libraries' own buffers and threads belong to neither contestant.
        with torch.autocast("cpu", torch.bfloat16):
            torch.nn.functional.linear(torch.ones(64, 64), torch.ones(64, 64))
        self.floor = 0.0
        self.floor = self.rest()

    def rest(self) -> float:
        """Now, after what was freed has gone back to the system; the peak begins anew here."""
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        return self._read("VmRSS")

    def peak(self) -> float:
        """The most since then."""
        return self._read("VmHWM")

    def _read(self, name: str) -> float:
        found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
        assert found is not None
        return int(found[1]) / 1024 - self.floor
