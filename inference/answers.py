"""Where, in a rendered conversation, the target's own answers begin and end; in characters.

An answer begins where the template's generation prompt ends and stops with the end-of-turn token, so forced text (the assistant
header, a think scaffold) and text appended after the turn (a newline) are not part of it.

A template may show an answer otherwise later on than when it was given: reasoning is dropped, tools move to the newest user turn,
an end of turn changes its name. So every answer comes with the text that stood before the target when it gave it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from draftsmith.inference.templates import GENERATION_TAG, Chat, Span
from draftsmith.inference.turns import BadRecord, Message

EMPTY_THINK = re.compile(r"\s*<think>\s*</think>\s*")
FORCED_THINK = re.compile(r"<think>\s*\Z")


class Answer(NamedTuple):
    """An answer, in the conversation as the target saw it then.

    Attributes:
        text: the conversation up to this answer, shown as its last turn.
        prompt_stop: the target was given text[:prompt_stop].
        start: the target wrote text[start:stop]; what is between prompt and start is an empty `<think></think>` that the template
            shows by itself.
        stop: behind the end of turn.
        end_of_turn: the special token that ends it, "" if none.
        tagged: the template's generation tags say the same.
        learned: the record does not say that it is read only.
    """

    text: str
    prompt_stop: int
    start: int
    stop: int
    end_of_turn: str
    tagged: bool
    learned: bool


def find_answers(chat: Chat, messages: Sequence[Message], *, strict: bool) -> Iterator[Answer]:
    """Every answer, the last one first; `messages` need not end with it.

    An earlier answer that the template does not show behind its own generation prompt is left out.

    Args:
        chat: tokenizer, tools and name of the conversation.
        messages: the turns.
        strict: the answers are to be learned. In a prompt they are only read.

    Raises:
        BadRecord: tools or tool calls that the template hides; with `strict`, a last answer that would be left out, or reasoning of
            an answer to be learned that the template hides (of what is only read, the target never sees it).
    """
    template = chat.template
    has_tags = template is not None and GENERATION_TAG.search(template) is not None
    indices = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    for i in reversed(indices):
        answer = _answer(chat, messages[: i + 1], has_tags, strict, is_first=i == indices[0], is_last=i == indices[-1])
        if answer is not None:
            yield answer


def _answer(
    chat: Chat, messages: Sequence[Message], has_tags: bool, strict: bool, *, is_first: bool, is_last: bool
) -> Answer | None:
    message = messages[-1]
    text, spans = chat.tagged_text(messages) if has_tags else (chat.text(messages, generation_prompt=False), [])
    prompt = chat.text(messages[:-1], generation_prompt=True)
    if not text.startswith(prompt):
        written = _behind_turn(prompt, text, messages[-2]) or _with_reasoning(chat, prompt, text, message)
        if written is None and is_last and strict:
            same = len(os.path.commonprefix([prompt, text]))
            raise BadRecord(
                f"{chat.where}: the chat template asks for the answer with {prompt[same:][:60]!r} but shows the answer with "
                f"{text[same:][:60]!r} there; allowed: a template that shows an answer behind its generation prompt",
                "answer not shown behind its prompt",
            )
        if written is None:
            return None
        text, spans = written, []
    start = len(prompt)
    refuse_hidden(chat, message, text, start, reasoning=strict and message.get("supervised", True))
    stop, end_of_turn = _end(chat, text, start, message["content"])
    scaffold = EMPTY_THINK.match(text, start, stop)
    if scaffold and "<think>" not in message["content"]:
        start = scaffold.end()
    tagged = has_tags and _same_as_tagged(
        chat, messages, text, prompt, spans, (start, stop - len(end_of_turn)), is_first
    )
    return Answer(text, len(prompt), start, stop, end_of_turn, tagged, message.get("supervised", True))


def _end(chat: Chat, text: str, start: int, content: str) -> tuple[int, str]:
    """Where the target stopped in `text`, having begun at `start`, and the special token there."""
    shown = text[start:]
    specials = chat.specials.trailing(shown)
    if not specials:
        return start + len(shown.rstrip()), ""
    # Phi-3 shows "<|end|>\n<|endoftext|>": the first of them stops the target, unless it belongs to the content.
    in_content = len(chat.specials.trailing(content)) if len(specials) > 1 else 0
    end_of_turn = specials[min(in_content, len(specials) - 1)]
    return text.index(end_of_turn, start) + len(end_of_turn), end_of_turn  # inside the content it stops there too


def _behind_turn(prompt: str, text: str, asked: Message) -> str | None:
    """The answer moved behind its prompt; None if the template does not show it behind the same turn.

    Some templates change an earlier place as soon as there is an answer: Mistral shows the system turn with a last user turn only,
    gpt-oss drops the analysis before a tool call.
    """
    at = prompt.rfind(asked["content"]) if asked["content"].strip() else -1
    behind = text.rfind(prompt[at:]) if at >= 0 else -1
    return prompt + text[behind + len(prompt) - at :] if behind >= 0 else None


def _with_reasoning(chat: Chat, prompt: str, text: str, message: Message) -> str | None:
    """The answer put behind its prompt, if it holds reasoning that the template drops at once (DeepSeek-R1); else None."""
    content, reasoning = message["content"], message.get("reasoning_content")
    if reasoning:
        content = f"<think>\n{reasoning.strip()}\n</think>\n\n{content}"
    if "</think>" not in content or message.get("tool_calls"):
        return None
    if FORCED_THINK.search(prompt):
        content = re.sub(r"\A\s*<think>\n?", "", content)
    return prompt + content + "".join(chat.specials.trailing(text)[-1:])


def refuse_hidden(chat: Chat, message: Message, text: str, start: int, *, reasoning: bool) -> None:
    """Raises BadRecord for tools that are not in `text`, or tool calls (with `reasoning`, that too) not behind `start`."""
    names = [tool.get("function", tool).get("name", "") for tool in chat.tools]
    calls = [call.get("function", call).get("name", "") for call in message.get("tool_calls") or ()]
    thought = (message.get("reasoning_content") or "").strip() if reasoning else ""
    for what, parts, shown in (
        ("tools", names, text),
        ("tool_calls", calls, text[start:]),
        ("reasoning_content", [thought], text[start:]),
    ):
        if any(part not in shown for part in parts):
            raise BadRecord(
                f"{chat.where}: the chat template does not show the {what} of the conversation, so with this target they would be "
                "lost; allowed: a target whose template shows them, or a record without them",
                f"{what} that the template does not show",
            )


def _same_as_tagged(
    chat: Chat,
    messages: Sequence[Message],
    text: str,
    prompt: str,
    spans: Sequence[Span],
    written: Span,
    is_first: bool,
) -> bool:
    """Whether the tags mark what was written and nothing but forced text in front of it; whitespace does not count.

    Tags that reach back into the turn before, or that stand in the turns before the first answer, mark more than answers.
    """
    unmarked, place = "", written[0]
    for begin, end in spans:
        unmarked += text[place : max(place, min(begin, written[1]))]
        place = max(place, end)
    unmarked += text[place : max(place, written[1])]
    if unmarked.strip():
        return False
    if all(begin >= len(prompt) or (end <= len(prompt) and not is_first) for begin, end in spans):
        return True
    turns = chat.text(messages[:-1], generation_prompt=False)
    forced = len(os.path.commonprefix([turns, prompt]))  # where the generation prompt begins
    return all(begin >= forced or (end <= forced and not is_first) for begin, end in spans)
