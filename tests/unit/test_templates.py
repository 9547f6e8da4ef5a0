"""Real chat templates (tests/templates): what is supervised, listed by hand for each, and what must hold for all.

The tokenizer is a toy, a token per byte and one per special token of the family: what is tested is the text of the templates.
"""

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from draftsmith.inference.records import Conversation
from draftsmith.inference.rendering import Rendered, prompt_ids, render
from draftsmith.inference.templates import dated
from draftsmith.inference.turns import BadRecord

FOLDER = Path(__file__).parents[1] / "templates"

SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {"type": "function", "id": "call12345", "function": {"name": "get_weather", "arguments": {"city": "Rome"}}}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather now.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "Where."}}},
    },
}


def answer(content: str, reasoning: str = "", **fields: Any) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": content,
        **({"reasoning_content": reasoning} if reasoning else {}),
        **fields,
    }


def ask(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


PLAIN = (SYSTEM, ask("Two plus two?"), answer("Four."), ask("Three plus three?"), answer("Six."))
REASONED = (
    SYSTEM,
    ask("Two plus two?"),
    answer("Four.", "Two and two."),
    ask("Three plus three?"),
    answer("Six.", "Three and three."),
)
RESULT = {"role": "tool", "name": "get_weather", "tool_call_id": "call12345", "content": "Sunny, 25 degrees"}
AGENT = (
    SYSTEM,
    ask("Weather in Rome?"),
    answer("", tool_calls=[CALL]),
    RESULT,
    answer("It is sunny."),
    ask("Thanks!"),
    answer("Welcome."),
)
REASONING_AGENT = (
    SYSTEM,
    ask("Weather in Rome?"),
    answer("", "Look it up.", tool_calls=[CALL]),
    RESULT,
    answer("It is sunny.", "Sunny then."),
    ask("Thanks!"),
    answer("Welcome.", "Be polite."),
)


class Family(NamedTuple):
    """Special tokens of a family; the first begins a text, or is None, the second is `eos_token`."""

    specials: tuple[str | None, ...]
    writes_bos: bool = True
    swallows: bool = False  # special tokens take the whitespace behind them


LLAMA = Family(
    ("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|python_tag|>")
)
QWEN = Family((None, "<|im_end|>", "<|im_start|>", "<|endoftext|>"))
MISTRAL_3 = (
    "[INST]",
    "[/INST]",
    "[TOOL_CALLS]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
)
GEMMA = Family(("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"))
DEEPSEEK = Family(("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"))
PHI3 = ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
GPT_OSS = (None, "<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|constrain|>")
GLM = (None, "<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
FAMILIES = {
    "chatml": QWEN,
    "deepseek_r1_distill": DEEPSEEK,
    "deepseek_v3": DEEPSEEK,
    "gemma2": GEMMA,
    "gemma3": GEMMA,
    "glm4_5": Family(GLM),
    "gpt_oss": Family(GPT_OSS),
    "llama3": LLAMA,
    "llama3_1": LLAMA,
    "llama3_tagged": LLAMA,
    "mistral_v1": Family(("<s>", "</s>")),
    "mistral_v3": Family(("<s>", "</s>", *MISTRAL_3)),
    "olmo3": Family(("<|endoftext|>", "<|im_end|>", "<|im_start|>")),
    "phi3": Family(("<s>", *PHI3), writes_bos=False, swallows=True),
    "phi4": Family((None, "<|im_end|>", "<|im_start|>", "<|im_sep|>")),
    "qwen2_5": QWEN,
    "qwen3": QWEN,
    "qwen3_tagged": QWEN,
    "smollm2": Family(("<|im_start|>", "<|im_end|>"), writes_bos=False),
    "smollm3": QWEN,
    "zephyr": Family(("<s>", "</s>"), writes_bos=False),
}
TAGGED = ("llama3_tagged", "phi4", "qwen3_tagged", "smollm3")

QWEN_CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>'
GPT_FINAL = "<|channel|>final<|message|>"
GPT_NEXT = "<|end|><|start|>assistant"
GPT_THINK = "<|channel|>analysis<|message|>"
R1_END = "<｜end▁of▁sentence｜>"

SHOWN: list[tuple[str, tuple[dict[str, Any], ...], list[list[str]]]] = [
    ("chatml", PLAIN, [["Four.<|im_end|>", "Six.<|im_end|>"]]),
    # the generation prompt forces "<think>\n", and even the newest answer is shown without its reasoning
    (
        "deepseek_r1_distill",
        REASONED,
        [[f"Two and two.\n</think>\n\nFour.{R1_END}"], [f"Three and three.\n</think>\n\nSix.{R1_END}"]],
    ),
    (
        "deepseek_v3",
        REASONED,
        [[f"Two and two.\n</think>\n\nFour.{R1_END}"], [f"Three and three.\n</think>\n\nSix.{R1_END}"]],
    ),
    ("gemma2", PLAIN[1:], [["Four.<end_of_turn>", "Six.<end_of_turn>"]]),
    ("gemma3", PLAIN, [["Four.<end_of_turn>", "Six.<end_of_turn>"]]),
    ("glm4_5", PLAIN, [["Four.", "Six."]]),  # no end of turn: the header of the next turn ends an answer
    ("glm4_5", REASONED, [["\n<think>Two and two.</think>\nFour."], ["\n<think>Three and three.</think>\nSix."]]),
    (
        "glm4_5",
        REASONING_AGENT,
        [
            [
                "\n<think>Look it up.</think>\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n"
                "</tool_call>",
                "\n<think>Sunny then.</think>\nIt is sunny.",
            ],
            ["\n<think>Be polite.</think>\nWelcome."],
        ],
    ),
    # an earlier answer ends with <|end|>, what the target wrote with <|return|>
    ("gpt_oss", PLAIN, [[f"{GPT_FINAL}Four.<|return|>"], [f"{GPT_FINAL}Six.<|return|>"]]),
    (
        "gpt_oss",
        REASONED,
        [
            [f"{GPT_THINK}Two and two.{GPT_NEXT}{GPT_FINAL}Four.<|return|>"],
            [f"{GPT_THINK}Three and three.{GPT_NEXT}{GPT_FINAL}Six.<|return|>"],
        ],
    ),
    (
        "gpt_oss",
        REASONING_AGENT,
        [
            [
                f"{GPT_THINK}Look it up.{GPT_NEXT} to=functions.get_weather<|channel|>commentary json<|message|>"
                '{"city": "Rome"}<|call|>',
                f"{GPT_THINK}Sunny then.{GPT_NEXT}{GPT_FINAL}It is sunny.<|return|>",
            ],
            [f"{GPT_THINK}Be polite.{GPT_NEXT}{GPT_FINAL}Welcome.<|return|>"],
        ],
    ),
    ("llama3", PLAIN, [["Four.<|eot_id|>", "Six.<|eot_id|>"]]),
    ("llama3_1", PLAIN, [["Four.<|eot_id|>", "Six.<|eot_id|>"]]),
    (
        "llama3_1",
        AGENT,
        [
            [
                '{"name": "get_weather", "parameters": {"city": "Rome"}}<|eot_id|>',
                "It is sunny.<|eot_id|>",
                "Welcome.<|eot_id|>",
            ]
        ],
    ),
    ("llama3_tagged", PLAIN, [["Four.<|eot_id|>", "Six.<|eot_id|>"]]),
    ("mistral_v1", PLAIN, [[" Four.</s>", " Six.</s>"]]),
    ("mistral_v3", PLAIN[1:], [[" Four.</s>", " Six.</s>"]]),
    ("mistral_v3", PLAIN, [[" Four.</s>"], [" Six.</s>"]]),  # the system turn moves to the newest question
    (
        "mistral_v3",
        AGENT,  # and so do the tools
        [
            ['[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Rome"}, "id": "call12345"}]</s>'],
            [" It is sunny.</s>"],
            [" Welcome.</s>"],
        ],
    ),
    ("olmo3", PLAIN, [["Four.<|im_end|>", "Six.<|im_end|>"]]),
    (
        "olmo3",
        AGENT,
        [
            [
                "<function_calls>\nget_weather(city='Rome')\n</function_calls><|im_end|>",
                "It is sunny.<|im_end|>",
                "Welcome.<|im_end|>",
            ]
        ],
    ),
    ("phi3", PLAIN, [["Four.<|end|>", "Six.<|end|>"]]),
    ("phi4", PLAIN, [["Four.<|im_end|>", "Six.<|im_end|>"]]),
    ("qwen2_5", PLAIN, [["Four.<|im_end|>", "Six.<|im_end|>"]]),
    ("qwen2_5", AGENT, [[QWEN_CALL, "It is sunny.<|im_end|>", "Welcome.<|im_end|>"]]),
    (
        "qwen3",
        PLAIN,
        [["Four.<|im_end|>"], ["Six.<|im_end|>"]],
    ),  # the empty scaffold is shown with the newest answer only
    (
        "qwen3",
        REASONED,
        [
            ["<think>\nTwo and two.\n</think>\n\nFour.<|im_end|>"],
            ["<think>\nThree and three.\n</think>\n\nSix.<|im_end|>"],
        ],
    ),
    (
        "qwen3",
        REASONING_AGENT,  # reasoning stays until the next user turn
        [
            [
                f"<think>\nLook it up.\n</think>\n\n{QWEN_CALL}",
                "<think>\nSunny then.\n</think>\n\nIt is sunny.<|im_end|>",
            ],
            ["<think>\nBe polite.\n</think>\n\nWelcome.<|im_end|>"],
        ],
    ),
    ("qwen3_tagged", PLAIN, [["Four.<|im_end|>", "Six.<|im_end|>"]]),
    (
        "qwen3_tagged",
        REASONED,
        [
            [
                "<think>\nTwo and two.\n</think>\n\nFour.<|im_end|>",
                "<think>\nThree and three.\n</think>\n\nSix.<|im_end|>",
            ]
        ],
    ),
    ("smollm2", PLAIN, [["Four.<|im_end|>", "Six.<|im_end|>"]]),
    ("smollm3", PLAIN, [["Four.<|im_end|>", "Six.<|im_end|>"]]),
    # the tags hold the header and the scaffold, which are forced
    ("smollm3", ({**SYSTEM, "content": "/no_think Be brief."}, *PLAIN[1:]), [["Four.<|im_end|>", "Six.<|im_end|>"]]),
    ("zephyr", PLAIN, [["Four.</s>", "Six.</s>"]]),
]


def load(name: str) -> PreTrainedTokenizerFast:
    """A token per byte, and the special tokens of the family."""
    family = FAMILIES[name]
    backend = Tokenizer(
        models.BPE(vocab={t: i for i, t in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    names = [name for name in family.specials if name]
    backend.add_special_tokens([AddedToken(name, special=True, rstrip=family.swallows) for name in names])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=family.specials[0], eos_token=family.specials[1]
    )
    tokenizer.chat_template = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    return tokenizer


def conversation(messages: tuple[dict[str, Any], ...]) -> Conversation:
    return Conversation("c", messages, tools=(TOOL,) if any("tool_calls" in message for message in messages) else ())


def starts_and_texts(tokenizer: PreTrainedTokenizerFast, row: Rendered) -> tuple[list[int], list[str]]:
    on = [False, *row.loss_mask, False]
    starts = [i for i in range(len(row.ids)) if on[i + 1] and not on[i]]
    stops = [i for i in range(1, len(on)) if on[i] and not on[i + 1]] if on else []
    return starts, [tokenizer.decode(row.ids[a:b]) for a, b in zip(starts, stops, strict=True)]


IDS = [f"{name}-{number}" for number, (name, _, _) in enumerate(SHOWN)]


def test_every_template_is_tested() -> None:
    files = {file.stem for file in FOLDER.glob("*.jinja")}
    assert files == FAMILIES.keys() == {name for name, _, _ in SHOWN} and len(files) >= 14
    listed = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert all(f"`{name}.jinja`" in listed for name in files)


@pytest.mark.parametrize(("name", "messages", "expected"), SHOWN, ids=IDS)
def test_the_supervised_text_is_that_listed_by_hand(name, messages, expected) -> None:
    tokenizer = load(name)
    rows = render(tokenizer, conversation(messages))
    assert [starts_and_texts(tokenizer, row)[1] for row in rows] == expected
    assert {row.method for row in rows} == {"tags" if name in TAGGED else "prefixes"}
    assert render(tokenizer, conversation(messages), reasoning="last") == rows[-1:]


@pytest.mark.parametrize(("name", "messages", "expected"), SHOWN, ids=IDS)
def test_what_stands_before_a_supervised_answer_is_its_prompt_and_nothing_of_it_is_supervised(
    name, messages, expected
) -> None:
    """So no prompt token is supervised, nor one of the generation prompt; and there is one BOS."""
    tokenizer = load(name)
    whole = conversation(messages)
    prompts = [
        prompt_ids(tokenizer, messages[:i], whole.tools)
        for i, message in enumerate(messages)
        if message["role"] == "assistant"
    ]
    template = dated(tokenizer.chat_template)  # templates that show the day are told another one
    assert prompts == [
        tokenizer.apply_chat_template(
            list(messages[:i]),
            tools=list(whole.tools) or None,
            chat_template=template,
            add_generation_prompt=True,
            return_dict=False,
        )
        for i, message in enumerate(messages)
        if message["role"] == "assistant"
    ]
    left = list(prompts)
    for row in render(tokenizer, whole):
        for start in starts_and_texts(tokenizer, row)[0]:
            prompt = left.pop(0)
            assert row.ids[: len(prompt)] == prompt
            scaffold = tokenizer.decode(row.ids[len(prompt) : start])  # what the template puts in by itself
            assert not re.sub(r"\s|<think>|</think>", "", scaffold)
            assert not scaffold or (name in ("qwen3", "qwen3_tagged", "glm4_5") and messages is PLAIN)
        texts = starts_and_texts(tokenizer, row)[1]
        assert sum(row.loss_mask) == sum(len(tokenizer(text)["input_ids"]) for text in texts)
        bos, family = tokenizer.bos_token_id, FAMILIES[name]
        if bos is not None and family.writes_bos:
            assert row.ids.count(bos) == 1 and row.ids[0] == bos
    assert not left


@pytest.mark.parametrize(
    ("name", "messages", "error"),
    [
        ("gemma2", PLAIN, "the chat template refuses the turns .*: System role not supported; change them"),
        ("deepseek_r1_distill", PLAIN, r"asks for the answer with '<think>\\n' but shows the answer with 'Six\."),
        ("llama3", REASONED, "does not show the reasoning_content of the conversation.* lost"),
        ("smollm3", AGENT, "does not show the tool_calls of the conversation.* lost"),
        ("chatml", AGENT, "does not show the tools of the conversation.* lost"),
        ("mistral_v1", AGENT, "the chat template refuses the turns .* roles must alternate"),
    ],
)
def test_what_a_template_cannot_show_is_refused_and_not_dropped(name, messages, error) -> None:
    with pytest.raises(ValueError, match=f"^conversation c: .*{error}"):
        render(load(name), conversation(messages))


def test_what_a_prompt_would_lose_is_refused_before_it_is_asked_and_not_only_when_it_is_learned() -> None:
    for name, stop, what in (("chatml", 2, "tools"), ("smollm3", 4, "tool_calls")):
        with pytest.raises(BadRecord, match=f"^prompt: the chat template does not show the {what} of") as caught:
            prompt_ids(load(name), AGENT[:stop], [TOOL])
        with pytest.raises(BadRecord) as later:
            render(load(name), conversation(AGENT))
        assert caught.value.reason == later.value.reason


def test_reasoning_of_an_answer_that_is_only_read_may_be_hidden() -> None:
    """The target never sees it; a prompt with it is asked, and the conversation that comes of it can be learned."""
    tokenizer, new = load("llama3"), answer("Six.")
    asked = (*REASONED[:2], {**REASONED[2], "supervised": False}, REASONED[3], new)
    (row,) = render(tokenizer, conversation(asked))
    prompt = prompt_ids(tokenizer, asked[:4])
    assert row.ids[: len(prompt)] == prompt and not any(row.loss_mask[: len(prompt)])
    assert starts_and_texts(tokenizer, row)[1] == ["Six.<|eot_id|>"]
    with pytest.raises(BadRecord, match="does not show the reasoning_content"):
        render(tokenizer, conversation((*REASONED[:4], new)))


def test_a_prompt_shows_earlier_turns_as_the_template_likes_even_if_they_could_not_be_learned() -> None:
    for name, messages in (("deepseek_v3", PLAIN), ("llama3", REASONED)):
        tokenizer = load(name)
        expected = tokenizer.apply_chat_template(list(messages[:4]), add_generation_prompt=True, return_dict=False)
        assert prompt_ids(tokenizer, messages[:4]) == expected
