"""One record of a chat file: what shapes it may have, and the conversation that it becomes.

chat                    `messages`; turns of `role` and `content`
ShareGPT                `conversations` or `conversation`; turns of `from` and `value` (each list may hold both)
Alpaca                  `instruction`, and where there are any `input`, `output`, `history` (pairs of question and answer)
prompt and completion   `prompt`, and where there is one `completion`, `response` or `chosen`; text or lists of turns
raw text                `text`: no turns and no template, supervised as a whole
tokenised               `input_ids` with `loss_mask` (0 and 1) or `labels` (-100 where nothing is learned, else the id at the same
                        place, not shifted); where there is one `attention_mask`, whose zeros are padding

The first four may have `tools` (or `functions`) and `system` (or `system_prompt`); all may have `id`, `category` and `truncated`.
A record without an answer is a prompt. Further keys are notes and left alone, except for those that would change what the
target sees. This module does not open files (`conversations`) and knows no chat template (`rendering`).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from draftsmith.inference.tokenised import given_ids
from draftsmith.inference.turns import LOST, BadRecord, Message, filled, message_of, refuse_lost, shown, tools_of, whole

SHAPES = (
    'allowed: {"messages": [{"role": ..., "content": ...}, ...]}, ShareGPT "conversations", Alpaca "instruction", '
    '"prompt" and "completion", "text", or "input_ids" and "loss_mask"'
)
TURNS = ("messages", "conversations", "conversation")
SHAPE_KEYS = (*TURNS, "instruction", "prompt", "text", "input_ids")
ANSWERS = ("completion", "output", "response", "chosen")
TOOLS = ("tools", "functions")
SYSTEM = ("system", "system_prompt")
LOST_IN_A_RECORD = (*LOST, "tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True, slots=True)
class Conversation:
    """One record: turns in the order of the file, or else raw text, or else token ids.

    Attributes:
        id: the record's own, or the default that its reader gives.
        messages: its turns; empty if `given` or `text` is there.
        category: what acceptance is reported by.
        truncated: the last answer was cut by a token budget: the target did not end it.
        tools: descriptions of the functions that the target may call, as chat templates take them.
        given: token ids and loss mask of a record that came tokenised, of the same length; it is not rendered.
        text: raw text without turns; no template is applied and every token of it is supervised.
    """

    id: str
    messages: tuple[Message, ...]
    category: str = "all"
    truncated: bool = False
    tools: tuple[dict[str, Any], ...] = ()
    given: tuple[tuple[int, ...], tuple[bool, ...]] | None = None
    text: str | None = None


def parse(record: Any, at: str, *, default_id: str) -> Conversation:
    """The conversation of a record of any shape. Raises BadRecord, `at` (FILE:LINE) first."""
    shape = _shape(record, at)
    refuse_lost(record, LOST_IN_A_RECORD, at)
    own_id, category = record.get("id"), record.get("category")
    truncated = record.get("truncated", False)
    if not isinstance(truncated, bool):
        raise BadRecord(f"{at}: truncated is {shown(truncated)}; allowed: true or false", "malformed record")
    if not isinstance(own_id, str | int | None):
        raise BadRecord(f"{at}: 'id' is {shown(own_id)}; allowed: a string or a whole number", "malformed record")
    if not isinstance(category, str | None):
        raise BadRecord(f"{at}: 'category' is {shown(category)}; allowed: a string", "malformed record")
    name = default_id if own_id is None else whole(str(own_id), at)
    category = "all" if category is None else whole(category, at)
    if shape in ("text", "input_ids"):
        refuse_lost(record, (*TOOLS, *SYSTEM, *ANSWERS), at)
        given = given_ids(record, at) if shape == "input_ids" else None
        return Conversation(
            name, (), category, truncated, given=given, text=_text(record, at) if given is None else None
        )
    messages = tuple(message_of(turn, f"{at}: turn {n}") for n, turn in enumerate(_turns(record, shape, at), start=1))
    check_order(messages, at)
    if shape in TURNS and messages[-1]["role"] != "assistant":
        refuse_lost(record, ANSWERS, at)
    tools = _one_of(record, TOOLS, at)
    return Conversation(name, messages, category, truncated, tools_of(tools, at) if tools is not None else ())


def decode(line: bytes, at: str) -> Any:
    """The JSON value of a line. Raises BadRecord."""
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        bad = f"byte {line[error.start]:#04x} in column {error.start + 1}"
        raise BadRecord(f"{at}: not UTF-8 ({bad}); save the file as UTF-8", "not UTF-8") from error
    except (ValueError, RecursionError) as error:  # not JSON, a number of 5,000 digits, brackets 10,000 deep
        detail = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise BadRecord(f"{at}: broken JSON ({detail}); {SHAPES}", "broken JSON") from error


def to_record(conversation: Conversation) -> dict[str, Any]:
    """The record that `parse` makes the same conversation of."""
    record: dict[str, Any] = {"id": conversation.id, "category": conversation.category}
    if conversation.tools:
        record["tools"] = list(conversation.tools)
    if conversation.given is not None:
        record |= {
            "input_ids": [*conversation.given[0]],
            "loss_mask": [int(learned) for learned in conversation.given[1]],
        }
    elif conversation.text is not None:
        record["text"] = conversation.text
    else:
        record["messages"] = list(conversation.messages)
    return {**record, "truncated": True} if conversation.truncated else record


def prompt_messages(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The turns without a final assistant turn. Raises ValueError unless these end with a user or tool turn."""
    prompt = tuple(messages[:-1] if messages and messages[-1]["role"] == "assistant" else messages)
    if not prompt or prompt[-1]["role"] not in ("user", "tool"):
        roles = shown([message["role"] for message in messages])
        raise BadRecord(
            f"nothing to answer in the turns {roles}; allowed: a user or tool turn at the end", "nothing to answer"
        )
    return prompt


