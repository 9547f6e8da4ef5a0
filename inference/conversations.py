"""Chat records, and which of their tokens the target would have written: JSONL in, ids with an exact loss mask out.

The mask comes from the target's own chat template. An answer starts where the template's generation prompt ends and
stops with the end-of-turn token, so forced text (the assistant header, a think scaffold) and text appended after the
turn (a newline) are never supervised. This module does not regenerate answers, truncate or pack.

One tokenizer call on a whole conversation may merge the end of a prompt with the start of its answer, which the target
never sees: it reads the prompt, then writes. So a token ends at both ends of every answer, and the ids before a
supervised answer are `prompt_ids` of the turns before it, exactly. Without such a merge the ids are those of one call.
No special token is added: a BOS is there if the template writes it.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jinja2 import TemplateError

from draftsmith.configs import locate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHAPES = (
    'allowed: {"messages": [{"role": ..., "content": ...}, ...]} '
    'or ShareGPT {"conversations": [{"from": ..., "value": ...}, ...]}, one a line'
)
ROLES = {  # every spelling that is taken -> the chat template's role
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation"), "tool"),
    "system": "system",
}
# Dropping these in silence would change the target's prompt or its answer; refused if they hold something.
NOT_CARRIED = ("tools", "tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
EMPTY_THINK = re.compile(r"\s*<think>\s*</think>\s*")


@dataclass(frozen=True, slots=True)
class Conversation:
    """One record: turns in the order of the file; `id` is the record's own, or `line-<n>`."""

    id: str
    messages: tuple[dict[str, str], ...]  # [{"role": system|user|assistant|tool, "content": str}, ...]
    category: str = "all"
    truncated: bool = False  # the last answer was cut by a token budget: the target did not end it


@dataclass(frozen=True, slots=True)
class Rendered:
    """Token ids and a mask of the same length."""

    ids: list[int]
    loss_mask: list[bool]  # True exactly where the target itself would have generated the token


def read_conversations(path: str | Path) -> list[Conversation]:
    """Reads JSONL of either shape in `SHAPES`: UTF-8, with or without BOM and CRLF, blank lines skipped.

    An assistant turn must answer something: it cannot come first (system turns aside) nor follow another one. User
    turns in a row are fine in both shapes, people do send two messages; a template that demands alternation refuses
    them in `render`. A record without an assistant turn is a prompt. Raises ValueError, one line:
    `FILE:LINE: what is wrong; what is allowed`.
    """
    path = locate(path)
    try:
        file = path.open("rb")
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; {SHAPES}") from error
    line_of: dict[str, int] = {}
    conversations = []
    with file:
        for number, line in enumerate(file, start=1):
            line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if not line.strip():
                continue
            conversation = _conversation(line, f"{path}:{number}", default_id=f"line-{number}")
            first = line_of.setdefault(conversation.id, number)
            if first != number:
                what = f"id {conversation.id!r} is already that of line {first}"
                raise ValueError(f"{path}:{number}: {what}; allowed: a different id in each record, or none")
            conversations.append(conversation)
    if not conversations:
        raise ValueError(f"{path}: no conversation in it; {SHAPES}")
    return conversations


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[dict[str, str]],
    *,
    where: str = "conversation",
    truncated: bool = False,
) -> Rendered:
    """The conversation up to its last answer, as the target sees it; every answer supervised with its end of turn.

    Not supervised: an earlier answer that the template shows otherwise than when it was given, or after other text
    (reasoning dropped from earlier turns, say), because the target never wrote that; an empty `<think></think>` that
    the template puts in by itself; whitespace after an answer whose template ends it with no special token. A tokenizer
    without a template gets the fallback format of `_plain`. With `truncated` the last answer's end of turn, which the
    target did not write, is left out. Raises ValueError, `where` first: no assistant turn, a turn order that
    `read_conversations` or the template refuses, a last answer that the template shows without its own generation
    prompt.
    """
    last = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=-1)
    if last < 0:
        raise ValueError(f"{where}: no assistant turn, so nothing to learn; allowed: at least one")
    _check_order(messages, where)
    rendered = Rendered([], [])
    for ids, generated in _pieces(tokenizer, messages[: last + 1], where, generation_prompt=False):
        rendered.ids.extend(ids)
        rendered.loss_mask.extend([generated] * len(ids))
    if truncated:
        end = next((i for i in reversed(range(len(rendered.ids))) if rendered.loss_mask[i]), None)
        if end is not None and not tokenizer.decode([rendered.ids[end]], skip_special_tokens=True):
            del rendered.ids[end:], rendered.loss_mask[end:]
    return rendered


