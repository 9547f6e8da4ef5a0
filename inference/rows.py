"""A text with places where a token has to end, and its token ids.

One tokenizer call on a whole conversation may merge the end of a prompt with the start of its answer, which the target never
sees: it reads the prompt, then writes. So a token ends at every cut, and what stands before a cut does not depend on what comes
behind it. Without such a merge the ids are those of one call. No special token is added: a BOS is there if the text has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from draftsmith.inference.answers import Answer
from draftsmith.inference.templates import Specials

IdsAndMask = tuple[list[int], list[bool]]


class Cut(NamedTuple):
    """A place in the text where a token has to end."""

    stop: int
    generated: bool  # the target wrote the text between the cut before and this one


@dataclass(slots=True)
class Row:
    """A text and its cuts."""

    text: str
    cuts: list[Cut] = field(default_factory=list)

    @property
    def parts(self) -> list[Cut]:
        """The cuts, and the end of the text."""
        rest = self.cuts[-1].stop < len(self.text) if self.cuts else True
        return [*self.cuts, Cut(len(self.text), False)] if rest else self.cuts

    def add(self, answer: Answer, *, supervised: bool) -> bool:
        """Cuts at both ends of an answer if the text shows it as it was given, and after the same text; the last one first."""
        if not self.text.startswith(answer.text[: answer.stop]):
            return False
        scaffold = [Cut(answer.start, False)] if answer.start > answer.prompt_stop else []
        self.cuts[:0] = [Cut(answer.prompt_stop, False), *scaffold, Cut(answer.stop, supervised)]
        return True


def encode_rows(tokenizer: PreTrainedTokenizerBase, specials: Specials, rows: Sequence[Row]) -> Iterator[IdsAndMask]:
    """Ids and mask of each row, in one tokenizer call for all but the merges over a cut."""
    windows = [_windows(specials, row) for row in rows]
    encoded = iter(_encode(tokenizer, [window.text for group in windows for window in group]))
    for row, group in zip(rows, windows, strict=True):
        yield _join(tokenizer, specials, row, group, [next(encoded) for _ in group])


class _Window(NamedTuple):
    """What is tokenised up to a cut; it begins with the special token `anchor`, or at the beginning of the text if that is ""."""

    text: str
    anchor: str


def _windows(specials: Specials, row: Row) -> list[_Window]:
    """One for each part of the row.

    A special token splits the text before anything can merge, so a window begins at the last one in front of the cut before, not at
    the beginning of the text: the work grows with the number of turns, not with its square.
    """
    windows: list[_Window] = []
    begin, anchor, before = 0, "", 0
    for part in row.parts:
        windows.append(_Window(row.text[begin : part.stop], anchor))
        for match in specials.splitting.finditer(row.text, before, part.stop) if specials.splitting else ():
            begin, anchor = match.start(), match[0]
        before = part.stop
    return windows


def _join(
    tokenizer: PreTrainedTokenizerBase,
    specials: Specials,
    row: Row,
    windows: Sequence[_Window],
    encoded: Sequence[list[int]],
) -> IdsAndMask:
    """From the ids of the windows, which overlap, to those of the row."""
    ids: list[int] = []
    mask: list[bool] = []
    before = 0
    for part, window, whole in zip(row.parts, windows, encoded, strict=True):
        begin = _last(ids, specials.ids[window.anchor]) if window.anchor else 0
        if begin is not None and whole[: len(ids) - begin] == ids[begin:]:
            piece = whole[len(ids) - begin :]
        else:  # Merged over the cut. SentencePiece adds a space in front of a text, but not behind a control character.
            control, controlled = _encode(tokenizer, ["\x01", "\x01" + row.text[before : part.stop]])
            piece = controlled[len(control) :]
        ids += piece
        mask += [part.generated] * len(piece)
        before = part.stop
    return ids, mask


def _last(ids: Sequence[int], token: int) -> int | None:
    return next((i for i in range(len(ids) - 1, -1, -1) if ids[i] == token), None)


def _encode(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    if not texts:
        return []
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        slow: list[list[int]] = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return slow
    backend = (
        tokenizer.backend_tokenizer
    )  # a call of the tokenizer itself also makes masks and offsets, for half as much time again
    backend.no_truncation()
    backend.no_padding()
    return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]