def check_order(messages: Sequence[Message], at: str) -> None:
    answerable = False
    for number, message in enumerate(messages, start=1):
        if message["role"] == "assistant" and not answerable:
            message_text = (
                f"{at}: turn {number}, an assistant turn, answers nothing; allowed: after a user or tool turn"
            )
            raise BadRecord(message_text, "answer to nothing")
        answerable = message["role"] in ("user", "tool") or (message["role"] == "system" and answerable)


def _shape(record: Any, at: str) -> str:
    """The one key of `SHAPE_KEYS` that is there. Notes: a `text` beside an `instruction` (Alpaca: the same once
    more), and a `prompt` that only repeats the first user turn (UltraChat)."""
    keys = [key for key in SHAPE_KEYS if record.get(key) is not None] if isinstance(record, dict) else []
    if len(keys) == 2 and keys[0] in TURNS and keys[1] == "prompt" and _repeats(record[keys[0]], record["prompt"]):
        keys.pop()
    if keys == ["instruction", "text"]:
        keys.pop()
    if not keys:
        raise BadRecord(f"{at}: no turns in {shown(record)}; {SHAPES}", "no known shape")
    if len(keys) > 1:
        raise BadRecord(f"{at}: two shapes, {' and '.join(keys)}, in {shown(record)}; {SHAPES}", "two shapes")
    return keys[0]


def _repeats(turns: Any, prompt: Any) -> bool:
    turns = [turn for turn in turns if isinstance(turn, dict)] if isinstance(turns, list) else []
    users = [
        turn.get("content", turn.get("value"))
        for turn in turns
        if turn.get("role", turn.get("from")) in ("user", "human")
    ]
    return users[:1] == [prompt]


def _turns(record: dict[str, Any], shape: str, at: str) -> list[Any]:
    """The turns, not yet in one spelling, those that the record holds outside its list too."""
    if shape in TURNS:
        turns = record[shape]
        if not isinstance(turns, list) or not turns:
            message = f"{at}: {shape!r} is {shown(turns)}; allowed: a list of at least one turn"
            raise BadRecord(message, "malformed turns")
    else:
        turns = _answered(record, shape, at)
    system = _one_of(record, SYSTEM, at)
    if system is None:
        return turns
    if any(
        isinstance(turn, dict) and turn.get("role", turn.get("from")) in ("system", "developer") for turn in turns[:1]
    ):
        raise BadRecord(
            f"{at}: a system turn, and a system prompt beside it; allowed: one of them", "two system prompts"
        )
    return [{"role": "system", "content": system}, *turns]


def _answered(record: dict[str, Any], shape: str, at: str) -> list[Any]:
    """The turns of a prompt or instruction, and of its answer where there is one."""
    prompt, answer, more = record[shape], _one_of(record, ANSWERS, at, empty=True), record.get("input")
    if filled(more):
        if shape == "prompt" or not isinstance(prompt, str) or not isinstance(more, str):
            message = f"{at}: 'input' is {shown(more)}; allowed: text, beside an instruction that is text"
            raise BadRecord(message, "malformed record")
        prompt = f"{prompt}\n\n{more}"
    turns = prompt if isinstance(prompt, list) and shape == "prompt" else [{"role": "user", "content": prompt}]
    if filled(record.get("history")):
        turns = [*_history(record["history"], at), *turns]
    if not isinstance(answer, list):
        return turns if answer is None else [*turns, {"role": "assistant", "content": answer}]
    if answer[: len(turns)] == turns:  # the whole conversation, the prompt included
        return answer
    if any(isinstance(turn, dict) and turn.get("role") not in ("assistant", "tool") for turn in answer):
        message = f"{at}: the answer's turns neither begin with the prompt's nor are all the assistant's and its tools'"
        raise BadRecord(f"{message}; allowed: one of the two", "answer that does not follow its prompt")
    return [*turns, *answer]


def _history(pairs: Any, at: str) -> list[Message]:
    if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        message = f"{at}: 'history' is {shown(pairs)}; allowed: a list of pairs of question and answer"
        raise BadRecord(message, "malformed record")
    return [
        {"role": role, "content": text}
        for pair in pairs
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]


def _one_of(record: dict[str, Any], keys: tuple[str, ...], at: str, *, empty: bool = False) -> Any:
    """The value of the one key that is filled, or (`empty`) not null; None if there is no such key."""
    there = [key for key in keys if (record.get(key) is not None if empty else filled(record.get(key)))]
    if len(there) > 1:
        raise BadRecord(f"{at}: both {there[0]!r} and {there[1]!r}; allowed: one of them", "malformed record")
    return record[there[0]] if there else None


def _text(record: dict[str, Any], at: str) -> str:
    if not isinstance(record["text"], str) or not record["text"]:
        raise BadRecord(
            f"{at}: 'text' is {shown(record['text'])}; allowed: a string that is not empty", "malformed record"
        )
    return whole(record["text"], at)
