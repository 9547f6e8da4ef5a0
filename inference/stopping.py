"""When a sequence ends: end-of-sequence tokens, stop strings, criteria of the user's own, the token budget.

Tokens are judged one by one in their order, whether a round brought one or many, so speculative decoding ends exactly where plain
decoding ends; what a round brought beyond that is dropped before anything is counted, streamed or returned.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

from transformers import PreTrainedTokenizerBase

Reason = Literal["eos", "stop string", "criterion", "budget", "time"]
Criterion = Callable[[Sequence[int], Sequence[int]], bool]
"""Called with the prompt and the new tokens so far after each of them; True ends the sequence there."""

SLACK_TOKENS = 8
"""A stop string is looked for in the newest tokens: as many as it has bytes, and these for characters cut at the front."""


@dataclasses.dataclass(frozen=True, slots=True)
class Stopping:
    """What ends a sequence besides end-of-sequence tokens and its budget.

    Attributes:
        strings: the text of the new tokens contains one of these. The token that completes it stays, `Output.text` ends before it.
        criteria: any of these returns True.
        max_seconds: wall time of the whole call, looked at once per round; no sequence loses a token that it has.
    """

    strings: tuple[str, ...] = ()
    criteria: tuple[Criterion, ...] = ()
    max_seconds: float | None = None

    def __post_init__(self) -> None:
        if any(not string for string in self.strings):
            raise ValueError("an empty stop string ends everything at once; leave it out")
        if self.max_seconds is not None and not self.max_seconds > 0:
            raise ValueError(f"max_seconds is {self.max_seconds}; give more than 0, or leave it out")


class Stopper:
    """Cuts what a round brought. It looks at the tokens of one sequence and keeps nothing between calls."""

    def __init__(self, stopping: Stopping, stop_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase | None) -> None:
        if stopping.strings and tokenizer is None:
            raise ValueError("stop strings need a tokenizer, and this target has none; stop at token ids instead")
        self._stopping, self._tokenizer = stopping, tokenizer
        self._stop_ids = set(stop_ids)
        self._window = SLACK_TOKENS + max((len(string.encode()) for string in stopping.strings), default=0)

    def cut(self, prompt: Sequence[int], ids: list[int], new: Sequence[int], max_new: int) -> tuple[int, Reason | None]:
        """How many of the new tokens stay behind `ids`, and why the sequence ends there, or None if it goes on."""
        if not self._stopping.strings and not self._stopping.criteria:  # nothing to look at but ids
            new = new[: max_new - len(ids)]
            for index, token in enumerate(new):
                if token in self._stop_ids:
                    return index + 1, "eos"
            return len(new), "budget" if len(ids) + len(new) >= max_new else None
        ids = list(ids)
        for index, token in enumerate(new):
            ids.append(token)
            if reason := self._ends(prompt, ids):
                return index + 1, reason
            if len(ids) >= max_new:
                return index + 1, "budget"
        return len(new), None

    def _ends(self, prompt: Sequence[int], ids: list[int]) -> Reason | None:
        if ids[-1] in self._stop_ids:
            return "eos"
        if self._stopping.strings:
            assert self._tokenizer is not None
            tail: str = self._tokenizer.decode(ids[-self._window :], skip_special_tokens=False)
            if any(string in tail for string in self._stopping.strings):
                return "stop string"
        if any(criterion(prompt, ids) for criterion in self._stopping.criteria):
            return "criterion"
        return None

    def text(self, ids: list[int]) -> str | None:
        """The text of a finished sequence up to the first stop string; None without a tokenizer."""
        if self._tokenizer is None:
            return None
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        places = [place for string in self._stopping.strings if (place := text.find(string)) >= 0]
        return text[: min(places)] if places else text
