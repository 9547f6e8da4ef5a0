"""The wall time of a run over all its resumes, that of evaluation kept apart."""

import contextlib
from collections.abc import Iterator
from time import perf_counter


class Clock:
    """Runs from its creation on.

    Args:
        seconds: that the run had taken before.
        evaluation_seconds: part of it that went into evaluation.
    """

    def __init__(self, seconds: float, evaluation_seconds: float) -> None:
        self.start = perf_counter() - seconds
        self.evaluation_seconds = evaluation_seconds

    @property
    def seconds(self) -> float:
        return perf_counter() - self.start

    @property
    def training_seconds(self) -> float:
        """Without evaluation; not to be asked inside of one."""
        return self.seconds - self.evaluation_seconds

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        begin = perf_counter()
        yield
        self.evaluation_seconds += perf_counter() - begin