def prompt_ids(tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, str]]) -> list[int]:
    """What is given to the target so that it answers: all turns (see `prompt_messages`) and the generation prompt."""
    if len(prompt_messages(messages)) < len(messages):
        raise ValueError("the prompt ends with an assistant turn; allowed: a user or tool turn, see prompt_messages")
    _check_order(messages, "prompt")
    return [token for ids, _ in _pieces(tokenizer, messages, "prompt", generation_prompt=True) for token in ids]


def prompt_messages(messages: Sequence[dict[str, str]]) -> tuple[dict[str, str], ...]:
    """The turns without a final assistant turn. Raises ValueError unless these end with a user or tool turn."""
    prompt = tuple(messages[:-1] if messages and messages[-1]["role"] == "assistant" else messages)
    if not prompt or prompt[-1]["role"] not in ("user", "tool"):
        roles = _shown([message["role"] for message in messages])
        raise ValueError(f"nothing to answer in the turns {roles}; allowed: a user or tool turn at the end")
    return prompt


def _conversation(line: bytes, at: str, *, default_id: str) -> Conversation:
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        bad = f"byte {line[error.start]:#04x} in column {error.start + 1}"
        raise ValueError(f"{at}: not UTF-8 ({bad}); save the file as UTF-8") from error
    except (ValueError, RecursionError) as error:  # not JSON, a number of 5,000 digits, brackets 10,000 deep
        detail = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise ValueError(f"{at}: broken JSON ({detail}); {SHAPES}") from error
    keys = [key for key in ("messages", "conversations") if isinstance(record, dict) and key in record]
    if len(keys) != 1:
        raise ValueError(f"{at}: {'two lists of turns' if keys else 'no turns'} in {_shown(record)}; {SHAPES}")
    _refuse_lost_keys(record, at)
    turns, own_id, category = record[keys[0]], record.get("id"), record.get("category", "all")
    truncated = record.get("truncated", False)
    if not isinstance(truncated, bool):
        raise ValueError(f"{at}: truncated is {_shown(truncated)}; allowed: true or false")
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"{at}: {keys[0]!r} is {_shown(turns)}; allowed: a list of at least one turn")
    if not isinstance(own_id, str | int | None):
        raise ValueError(f"{at}: 'id' is {_shown(own_id)}; allowed: a string or a whole number")
    if not isinstance(category, str):
        raise ValueError(f"{at}: 'category' is {_shown(category)}; allowed: a string")
    messages = tuple(_message(turn, f"{at}: turn {number}") for number, turn in enumerate(turns, start=1))
    _check_order(messages, at)
    return Conversation(default_id if own_id is None else str(own_id), messages, category, truncated)


def _message(turn: Any, at: str) -> dict[str, str]:
    shapes = (("role", "content"), ("from", "value"))
    keys = next((keys for keys in shapes if isinstance(turn, dict) and turn.keys() >= {*keys}), None)
    if keys is None:
        raise ValueError(f"{at} is {_shown(turn)}; allowed: an object with role and content, or with from and value")
    _refuse_lost_keys(turn, at)
    role, content = (turn[key] for key in keys)
    if not isinstance(role, str) or role not in ROLES:
        near = difflib.get_close_matches(str(role).lower(), ROLES, n=1)
        hint = f", did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{at} has the unknown role {_shown(role)}{hint}; allowed: {', '.join(ROLES)}")
    if not isinstance(content, str):
        raise ValueError(f"{at} has the {keys[1]} {_shown(content)}; allowed: a string")
    if half := re.search("[\ud800-\udfff]", content):
        raise ValueError(f"{at} holds half a surrogate pair, \\u{ord(half[0]):04x}; allowed: whole characters")
    return {"role": ROLES[role], "content": content}


def _refuse_lost_keys(item: dict[str, Any], at: str) -> None:
    for key in NOT_CARRIED:
        if item.get(key) not in (None, "", "[]", []):
            raise ValueError(f"{at}: {key!r} would be lost; allowed: its text inside the content of a turn")


def _check_order(messages: Sequence[dict[str, str]], at: str) -> None:
    answerable = False
    for number, message in enumerate(messages, start=1):
        if message["role"] == "assistant" and not answerable:
            raise ValueError(
                f"{at}: turn {number}, an assistant turn, answers nothing; allowed: after a user or tool turn"
            )
        answerable = message["role"] in ("user", "tool") or (message["role"] == "system" and answerable)


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:76] + " ..."


class _Cut(NamedTuple):
    """A place in the text where a token has to end."""

    stop: int
    generated: bool  # the target wrote the text between the cut before and this one
    end_of_turn: str  # the special token just before `stop`, "" if none


