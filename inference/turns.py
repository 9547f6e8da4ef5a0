"""One turn of a record: the spellings that chat files have for it become the one that chat templates take.

What a template or a loss would need and this form cannot carry (an image, a per-turn loss switch) is refused, never dropped in
silence. This module knows neither records (`records`) nor templates (`rendering`).
"""

import difflib
import json
import re
from typing import Any

Message = dict[str, Any]
"""A turn as chat templates take it: `role` (system, user, assistant or tool) and `content` (text); of an assistant turn, where
there are any, `reasoning_content` (text) and `tool_calls`, and `supervised` (False) if it is read but not learned; of a tool turn
`name` and `tool_call_id`."""

ROLES = {  # every spelling that is taken -> the chat template's role
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation"), "tool"),
    **dict.fromkeys(("system", "developer"), "system"),
    "function_call": "assistant",  # ShareGPT: the turn's text is the call, as JSON
}
REASONING = ("reasoning_content", "reasoning", "thinking")
CALLS = ("tool_calls", "function_call")
LOST = ("images", "image", "videos", "video", "audios", "audio", "documents", "chat_template_kwargs")
"""In a record or a turn these change what the target sees; nothing here can show them to it."""
LOST_IN_A_TURN = (*LOST, "tools", "functions", "function_calls", "refusal")
SWITCHES = ("supervised", "weight", "loss", "train")
"""Of a turn: whether it is learned. Answers are unless one of these says no; others never are."""


class BadRecord(ValueError):
    """A row that cannot be used. The message says where, what and what is allowed; `reason` is what such rows are counted by."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


def message_of(turn: Any, at: str) -> Message:
    """Raises BadRecord, `at` (FILE:LINE: turn N) first."""
    role_key, text_key = ("role", "content") if isinstance(turn, dict) and "role" in turn else ("from", "value")
    spoken = (text_key, *REASONING, *CALLS)
    if not isinstance(turn, dict) or role_key not in turn or not any(key in turn for key in spoken):
        allowed = "an object with role and content, or with from and value"
        raise BadRecord(f"{at} is {shown(turn)}; allowed: {allowed}", "malformed turn")
    role, text = turn[role_key], turn.get(text_key)
    if not isinstance(role, str) or role not in ROLES:
        near = difflib.get_close_matches(str(role).lower(), ROLES, n=1)
        hint = f", did you mean {near[0]!r}?" if near else ""
        message = f"{at} has the unknown role {shown(role)}{hint}; allowed: {', '.join(ROLES)}"
        raise BadRecord(message, "unknown role")
    refuse_lost(turn, LOST_IN_A_TURN, at)
    if role == "function_call":
        turn, text = {**turn, "tool_calls": text}, None
    extra = {"assistant": _written_by_assistant, "tool": _of_tool}.get(ROLES[role], _nothing)(turn, at)
    if text is None and extra and ROLES[role] == "assistant":
        text = ""  # a turn of calls or reasoning alone
    return {"role": ROLES[role], "content": _content(text, text_key, at), **extra}


def tools_of(value: Any, at: str) -> tuple[dict[str, Any], ...]:
    """Descriptions of functions, as a list or as JSON text, bare or wrapped; wrapped as `{"type": "function", "function": ...}`,
    the form in which servers hand them to a chat template."""
    items = from_text(value, "tools", at)
    items = items if isinstance(items, list) else [items]
    tools = []
    for item in items:
        wrapped = {"type": "function", "function": item} if isinstance(item, dict) and "function" not in item else item
        function = wrapped["function"] if isinstance(wrapped, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            message = f"{at}: 'tools' holds {shown(item)}; allowed: objects with a name, as a list or as JSON text"
            raise BadRecord(message, "malformed tools")
        tools.append(wrapped)
    whole(json.dumps(tools, ensure_ascii=False), at)
    return tuple(tools)


def refuse_lost(item: dict[str, Any], keys: tuple[str, ...], at: str) -> None:
    for key in keys:
        if filled(item.get(key)):
            message = f"{at}: {key!r} would be lost; allowed: its text inside the content of a turn"
            raise BadRecord(message, "content that cannot be carried")


def from_text(value: Any, key: str, at: str) -> Any:
    """The value, read if it is JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        message = f"{at}: {key!r} is {shown(value)}, which is not JSON; allowed: a list, or a list as JSON text"
        raise BadRecord(message, f"malformed {key.replace('_', ' ')}") from error


