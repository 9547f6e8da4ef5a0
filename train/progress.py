"""A line on stderr now and then: how far a long work is, how fast, how much longer."""

import sys
import time


class Progress:
    """Counts rows and tokens of one stage of the work."""

    def __init__(self, what: str, total: int, done: int, seconds: float = 0.0) -> None:
        """`done` rows are there from an earlier run; at most one line in so many seconds, the last row's always."""
        self._what, self._total, self._done, self._seconds = what, total, done, seconds
        self._fresh = self._tokens = 0
        self._start = self._said = time.perf_counter()
        if done:
            print(f"{what}: {done} of {total} are there from an earlier run", file=sys.stderr)

    def add(self, rows: int, tokens: int) -> None:
        self._done, self._fresh, self._tokens = self._done + rows, self._fresh + rows, self._tokens + tokens
        now = time.perf_counter()
        if now - self._said < self._seconds and self._done < self._total:
            return
        self._said, elapsed = now, now - self._start
        left = (self._total - self._done) * elapsed / self._fresh
        print(
            f"{self._what}: {self._done} of {self._total}, {self._tokens:,} tokens, {self._tokens / elapsed:.0f} tokens/s, "
            f"{left / 60:.1f} min left",
            file=sys.stderr,
        )