def _pieces(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, str]], where: str, *, generation_prompt: bool
) -> list[tuple[list[int], bool]]:
    """The rendered turns as (ids, whether the target generated them).

    A special token splits the text before anything can merge, so what is tokenised up to a cut starts at the last end
    of turn, not at the beginning: the work grows with the number of turns, not with its square.
    """
    text = _template(tokenizer, messages, where, generation_prompt)
    cuts = [*_cuts(tokenizer, messages, text, where), _Cut(len(text), False, "")]
    windows, start = [], 0
    for cut in cuts:
        windows.append(text[start : cut.stop])
        start = cut.stop - len(cut.end_of_turn) if cut.end_of_turn else start
    pieces: list[tuple[list[int], bool]] = []
    done: list[int] = []  # ids of this window up to the cut before
    before = 0
    for cut, ids in zip(cuts, _encode(tokenizer, windows), strict=True):
        if ids[: len(done)] == done:
            piece = ids[len(done) :]
        else:  # Merged over the cut. SentencePiece adds a space in front of a text, but not behind a control character.
            anchor, anchored = _encode(tokenizer, ["\x01", "\x01" + text[before : cut.stop]])
            piece = anchored[len(anchor) :]
        pieces.append((piece, cut.generated))
        done = piece[-1:] if cut.end_of_turn else done + piece
        before = cut.stop
    return pieces


def _cuts(tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, str]], text: str, where: str) -> list[_Cut]:
    """Both ends of every answer that `text` shows exactly as the target gave it, and after the same text."""
    cuts: list[_Cut] = []
    for i in (i for i, message in enumerate(messages) if message["role"] == "assistant"):
        is_last, content = i == len(messages) - 1, messages[i]["content"]
        prompt = _template(tokenizer, messages[:i], where, True)
        given = text if is_last else _template(tokenizer, messages[: i + 1], where, False)
        if is_last and not given.startswith(prompt):
            same = len(os.path.commonprefix([prompt, given]))
            raise ValueError(
                f"{where}: the chat template asks for the answer with {prompt[same:][:60]!r} but shows the answer with "
                f"{given[same:][:60]!r} there; allowed: a template that shows an answer behind its generation prompt"
            )
        start = len(prompt)
        length, end_of_turn = _generated(tokenizer, given[start:], content)
        if not (given.startswith(prompt) and text.startswith(given[: start + length])):
            continue
        cuts.append(_Cut(start, False, ""))
        scaffold = EMPTY_THINK.match(given[start : start + length])
        if scaffold and "<think>" not in content:
            cuts.append(_Cut(start + scaffold.end(), False, ""))
        cuts.append(_Cut(start + length, True, end_of_turn))
    return cuts


def _generated(tokenizer: PreTrainedTokenizerBase, answer: str, content: str) -> tuple[int, str]:
    """How many characters of `answer`, the text after the prompt, are generated, and the special token at their end."""
    specials = _trailing_specials(tokenizer, answer)
    if not specials:
        return len(answer.rstrip()), ""
    # Phi-3 shows "<|end|>\n<|endoftext|>": the first of them stops the target, unless it belongs to the content.
    in_content = len(_trailing_specials(tokenizer, content)) if len(specials) > 1 else 0
    end_of_turn = specials[min(in_content, len(specials) - 1)]
    return answer.index(end_of_turn) + len(end_of_turn), end_of_turn  # written inside the content it stops there too


def _trailing_specials(tokenizer: PreTrainedTokenizerBase, text: str) -> list[str]:
    """The special tokens that end `text`, whitespace between and after them aside."""
    found: list[str] = []
    rest = text.rstrip()
    for token in reversed(_encode(tokenizer, [text[-256:]])[0]):
        if not str(tokenizer.decode([token])).strip():
            continue
        name = str(tokenizer.convert_ids_to_tokens(token))
        if tokenizer.decode([token], skip_special_tokens=True) or not rest.endswith(name):  # the latter: <unk>
            break
        found.insert(0, name)
        rest = rest.removesuffix(name).rstrip()
    return found


def _template(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, str]], where: str, generation_prompt: bool
) -> str:
    if not tokenizer.chat_template:
        return _plain(tokenizer, messages, generation_prompt)
    try:
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=generation_prompt)
    except TemplateError as error:
        roles, reason = _shown([message["role"] for message in messages]), " ".join(str(error).split())
        raise ValueError(f"{where}: the chat template refuses the turns {roles}: {reason}; change them") from error
    return str(text)


def _plain(tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, str]], generation_prompt: bool) -> str:
    """Fallback without a template: `User: ...\\n\\nAssistant: ...<eos>`, and a BOS if the tokenizer begins with one.
    The generation prompt is `Assistant:` with no space behind it: an answer's first token brings its own."""
    writes_bos = tokenizer.bos_token and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
    ends = {"assistant": tokenizer.eos_token or ""}
    turns = [f"{m['role'].capitalize()}: {m['content']}{ends.get(m['role'], '')}" for m in messages]
    return (tokenizer.bos_token if writes_bos else "") + "\n\n".join(turns + ["Assistant:"] * generation_prompt)


def _encode(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    ids: list[list[int]] = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return ids
