"""Rendered conversations on a terminal: which tokens are supervised, in colour or in brackets."""

import os
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby

from transformers import PreTrainedTokenizerBase

from draftsmith.inference.evaluate import spread
from draftsmith.inference.records import Conversation
from draftsmith.inference.rendering import Rendered, render
from draftsmith.inference.turns import BadRecord
from draftsmith.scripts.tables import GREEN, RESET

DIM = "\033[2m"


def show_conversations(tokenizer: PreTrainedTokenizerBase, conversations: Sequence[Conversation], num: int) -> str:
    """So many conversations, evenly spread, each row under a line of its counts; one that cannot be rendered says why."""
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    blocks = []
    for index in spread(len(conversations), num):
        conversation = conversations[index]
        try:
            rows = render(tokenizer, conversation)
        except BadRecord as error:
            blocks.append(f"--- {error}")
            continue
        for number, row in enumerate(rows, start=1):
            total, supervised = len(row.ids), sum(row.loss_mask)
            blocks.append(
                f"--- conversation {conversation.id}, row {number} of {len(rows)}, mask by {row.method}: "
                f"{supervised:,} of {total:,} tokens supervised ({supervised / max(total, 1):.0%})\n"
                + show(tokenizer, row, colour).rstrip("\n")
            )
    return "\n\n".join(blocks)


def show(tokenizer: PreTrainedTokenizerBase, rendered: Rendered, colour: bool) -> str:
    """The text of a row with its special tokens; supervised stretches green and the rest dim, or without colour in `[[...]]`."""
    out = []
    for text, supervised in _stretches(tokenizer, rendered):
        if colour:
            out.append(f"{GREEN if supervised else DIM}{text}{RESET}")
        else:
            out.append(f"[[{text}]]" if supervised else text)
    return "".join(out)


def _stretches(tokenizer: PreTrainedTokenizerBase, rendered: Rendered) -> Iterator[tuple[str, bool]]:
    """Neighbouring tokens of the same mask, decoded behind what stands before them: SentencePiece drops a first space."""
    ids: list[int] = []
    shown = ""
    for supervised, group in groupby(zip(rendered.ids, rendered.loss_mask, strict=True), key=lambda pair: pair[1]):
        ids += [token for token, _ in group]
        text = str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
        yield text[len(shown) :], supervised
        shown = text
