"""Every shape of a record and what becomes of it, and strict reading. Expected values are listed by hand."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.inference.conversations import read_conversations
from draftsmith.inference.records import Conversation, parse, to_record
from draftsmith.inference.turns import BadRecord


def turns(*contents: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


def write(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    return path


def read(record: object) -> Conversation:
    return parse(record, "a:3", default_id="line-3")


WEATHER: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL: dict[str, Any] = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Łódź"}}}
SYSTEM: dict[str, Any] = {"role": "system", "content": "Be brief."}

# Shapes


@pytest.mark.parametrize(
    "record",
    [
        {"messages": turns("hi", "yo")},
        {"messages": [{"role": "human", "content": "hi"}, {"from": "gpt", "value": "yo"}], "source": "left alone"},
        {"messages": turns("hi", "yo"), "prompt": "hi", "prompt_id": "x", "text": None},  # UltraChat
        {"messages": turns("hi", "yo"), "completion": "noted", "tools": [], "reasoning": None, "system": ""},
        {
            "conversations": [
                {"from": "human", "value": "hi", "weight": None},
                {"from": "gpt", "value": "yo", "weight": 1},
            ]
        },
        {"conversation": turns("hi", "yo")},  # LMSYS
        {"instruction": "hi", "input": "", "output": "yo"},
        {"instruction": "hi", "response": "yo"},
        {"prompt": "hi", "completion": "yo"},
        {"prompt": turns("hi"), "completion": turns("hi", "yo")[1:]},
        {"prompt": "hi", "chosen": turns("hi", "yo"), "rejected": turns("hi", "no")},
        {"prompt": [{"role": "user", "content": [{"type": "text", "text": "h"}, "i"]}], "response": "yo"},
    ],
    ids=str,
)
def test_every_shape_of_turns_becomes_the_same_conversation(record: dict[str, Any]) -> None:
    assert read(record) == Conversation("line-3", tuple(turns("hi", "yo")))


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"prompt": "hi"}, turns("hi")),
        ({"instruction": "hi"}, turns("hi")),
        ({"instruction": "Add.", "input": "1 2", "output": "3"}, turns("Add.\n\n1 2", "3")),
        ({"instruction": "c", "output": "d", "history": [["a", "b"]], "system": "Be brief."}, [SYSTEM, *turns(*"abcd")]),
        ({"messages": turns("hi"), "system_prompt": "Be brief."}, [SYSTEM, *turns("hi")]),
        ({"messages": [{"role": "developer", "content": "Be brief."}, *turns("hi")]}, [SYSTEM, *turns("hi")]),
        ({"prompt": [SYSTEM, *turns("hi")], "completion": "yo"}, [SYSTEM, *turns("hi", "yo")]),
        ({"messages": turns("hi", "", "x" * 1_000_000, "yo\u2028yo\r\n😀")}, turns("hi", "", "x" * 1_000_000, "yo\u2028yo\r\n😀")),
    ],
    ids=lambda value: str(value)[:60],
)  # fmt: skip
def test_prompts_and_system_turns_and_history_are_put_in_order(
    record: dict[str, Any], expected: list[dict[str, str]]
) -> None:
    assert read(record).messages == tuple(expected)


def test_every_role_name_is_mapped(tmp_path: Path) -> None:
    names = "system developer human user tool function observation gpt user chatgpt user bing user bard user assistant user model"
    path = write(tmp_path / "a.jsonl", {"conversations": [{"from": name, "value": ""} for name in names.split()]})
    roles = [message["role"] for message in read_conversations(path)[0].messages]
    assert roles == ["system"] * 2 + ["user"] * 2 + ["tool"] * 3 + ["assistant", "user"] * 5 + ["assistant"]


@pytest.mark.parametrize(
    "call",
    [
        {"tool_calls": [CALL]},
        {"tool_calls": json.dumps([CALL])},
        {"tool_calls": CALL["function"], "content": None},
        {"tool_calls": [{"function": {"name": "weather", "arguments": '{"city": "Łódź"}'}}], "content": ""},
        {"function_call": {"name": "weather", "arguments": '{"city": "Łódź"}'}},
        {"role": "function_call", "content": json.dumps(CALL["function"])},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "tools",
    [
        {"tools": [WEATHER]},
        {"tools": json.dumps([WEATHER])},
        {"tools": WEATHER["function"]},
        {"functions": json.dumps([WEATHER["function"]]), "tools": "[]"},
    ],
    ids=str,
)
def test_tools_and_calls_are_the_same_as_lists_and_as_json_text(call: dict[str, Any], tools: dict[str, Any]) -> None:
    result = {"role": "tool", "content": "rain", "tool_call_id": "1", "name": "weather"}
    record = {"messages": [*turns("hi"), {"role": "assistant", **call}, result, *turns("", "It rains.")[1:]], **tools}
    asked = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert read(record) == Conversation(
        "line-3", (*turns("hi"), asked, result, *turns("", "It rains.")[1:]), tools=(WEATHER,)
    )


def test_a_call_keeps_its_id_and_one_without_arguments_gets_none() -> None:
    calls = [{"id": "c1", "function": {"name": "f", "arguments": ""}}, {"name": "g"}]
    (_, message) = read({"messages": [*turns("hi"), {"role": "assistant", "tool_calls": calls}]}).messages
    assert message["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {}}},
        {"type": "function", "function": {"name": "g", "arguments": {}}},
    ]


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_has_one_name(key: str) -> None:
    answer = {"role": "assistant", "content": "yo", key: "hm", "reasoning_content": "hm"}
    assert read({"messages": [*turns("hi"), answer]}).messages[1] == {
        "role": "assistant", "content": "yo", "reasoning_content": "hm",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("record", "ids", "mask"),
    [
        ({"input_ids": [5, 6, 7], "loss_mask": [0, 1, True]}, (5, 6, 7), (False, True, True)),
        ({"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, (5, 6, 7), (False, True, True)),
        ({"input_ids": [0, 5, 6, 0], "labels": [-100, -100, 6, -100], "attention_mask": [0, 1, 1, 0]}, (5, 6), (False, True)),
    ],
)  # fmt: skip
def test_token_ids_come_with_their_mask_and_without_padding(
    record: dict[str, Any], ids: tuple[int, ...], mask: tuple[bool, ...]
) -> None:
    assert read(record) == Conversation("line-3", (), given=(ids, mask))


@pytest.mark.parametrize("key", ["supervised", "weight", "loss", "train"])
def test_an_answer_may_be_read_only(key: str) -> None:
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo", key: False}]
    first, second = parse({"messages": turns}, "f:1", default_id="x").messages
    assert "supervised" not in first and second["supervised"] is False
    turns[1][key] = True
    assert "supervised" not in parse({"messages": turns}, "f:1", default_id="x").messages[1]


def test_the_formatted_text_beside_an_instruction_is_a_note() -> None:
    record = {"instruction": "hi", "input": "", "output": "yo", "text": "### Instruction: hi ### Response: yo"}
    assert parse(record, "f:1", default_id="x") == parse({"prompt": "hi", "completion": "yo"}, "f:1", default_id="x")


def test_the_arguments_of_a_call_may_be_called_parameters() -> None:
    call = {"name": "f", "parameters": {"a": 1}}
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [call]}]
    (found,) = parse({"messages": turns}, "f:1", default_id="x").messages[1]["tool_calls"]
    assert found["function"] == {"name": "f", "arguments": {"a": 1}}


def test_raw_text_has_no_turns() -> None:
    assert read({"text": "Once upon\na time", "id": 7, "meta": {}}) == Conversation("7", (), text="Once upon\na time")


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    contents=st.lists(TEXT, min_size=1, max_size=4),
    reasoning=TEXT,
    arguments=st.dictionaries(TEXT, st.none() | TEXT | st.integers() | st.lists(TEXT)),
    category=TEXT,
    truncated=st.booleans(),
)
def test_a_conversation_survives_being_written_and_read(
    contents: list[str], reasoning: str, arguments: dict[str, Any], category: str, truncated: bool
) -> None:
    messages: list[dict[str, Any]] = [dict(message) for message in turns(*contents)]
    for message in messages:
        if message["role"] == "assistant" and reasoning:
            call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
            message |= {"reasoning_content": reasoning, "tool_calls": [call]}
    for conversation in (
        Conversation("x", tuple(messages), category, truncated, tools=(WEATHER,) if truncated else ()),
        Conversation("x", (), category, truncated, text="".join(contents) or "-"),
        Conversation("x", (), category, truncated, given=((1, 2), (False, truncated))),
    ):
        assert read(json.loads(json.dumps(to_record(conversation)))) == conversation


# What cannot be used

ROLE_NAMES = "user, human, assistant, gpt, chatgpt, bing, bard, model, tool, function, observation, system, developer"
SHAPES = re.escape('allowed: {"messages": [{"role": ..., "content": ...}, ...]}, ShareGPT "conversations", Alpaca')


def one(**turn: object) -> dict[str, object]:
    return {"messages": [turn]}


def answered(**turn: object) -> dict[str, object]:
    return {"messages": [*turns("hi"), {"role": "assistant", **turn}]}


IDS = [1, 2, 3]


@pytest.mark.parametrize(
    ("record", "reason", "error"),
    [
        ('{"messages": [', "broken JSON", rf"broken JSON \(Expecting value, column 15\); {SHAPES}"),
        ("[" * 100_000, "broken JSON", r"broken JSON \(.*recursion.*\); allowed"),
        ("9" * 5_000, "broken JSON", r"broken JSON \(Exceeds the limit.*\); allowed"),
        ("[]", "no known shape", rf"no turns in \[\]; {SHAPES}"),
        ({"question": "hi"}, "no known shape", rf'no turns in {{"question": "hi"}}; {SHAPES}'),
        ({"messages": [], "conversations": []}, "two shapes", f"two shapes, messages and conversations, in .*; {SHAPES}"),
        ({"messages": turns("hi"), "prompt": "another"}, "two shapes", "two shapes, messages and prompt, in"),
        ({"input_ids": [1], "text": "a"}, "two shapes", "two shapes, text and input_ids, in"),
        ({"messages": []}, "malformed turns", r"'messages' is \[\]; allowed: a list of at least one turn"),
        ({"conversations": "hi"}, "malformed turns", "'conversations' is \"hi\"; allowed: a list of at least one turn"),
        ({"messages": ["hi"]}, "malformed turn", 'turn 1 is "hi"; allowed: an object with role and content, or with from'),
        (one(role="user", value="hi"), "malformed turn", "turn 1 is {.*}; allowed: an object with role and content, or"),
        (one(role="asistant", content=""), "unknown role", r"turn 1 has the unknown role .*, did you mean 'assistant'\?; allowe"),
        (one(role="xyz", content=""), "unknown role", f'turn 1 has the unknown role "xyz"; allowed: {ROLE_NAMES}'),
        (one(role=None, content=""), "unknown role", f"turn 1 has the unknown role null; allowed: {ROLE_NAMES}"),
        (one(role="user", content=None), "content that is not text", "turn 1 has the content null; allowed: a string"),
        (one(role="user", content=[]), "content that is not text", r"turn 1 has the content \[\]; allowed: a string"),
        (one(role="user", content=["see", {"type": "image_url", "image_url": "x"}]), "content that is not text",
            r'turn 1 has the content part {"type": "image_url", "image_url": "x"}; allowed: text parts'),
        (one(**{"from": "human", "value": 3}), "content that is not text", "turn 1 has the value 3; allowed: a string"),
        (one(role="user", content=[{"x": "x" * 1_000}]), "content that is not text", r'turn 1 has the content part {"x": "xxx.*'),
        (one(role="user", content="\ud83d"), "half a surrogate pair", r"turn 1 holds half a surrogate pair, \\ud83d; allowed: wh"),
        (answered(tool_calls=[{"name": "f", "arguments": {"\udc00": 1}}]), "half a surrogate pair", r"turn 2 holds half a surrog"),
        (one(role="user", content="", tool_calls=[{}]), "content that cannot be carried", "turn 1: 'tool_calls' would be lost; a"),
        (one(role="user", content="", images=["x"]), "content that cannot be carried", "turn 1: 'images' would be lost"),
        (one(role="system", content="", functions="[{}]"), "content that cannot be carried", "turn 1: 'functions' would be lost"),
        ({**one(role="user", content=""), "reasoning": "hm"}, "content that cannot be carried", "'reasoning' would be lost; allo"),
        ({**one(role="user", content=""), "completion": "yo"}, "content that cannot be carried", "'completion' would be lost"),
        ({"text": "a", "system": "b"}, "content that cannot be carried", "'system' would be lost"),
        (answered(content="yo", weight=0.5), "malformed turn", "turn 2: 'weight' is 0.5; allowed: true or 1 for an answer"),
        (answered(content="yo", reasoning="a", thinking="b"), "two texts of reasoning", "turn 2 has two different texts of reaso"),
        (answered(tool_calls="[{"), "malformed tool calls", r"turn 2: 'tool_calls' is \"\[{\", which is not JSON; allowed: a list"),
        (answered(tool_calls=[{"name": "f", "arguments": "[1]"}]), "malformed tool calls", "turn 2 has the tool call {.*}; allow"),
        (answered(tool_calls=[CALL], function_call=CALL), "malformed tool calls", "turn 2 has tool_calls and function_call; allo"),
        ({"messages": turns("hi"), "tools": "weather"}, "malformed tools", "'tools' is \"weather\", which is not JSON; allowed:"),
        ({"messages": turns("hi"), "tools": [{}]}, "malformed tools", "'tools' holds {}; allowed: objects with a name"),
        ({"messages": turns("hi"), "tools": [WEATHER], "functions": [WEATHER]}, "malformed record", "both 'tools' and 'functions"),
        ({"messages": [SYSTEM, *turns("hi")], "system": "a"}, "two system prompts", "a system turn, and a system prompt beside i"),
        ({"prompt": "a", "input": "b"}, "malformed record", "'input' is \"b\"; allowed: text, beside an instruction that is text"),
        ({"prompt": "a", "completion": "b", "response": "c"}, "malformed record", "both 'completion' and 'response'; allowed: on"),
        ({"prompt": "a", "chosen": turns("b", "c")}, "answer that does not follow its prompt", "the answer's turns neither begin"),
        ({"instruction": "a", "history": [["b"]]}, "malformed record", r"'history' is \[\[\"b\"\]\]; allowed: a list of pairs of"),
        ({**one(role="user", content=""), "id": 1.5}, "malformed record", "'id' is 1.5; allowed: a string or a whole number"),
        ({**one(role="user", content=""), "category": 1}, "malformed record", "'category' is 1; allowed: a string"),
        ({**one(role="user", content=""), "truncated": 1}, "malformed record", "truncated is 1; allowed: true or false"),
        ({"text": ""}, "malformed record", "'text' is \"\"; allowed: a string that is not empty"),
        ({"messages": turns("hi", "yo")[1:]}, "answer to nothing", "turn 1, an assistant turn, answers nothing; allowed: after a"),
        ({"messages": [*turns("hi", "yo"), turns("", "yo")[1]]}, "answer to nothing", "turn 3, an assistant turn, answers nothin"),
        ({"input_ids": IDS}, "malformed token ids", "input_ids without a mask; allowed: input_ids with loss_mask, or with labels"),
        ({"input_ids": IDS, "loss_mask": [0, 1, 1], "labels": IDS}, "malformed token ids", "both loss_mask and labels; allowed"),
        ({"input_ids": IDS, "loss_mask": [0, 1]}, "malformed token ids", "'loss_mask' has 2 entries, input_ids 3; allowed: as ma"),
        ({"input_ids": IDS, "loss_mask": [0, 1, 2]}, "malformed token ids", "an id below 0, or a mask of other than 0 and 1; all"),
        ({"input_ids": [1, -1], "loss_mask": [0, 1]}, "malformed token ids", "an id below 0, or a mask of other than 0 and 1"),
        ({"input_ids": [], "loss_mask": []}, "malformed token ids", r"'input_ids' is \[\]; allowed: a list of whole numbers"),
        ({"input_ids": 5, "loss_mask": [1]}, "malformed token ids", "'input_ids' is 5; allowed: a list of whole numbers"),
        ({"input_ids": ["a"], "loss_mask": [1]}, "malformed token ids", r"'input_ids' is \[\"a\"\]; allowed: a list of whole num"),
        ({"input_ids": IDS, "labels": [-100, 3, -100]}, "shifted labels", r"label 1 is 3, input_ids have 2 there; allowed: -100,"),
        ({"input_ids": IDS, "loss_mask": [0, 1, 1], "attention_mask": [1, 1, 0]}, "malformed token ids", "attention_mask has zer"),
        ({"input_ids": IDS, "loss_mask": [0, 0, 1], "attention_mask": [1, 0, 1]}, "malformed token ids", "attention_mask has zer"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_a_broken_record_is_named_with_file_and_line_and_what_is_allowed(
    tmp_path: Path, record: Any, reason: str, error: str
) -> None:
    path = tmp_path / "a.jsonl"
    line = record if isinstance(record, str) else json.dumps(record)
    path.write_text(json.dumps({"messages": turns("hi")}) + "\n\n" + line)
    with pytest.raises(BadRecord, match=rf"^{re.escape(str(path))}:3: {error}") as caught:
        read_conversations(path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600
    assert caught.value.reason == reason


# Strict reading


def test_bom_crlf_blank_lines_and_a_missing_last_newline_are_taken(tmp_path: Path) -> None:
    path, line = tmp_path / "a.jsonl", json.dumps({"messages": turns("hi")}).encode()
    path.write_bytes(b"\xef\xbb\xbf" + line + b"\r\n\r\n  \n" + line)
    assert [conversation.id for conversation in read_conversations(path)] == ["line-1", "line-4"]


def test_an_id_is_taken_once(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "a"}, {"prompt": "b", "id": "line-1"})
    with pytest.raises(ValueError, match=":2: id 'line-1' is already that of line 1; allowed: a different id in each"):
        read_conversations(path)


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (None, f": No such file or directory; {SHAPES}"),
        (b"", f": no conversation in it; {SHAPES}"),
        (b"\xef\xbb\xbf\r\n \n", f": no conversation in it; {SHAPES}"),
        ('{"messages": []}'.encode("utf-16"), r":1: not UTF-8 \(byte 0xff in column 1\); save the file as UTF-8"),
        (b'\n{"caf\xe9": 1}', r":2: not UTF-8 \(byte 0xe9 in column 6\); save the file as UTF-8"),
    ],
    ids=["missing", "empty", "blank", "UTF-16", "Latin-1"],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None, error: str) -> None:
    path = tmp_path / "a.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))}{error}"):
        read_conversations(path)
