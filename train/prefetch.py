"""The next batches are made in a background thread while the model trains on this one; their order is that of the plan."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

import torch

Key = TypeVar("Key")
Made = TypeVar("Made")


class Prefetch(Generic[Key, Made]):
    """Makes what was announced, a few ahead.

    Args:
        make: runs in the thread; what it raises, `take` raises.
        ahead: so many are made or in the making at any time; 0 makes each when it is asked for.
    """

    def __init__(self, make: Callable[[Key], Made], ahead: int) -> None:
        self._make, self._ahead = make, ahead
        self._coming: Iterator[Key] = iter(())
        self._running: deque[tuple[Key, Future[Made]]] = deque()
        # One thread, so that they come in order; its copies must not take the cores from the training (thread-local setting).
        self._thread = ThreadPoolExecutor(1, "prefetch", torch.set_num_threads, (1,)) if ahead else None

    def announce(self, keys: Iterable[Key]) -> None:
        """What will be asked for from now on, in this order; anything announced before is forgotten."""
        self._running.clear()
        self._coming = iter(keys)
        self._start()

    def take(self, key: Key) -> Made:
        """The next one; announced ones that are passed over are dropped."""
        while self._running:
            there, future = self._running.popleft()
            self._start()
            if there == key:
                return future.result()
        return self._make(key)

    def _start(self) -> None:
        while self._thread is not None and len(self._running) < self._ahead:
            for key in self._coming:
                self._running.append((key, self._thread.submit(self._make, key)))
                break
            else:
                return
