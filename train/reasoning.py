"""What the target wrote, taken apart into reasoning and answer, by the tags of its own chat template.

Three ways of marking reasoning are known; a template that mentions none of them has no reasoning, and its target's text stays
whole. Tool calls stay in the text as the target wrote them. This module renders nothing.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

HARMONY = (
    r"(?:<\|channel\|>analysis<\|message\|>(?P<reasoning>.*?)<\|end\|><\|start\|>assistant)?"
    r"<\|channel\|>final<\|message\|>(?P<answer>.*)"
)
FORMATS = {  # the opening tag -> the whole; the prompt may have written the opening tag
    "<think>": re.compile(r"\s*(?:<think>)?(?P<reasoning>.*?)</think>(?P<answer>.*)", re.DOTALL),
    "[THINK]": re.compile(r"\s*(?:\[THINK\])?(?P<reasoning>.*?)\[/THINK\](?P<answer>.*)", re.DOTALL),
    "<|channel|>": re.compile(HARMONY, re.DOTALL),
}


class Spoken(NamedTuple):
    """One answer taken apart.

    Attributes:
        answer: the text after the reasoning; empty if the reasoning never ended.
        reasoning: its text without tags and the line breaks around it; None if there is none.
        ended: whether the reasoning ended (True without one).
    """

    answer: str
    reasoning: str | None = None
    ended: bool = True


def spoken(tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], ids: Sequence[int]) -> Spoken:
    """The text of new tokens behind a prompt, an end-of-turn token excluded."""
    template = str(tokenizer.chat_template or "")
    tag = next((tag for tag in FORMATS if tag in template), None)
    plain = str(tokenizer.decode(ids, skip_special_tokens=True))
    if tag is None:
        return Spoken(plain)
    text = str(tokenizer.decode(ids, skip_special_tokens=False))  # some tokenizers call their tags special
    opened = str(tokenizer.decode(prompt[-8:], skip_special_tokens=False)).rstrip().endswith(tag)
    found = split(text, tag, opened)
    special = "|".join(re.escape(token) for token in tokenizer.all_special_tokens)
    if found.reasoning is None and found.ended and found.answer == text:
        return Spoken(plain)
    clean = [None if part is None else re.sub(special, "", part) if special else part for part in found[:2]]
    return Spoken(clean[0] or "", clean[1], found.ended)


def split(text: str, tag: str = "<think>", opened: bool = False) -> Spoken:
    """Takes a text apart; `opened`: the prompt has written the opening tag already."""
    if match := FORMATS[tag].fullmatch(text):
        reasoning = (match["reasoning"] or "").strip("\n")
        return Spoken(match["answer"].lstrip("\n"), reasoning or None)
    if opened or text.lstrip().startswith(tag):
        return Spoken("", text, ended=False)
    return Spoken(text)
