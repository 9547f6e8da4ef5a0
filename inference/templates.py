"""Turns as the text that a target reads: its chat template, or a plain format where it has none.

The template is the target's own and runs in transformers' sandbox. This module does not know where answers begin and end
(`answers`) and makes no token ids (`rendering`).
"""

from __future__ import annotations

import datetime
import functools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from draftsmith.inference.turns import BadRecord, Message, shown

GENERATION_TAG = re.compile(r"{%[-+]?\s*generation\s*[-+]?%}")

DATE = datetime.datetime(2026, 1, 1)
"""What a template that shows the day (gpt-oss, SmolLM3) is told: with the real one, the same data would be other ids tomorrow."""
NOW = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")

Span = tuple[int, int]
"""Characters [begin, end) of a text."""


@dataclass(frozen=True, slots=True)
class Chat:
    """What is the same for all turns of a conversation.

    Attributes:
        tokenizer: the target's.
        specials: of this tokenizer.
        tools: which the template shows.
        where: how errors call the conversation.
    """

    tokenizer: PreTrainedTokenizerBase
    specials: Specials
    tools: Sequence[dict[str, Any]]
    where: str

    @property
    def template(self) -> str | None:
        """The Jinja source, None for the plain format."""
        if not self.tokenizer.chat_template:
            return None
        return dated(self.tokenizer.get_chat_template(tools=self._tools))

    def text(self, messages: Sequence[Message], *, generation_prompt: bool) -> str:
        """The turns as the target sees them; with `generation_prompt` it is its turn to write."""
        if not self.tokenizer.chat_template:
            return _plain(self.tokenizer, messages, generation_prompt)
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages),
                tools=self._tools,
                chat_template=self.template,
                tokenize=False,
                add_generation_prompt=generation_prompt,
            )
        except (TemplateError, TypeError) as error:  # a TypeError: tool arguments as JSON text where an object is due
            raise self._refused(messages, error) from error
        return str(text)

    def tagged_text(self, messages: Sequence[Message]) -> tuple[str, list[Span]]:
        """`text` without a generation prompt, and what stands between the template's generation tags."""
        try:
            texts, spans = render_jinja_template(
                conversations=[list(messages)],
                tools=self._tools,
                chat_template=self.template,
                return_assistant_tokens_mask=True,
                add_generation_prompt=False,
                **self.tokenizer.special_tokens_map,
            )
        except (TemplateError, TypeError) as error:
            raise self._refused(messages, error) from error
        return texts[0], spans[0]

    @property
    def _tools(self) -> list[dict[str, Any]] | None:
        return list(self.tools) or None

    def _refused(self, messages: Sequence[Message], error: Exception) -> BadRecord:
        roles, reason = shown([message["role"] for message in messages]), " ".join(str(error).split())
        message = f"{self.where}: the chat template refuses the turns {roles}: {reason}; change them"
        return BadRecord(message, "refused by the chat template")


@functools.lru_cache
def dated(source: str) -> str:
    """The template with `DATE` for today."""
    return NOW.sub(lambda call: json.dumps(DATE.strftime(call[2])), source)


class Specials(NamedTuple):
    """A tokenizer's special tokens.

    Attributes:
        ids: by name.
        sizes: lengths of the names, longest first.
        splitting: finds a token behind which a text is tokenised the same, whatever stands before the token; None if there is none.
    """

    ids: dict[str, int]
    sizes: tuple[int, ...]
    splitting: re.Pattern[str] | None

    def trailing(self, text: str) -> list[str]:
        """Those that end `text`, whitespace between and after them aside."""
        found: list[str] = []
        rest = text.rstrip()
        while name := next((rest[-size:] for size in self.sizes if rest[-size:] in self.ids), ""):
            found.insert(0, name)
            rest = rest.removesuffix(name).rstrip()
        return found


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> Specials:
    added = {token.content: (i, token) for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    ids = {name: i for name, (i, _) in added.items()}
    splitting = [
        name
        for name, (_, token) in added.items()
        if not (token.lstrip or token.single_word or name == tokenizer.unk_token)
    ]
    pattern = re.compile("|".join(map(re.escape, sorted(splitting, key=len, reverse=True)))) if splitting else None
    return Specials(ids, tuple(sorted({len(name) for name in ids}, reverse=True)), pattern)


def _plain(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], generation_prompt: bool) -> str:
    """`User: ...\\n\\nAssistant: ...<eos>`, and a BOS if the tokenizer begins with one.
    The generation prompt is `Assistant:` with no space behind it: an answer's first token brings its own."""
    writes_bos = tokenizer.bos_token and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
    ends = {"assistant": tokenizer.eos_token or ""}
    turns = [f"{m['role'].capitalize()}: {m['content']}{ends.get(m['role'], '')}" for m in messages]
    return (tokenizer.bos_token if writes_bos else "") + "\n\n".join(turns + ["Assistant:"] * generation_prompt)
