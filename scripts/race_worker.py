"""A contestant of the race (`race_speculators`): trains some steps when it is told to, and says what they took.

It reads one JSON object per line from standard input and answers each with one, so that of two contestants only one ever computes.
Both contestants use this file, so it imports nothing of either.
"""

import abc
import json
import os
import sys
import time
from typing import Any

from draftsmith.scripts.resident import Memory


class Contestant(abc.ABC):
    """One drafter in training."""

    @abc.abstractmethod
    def batch(self, pack: list[int], all_supervised: bool) -> Any:
        """The training batch of these conversations; with `all_supervised` every token counts, whoever wrote it."""

    @abc.abstractmethod
    def step(self, batch: Any, number: int) -> dict[str, float]:
        """One optimizer step, the whole of it, and what it says of itself: names to numbers."""

    @abc.abstractmethod
    def save(self, folder: str) -> None:
        """Writes a drafter folder."""


def serve(contestant: Contestant, memory: Memory) -> None:
    """Does what comes in, until there is nothing more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not end up among the answers
    for line in sys.stdin:
        order = json.loads(line)
        if "save" in order:
            contestant.save(order["save"])
            answer: dict[str, Any] = {}
        else:
            answer = _train(contestant, memory, order)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _train(contestant: Contestant, memory: Memory, order: dict[str, Any]) -> dict[str, Any]:
    """Some steps. Their batches are made before the clock starts: reading features is not what is compared."""
    batches = [contestant.batch(pack, order["all_supervised"]) for pack in order["packs"]]
    rest = memory.rest()
    said = []
    start = time.perf_counter()
    for number, batch in enumerate(batches, order["first"]):
        said.append(contestant.step(batch, number))
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "rest": rest, "peak": memory.peak(), "said": said}