def whole(text: str, at: str) -> str:
    """The text itself. Half a surrogate pair can be written in JSON, but no tokenizer and no file takes it."""
    if half := re.search("[\ud800-\udfff]", text):
        message = f"{at} holds half a surrogate pair, \\u{ord(half[0]):04x}; allowed: whole characters"
        raise BadRecord(message, "half a surrogate pair")
    return text


def filled(value: Any) -> bool:
    return value not in (None, "", [], {}, "[]", "{}", "null")


def shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:76] + " ..."


def _written_by_assistant(turn: dict[str, Any], at: str) -> Message:
    extra: Message = {} if _is_learned(turn, at) else {"supervised": False}
    reasoning = [turn[key] for key in REASONING if filled(turn.get(key))]
    if any(other != reasoning[0] for other in reasoning[1:]):
        raise BadRecord(f"{at} has two different texts of reasoning; allowed: one", "two texts of reasoning")
    if reasoning:
        extra["reasoning_content"] = _content(reasoning[0], "reasoning", at)
    calls = [turn[key] for key in CALLS if filled(turn.get(key))]
    if len(calls) > 1:
        raise BadRecord(f"{at} has tool_calls and function_call; allowed: one of them", "malformed tool calls")
    if calls:
        extra["tool_calls"] = _tool_calls(calls[0], at)
    return extra


def _is_learned(turn: dict[str, Any], at: str) -> bool:
    values = {key: turn[key] for key in SWITCHES if turn.get(key) is not None}
    for key, value in values.items():
        if value not in (0, 1):
            message = (
                f"{at}: {key!r} is {shown(value)}; allowed: true or 1 for an answer that is learned, else false or 0"
            )
            raise BadRecord(message, "malformed turn")
    return all(values.values())


def _of_tool(turn: dict[str, Any], at: str) -> Message:
    extra = _nothing(turn, at)
    for key in ("name", "tool_call_id"):
        if filled(turn.get(key)):
            extra[key] = _content(turn[key], key, at)
    return extra


def _nothing(turn: dict[str, Any], at: str) -> Message:
    refuse_lost(turn, (*REASONING, *CALLS), at)
    return {}


def _tool_calls(value: Any, at: str) -> list[dict[str, Any]]:
    """Calls as a list or as JSON text, their arguments as an object or as JSON text: objects, which templates print themselves."""
    items = from_text(value, "tool_calls", at)
    calls = []
    for item in items if isinstance(items, list) else [items]:
        function = item.get("function", item) if isinstance(item, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        arguments = from_text(_arguments(function), "tool_calls", at) if isinstance(function, dict) else None
        if not isinstance(name, str) or not isinstance(arguments, dict):
            message = (
                f"{at} has the tool call {shown(item)}; allowed: a name, and arguments as an object or its JSON text"
            )
            raise BadRecord(message, "malformed tool calls")
        own_id = {"id": str(item["id"])} if filled(item.get("id")) else {}
        calls.append({**own_id, "type": "function", "function": {"name": name, "arguments": arguments}})
    whole(json.dumps(calls, ensure_ascii=False), at)
    return calls


def _arguments(function: dict[str, Any]) -> Any:
    """Llama's own calls name them parameters."""
    return function.get("arguments") or function.get("parameters") or {}


def _content(value: Any, key: str, at: str) -> str:
    """Text, or a list of text parts, which are joined."""
    if isinstance(value, list) and value:
        value = "".join(_part(part, key, at) for part in value)
    if not isinstance(value, str):
        raise BadRecord(f"{at} has the {key} {shown(value)}; allowed: a string", "content that is not text")
    return whole(value, at)


def _part(part: Any, key: str, at: str) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part
    if not isinstance(text, str):
        raise BadRecord(f"{at} has the {key} part {shown(part)}; allowed: text parts", "content that is not text")
    return text
