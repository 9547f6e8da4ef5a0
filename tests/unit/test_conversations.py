"""Reading chat records and masking them. Toy tokenizers and templates, each with one habit of a real model family.

Expected values: positions listed by hand, or transformers' own one-call rendering with the prompt.
"""

import json
import random
import re
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from draftsmith.inference import conversations
from draftsmith.inference.conversations import (
    Conversation,
    prompt_ids,
    prompt_messages,
    read_conversations,
    render,
)

SWALLOW = ("<|user|>", "<|answer|>", "<|end|>")  # as Phi-3's: these take the whitespace behind them
SPECIALS = [
    "<unk>",
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|user|>",
    "<|answer|>",
    "<|end|>",
    "<|tool|>",
    "<|header|>",
]

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}<|header|>\n\n{{ m.content | trim }}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant<|header|>\n\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role\nnot supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}"
    "<|im_start|>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>model\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }}</s>"
    "{% else %}[INST] {{ m.content }}[/INST]{% endif %}{% endfor %}"
)
THINK_OFF = (  # the generation prompt forces an empty scaffold; only the last answer is shown with it
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}"
    "<think>\n\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}"
)
THINK_SHOWN = THINK_OFF.replace("assistant\n<think>\n\n</think>\n\n", "assistant\n")  # scaffold shown, but not forced
DROPS_REASONING = CHATML.replace(
    "{{ m.content }}", "{{ m.content.split('</think>')[-1] if m.role == 'assistant' and not loop.last else m.content }}"
)
PHI3 = (  # the end of turn is not eos, and eos is appended at the end of the conversation
    "{% for m in messages %}<|{{ 'answer' if m.role == 'assistant' else 'user' }}|>\n{{ m.content }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|answer|>\n{% else %}</s>{% endif %}"
)
VICUNA = (  # no special token at all
    "{% for m in messages %}{{ m.role | upper }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT: {% endif %}"
)
THINK_ON = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")  # forced; in the data's answers
TEMPLATES = {
    "chatml": CHATML, "llama3": LLAMA3, "gemma": GEMMA, "mistral": MISTRAL, "phi3": PHI3, "vicuna": VICUNA,
    "plain": None, "think_off": THINK_OFF, "think_shown": THINK_SHOWN, "think_on": THINK_ON,
    "drops_reasoning": DROPS_REASONING,
}  # fmt: skip


def wrap(backend: Tokenizer, template: str | None) -> PreTrainedTokenizerFast:
    backend.add_special_tokens([AddedToken(name, special=True, rstrip=name in SWALLOW) for name in SPECIALS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = template
    return tokenizer


def byte_bpe(template: str | None) -> PreTrainedTokenizerFast:
    """GPT-2's kind: merges inside a run of spaces or newlines, looks one character ahead."""
    merges = [("h", "i"), ("y", "o"), ("Ġ", "yo"), ("Ċ", "Ċ"), ("ĊĊ", "ĊĊ"), ("Ġ", "Ġ"), ("Ġ", "hi"), (":", "Ġ")]
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet()) + [a + b for a, b in merges]
    backend = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return wrap(backend, template)


def metaspace(template: str | None, scheme: str = "first") -> PreTrainedTokenizerFast:
    """SentencePiece's kind: no pre-tokenisation, a space in front, bytes for unknown characters."""
    merges = [("h", "i"), ("y", "o"), ("▁", "yo"), ("▁", "hi"), ("▁", "▁")]
    chars = [chr(i) for i in range(33, 127)] + ["▁", "\n"]
    tokens = [f"<0x{i:02X}>" for i in range(256)] + chars + [a + b for a, b in merges]
    vocab = {t: i for i, t in enumerate(["<unk>", *tokens])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return wrap(backend, template)


def words(template: str | None) -> PreTrainedTokenizerFast:
    """A token per word, newline or other character: short enough to list positions by hand."""
    vocab = ["<unk>", "\n", "user", "assistant", "hi", "yo", "more", "done", "<think>", "</think>", "r"]
    backend = Tokenizer(models.WordLevel({t: i for i, t in enumerate(vocab)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n|</?\w+>|\w+|."), "isolated")
    return wrap(backend, template)


def metaspace_always(template: str | None) -> PreTrainedTokenizerFast:
    """Llama 2's kind: a space in front of every stretch between special tokens."""
    return metaspace(template, "always")


TOKENIZERS = {kind.__name__: kind for kind in (byte_bpe, metaspace, metaspace_always, words)}


def turns(*contents: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


def supervised(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, str]]) -> list[str]:
    """The generated stretches, decoded."""
    rendered = render(tokenizer, messages)
    assert len(rendered.ids) == len(rendered.loss_mask)
    stretches: list[list[int]] = []
    for i, (token, on) in enumerate(zip(rendered.ids, rendered.loss_mask, strict=True)):
        if on and (i == 0 or not rendered.loss_mask[i - 1]):
            stretches.append([])
        if on:
            stretches[-1].append(token)
    return [tokenizer.decode(stretch) for stretch in stretches]


# Masks


def test_the_supervised_positions_of_a_two_turn_conversation_are_those_listed_by_hand() -> None:
    tokenizer = words(CHATML)
    rendered = render(tokenizer, turns("hi", "yo", "more", "yo done"))
    listed = [
        ("<|im_start|>", 0), ("user", 0), ("\n", 0), ("hi", 0), ("<|im_end|>", 0), ("\n", 0),
        ("<|im_start|>", 0), ("assistant", 0), ("\n", 0), ("yo", 1), ("<|im_end|>", 1), ("\n", 0),
        ("<|im_start|>", 0), ("user", 0), ("\n", 0), ("more", 0), ("<|im_end|>", 0), ("\n", 0),
        ("<|im_start|>", 0), ("assistant", 0), ("\n", 0), ("yo", 1), ("<unk>", 1), ("done", 1),
        ("<|im_end|>", 1), ("\n", 0),
    ]  # fmt: skip
    assert tokenizer.convert_ids_to_tokens(rendered.ids) == [token for token, _ in listed]
    assert rendered.loss_mask == [bool(on) for _, on in listed]


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        ("chatml", turns("hi", "yo", "hi", "yo hi"), ["yo<|im_end|>", "yo hi<|im_end|>"]),
        ("llama3", turns("hi", " yo ", "hi", "yo hi"), ["yo<|im_end|>", "yo hi<|im_end|>"]),  # the template trims
        ("gemma", turns("hi", "yo", "hi", "yo hi"), ["yo<|im_end|>", "yo hi<|im_end|>"]),
        ("mistral", turns("hi", "yo", "hi", "yo hi"), [" yo</s>", " yo hi</s>"]),
        ("phi3", turns("hi", "yo", "hi", "yo hi"), ["yo<|end|>", "yo hi<|end|>"]),
        ("vicuna", turns("hi", "yo", "hi", "yo hi"), ["yo", "yo hi"]),
        ("plain", turns("hi", "yo", "hi", "yo hi"), [" yo</s>", " yo hi</s>"]),
        # the scaffold is forced before every answer but shown with the last only: the first was given after other text
        ("think_off", turns("hi", "yo", "hi", "yo hi"), ["yo hi<|im_end|>"]),
        ("think_shown", turns("hi", "yo"), ["yo<|im_end|>"]),
        ("think_on", turns("hi", "yo yo yo yo", "hi", "<think>\nhi</think>yo"), ["hi</think>yo<|im_end|>"]),
        ("chatml", turns("hi", "<think>\n\n</think>yo"), ["<think>\n\n</think>yo<|im_end|>"]),  # the data's
        (
            "drops_reasoning",
            turns("hi", "yo", "hi", "<think>hi</think>yo"),
            ["yo<|im_end|>", "<think>hi</think>yo<|im_end|>"],
        ),
        ("drops_reasoning", turns("hi", "<think>hi</think>yo", "hi", "yo"), ["yo<|im_end|>"]),
        ("chatml", turns("hi", ""), ["<|im_end|>"]),
        ("vicuna", turns("hi", ""), []),
        ("chatml", turns("hi", ">"), ["><|im_end|>"]),
        ("chatml", turns("hi", "yo<|tool|>"), ["yo<|tool|><|im_end|>"]),  # a special token of the answer's own
        ("phi3", turns("hi", "yo<|tool|>"), ["yo<|tool|><|end|>"]),
        ("chatml", turns("hi", "yo<|im_end|>hi"), ["yo<|im_end|>"]),  # there the target would have stopped
        ("vicuna", turns("hi", "yo<|tool|>"), ["yo<|tool|>"]),
        ("chatml", turns("hi", "yo \n"), ["yo \n<|im_end|>"]),
    ],
)
def test_what_is_supervised_is_what_the_target_writes(template, messages, expected) -> None:
    assert supervised(byte_bpe(TEMPLATES[template]), messages) == expected


# Ids


@pytest.mark.parametrize("template", [name for name in TEMPLATES if name != "think_on"])
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_ids_before_a_supervised_answer_are_prompt_ids_and_the_text_survives(kind, template) -> None:
    tokenizer = TOKENIZERS[kind](TEMPLATES[template])
    rng = random.Random(f"{kind} {template}")
    bits = ["hi", "yo", " ", "\n", "\n\n", ":", "!!", "é", "😀", "日本", "<think>", "<|tool|>", "<|im_end|>", "\u2028"]
    for _ in range(100):
        number = rng.choice((2, 4, 6))
        messages = turns(*("".join(rng.choices(bits, k=rng.randrange(6))) for _ in range(number)))
        rendered = render(tokenizer, messages)
        mask = rendered.loss_mask
        prompts = {tuple(prompt_ids(tokenizer, messages[:i])) for i in range(1, number, 2)}
        starts = [i for i in range(1, len(mask)) if mask[i] and not mask[i - 1]]
        if template == "think_shown":  # what is shown but not forced lies between the prompt and the answer
            starts = [len(prompt_ids(tokenizer, messages[:-1]))]
        assert all(tuple(rendered.ids[:start]) in prompts for start in starts)
        if template not in ("plain", "phi3") and kind in ("byte_bpe", "metaspace"):  # the others lose or add spaces
            text = tokenizer.apply_chat_template(messages, tokenize=False)
            assert tokenizer.decode(rendered.ids).removeprefix(" ") == text.removeprefix(" ")


@pytest.mark.parametrize(
    ("kind", "template"),
    [
        (kind, template)
        for kind in TOKENIZERS
        for template in ("chatml", "gemma", "mistral", "phi3", "vicuna", "drops_reasoning", "llama3", "think_off")
        # GPT-2's pattern looks ahead: two newlines are two tokens before a letter, but one at the end of a prompt
        if kind != "byte_bpe" or template not in ("llama3", "think_off")
    ],
)
def test_without_a_merge_over_the_boundary_ids_are_those_of_one_tokenizer_call(kind, template) -> None:
    tokenizer = TOKENIZERS[kind](TEMPLATES[template])
    messages = turns("hi  yo", "(yo)\n\nhi 😀", "\n", "(hi)")
    given = tokenizer.apply_chat_template(messages[:3], add_generation_prompt=True)["input_ids"]
    assert prompt_ids(tokenizer, messages[:3]) == given
    assert render(tokenizer, messages).ids == tokenizer.apply_chat_template(messages)["input_ids"]


@pytest.mark.parametrize(
    ("tokenizer", "answer", "first"),
    [
        (byte_bpe(CHATML), "\n", "Ċ"),  # one call: ĊĊ
        (byte_bpe(LLAMA3), "yo", "yo"),  # one call: Ċ Ċ, the prompt alone: ĊĊ
        (byte_bpe(VICUNA), "yo", "yo"),  # one call: Ġyo behind ":"
        (metaspace(VICUNA), "yo", "yo"),  # one call: ▁yo; alone, as a text: ▁yo
        (metaspace_always(VICUNA), "yo", "yo"),
    ],
    ids=["newlines", "look-ahead", "space", "SentencePiece", "SentencePiece legacy"],
)
def test_a_merge_over_the_boundary_is_undone(tokenizer, answer, first) -> None:
    messages = turns("hi", answer, "hi", answer)
    whole = tokenizer.apply_chat_template(messages)["input_ids"]
    rendered = render(tokenizer, messages)
    prompt = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True)["input_ids"]
    assert rendered.ids[: len(prompt)] == prompt != whole[: len(prompt)]
    assert rendered.loss_mask[: len(prompt)] == [False] * len(prompt)
    assert tokenizer.convert_ids_to_tokens(rendered.ids[len(prompt)]) == first and rendered.loss_mask[len(prompt)]
    prompt = prompt_ids(tokenizer, messages[:3])
    assert rendered.ids[: len(prompt)] == prompt
    assert tokenizer.convert_ids_to_tokens(rendered.ids[len(prompt)]) == first


@pytest.mark.parametrize(("template", "count"), [("llama3", 1), ("gemma", 1), ("chatml", 0), ("plain", 1)])
def test_a_bos_comes_from_the_template_only_and_the_fallback_keeps_the_tokenizers_habit(template, count) -> None:
    tokenizer = byte_bpe(TEMPLATES[template])
    add_bos = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)])
    tokenizer.backend_tokenizer.post_processor = add_bos
    assert tokenizer("hi")["input_ids"][0] == tokenizer.bos_token_id
    for ids in (prompt_ids(tokenizer, turns("hi")), render(tokenizer, turns("hi", "yo")).ids):
        assert ids.count(tokenizer.bos_token_id) == count
        assert count == 0 or ids[0] == tokenizer.bos_token_id


def test_a_tokenizer_without_a_template_gets_the_plain_format() -> None:
    tokenizer = byte_bpe(None)
    messages = [{"role": "system", "content": "yo"}, *turns("hi", "yo", "hi")]
    expected = "System: yo\n\nUser: hi\n\nAssistant: yo</s>\n\nUser: hi\n\nAssistant:"
    assert tokenizer.decode(prompt_ids(tokenizer, messages)) == expected


def test_turns_after_the_last_answer_are_left_out() -> None:
    tokenizer = byte_bpe(DROPS_REASONING)
    messages = turns("hi", "<think>hi</think>yo")
    assert render(tokenizer, [*messages, *turns("yo")]) == render(tokenizer, messages)


def test_a_tool_turn_is_read_not_written() -> None:
    messages = [*turns("hi", "yo"), {"role": "tool", "content": "hi"}, {"role": "assistant", "content": "yo yo"}]
    assert supervised(byte_bpe(CHATML), messages) == ["yo<|im_end|>", "yo yo<|im_end|>"]


def test_a_very_long_answer_is_supervised_whole_and_without_a_warning(caplog) -> None:
    tokenizer = words(CHATML)
    tokenizer.model_max_length = 100
    assert sum(render(tokenizer, turns("hi", "yo" + " " * 200_000)).loss_mask) == 1 + 200_000 + 1
    assert not caplog.records


def test_the_tokenised_text_grows_with_the_number_of_turns_not_with_its_square(monkeypatch) -> None:
    encode, seen = conversations._encode, []
    monkeypatch.setattr(
        conversations, "_encode", lambda tokenizer, texts: seen.extend(texts) or encode(tokenizer, texts)
    )
    lengths = []
    for number in (10, 100):
        seen.clear()
        render(byte_bpe(CHATML), turns(*["hi yo"] * number))
        lengths.append(sum(map(len, seen)))
    assert lengths[1] < 11 * lengths[0]


# What cannot be rendered


@pytest.mark.parametrize(
    ("template", "messages", "error"),
    [
        ("chatml", turns("hi"), "a.jsonl:3: no assistant turn, so nothing to learn; allowed: at least one"),
        (
            "chatml",
            turns("hi", "yo")[1:],
            "a.jsonl:3: turn 1, an assistant turn, answers nothing; allowed: after a user or tool turn",
        ),
        (
            "gemma",
            [{"role": "system", "content": ""}, *turns("hi", "yo")],
            'a.jsonl:3: the chat template refuses the turns ["system", "user", "assistant"]: System role not supported',
        ),
        (
            "gemma",
            [*turns("hi"), *turns("hi", "yo")],
            'a.jsonl:3: the chat template refuses the turns ["user", "user", "assistant"]: Roles must alternate',
        ),
        (
            "think_on",
            turns("hi", "yo"),
            "a.jsonl:3: the chat template asks for the answer with '<think>\\n' but shows the answer with "
            "'yo<|im_end|>\\n' there; allowed: a template that shows an answer behind its generation prompt",
        ),
    ],
)
def test_what_cannot_be_rendered_is_refused_by_name(template, messages, error) -> None:
    tokenizer = byte_bpe(TEMPLATES[template])
    with pytest.raises(ValueError, match=f"^{re.escape(error)}") as caught:
        render(tokenizer, messages, where="a.jsonl:3")
    assert "\n" not in str(caught.value)


def test_a_prompt_is_cut_off_before_the_final_answer_and_must_ask_for_one() -> None:
    messages = turns("hi", "yo", "hi", "yo")
    assert prompt_messages(messages) == tuple(messages[:3]) == prompt_messages(messages[:3])
    with pytest.raises(ValueError, match="the prompt ends with an assistant turn"):
        prompt_ids(byte_bpe(CHATML), messages)
    with pytest.raises(ValueError, match="prompt: turn 1, an assistant turn, answers nothing"):
        prompt_ids(byte_bpe(CHATML), messages[1:3])
    for roles in ([], ["assistant"], ["system"]):
        error = re.escape(
            f"nothing to answer in the turns {json.dumps(roles)}; allowed: a user or tool turn at the end"
        )
        with pytest.raises(ValueError, match=error):
            prompt_messages([{"role": role, "content": ""} for role in roles])


# Reading


def write(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    return path


def test_both_shapes_are_read_into_the_same_turns(tmp_path) -> None:
    contents = ["hé 😀", "", "x" * 1_000_000, "yo\u2028yo\r\n"]
    sharegpt = [{"from": ("human", "gpt")[i % 2], "value": text} for i, text in enumerate(contents)]
    path = write(
        tmp_path / "a.jsonl",
        {"messages": turns(*contents), "source": "left alone"},
        {"id": 7, "conversations": sharegpt, "category": "writing"},
    )
    assert read_conversations(path) == [
        Conversation("line-1", tuple(turns(*contents))),
        Conversation("7", tuple(turns(*contents)), "writing"),
    ]


def test_every_role_name_is_mapped(tmp_path) -> None:
    names = "system human user tool function observation gpt user chatgpt user bing user bard user assistant user model"
    path = write(tmp_path / "a.jsonl", {"conversations": [{"from": name, "value": ""} for name in names.split()]})
    roles = [message["role"] for message in read_conversations(path)[0].messages]
    assert roles == ["system", "user", "user", "tool", "tool", "tool"] + ["assistant", "user"] * 5 + ["assistant"]


def test_bom_crlf_blank_lines_and_a_missing_last_newline_are_taken(tmp_path) -> None:
    path, line = tmp_path / "a.jsonl", json.dumps({"messages": turns("hi")}).encode()
    path.write_bytes(b"\xef\xbb\xbf" + line + b"\r\n\r\n  \n" + line)
    assert [conversation.id for conversation in read_conversations(path)] == ["line-1", "line-4"]


ROLE_NAMES = "user, human, assistant, gpt, chatgpt, bing, bard, model, tool, function, observation, system"
SHAPES = re.escape('allowed: {"messages": [{"role": ..., "content": ...}, ...]} or ShareGPT {"conversations": ')


def one(**turn: object) -> dict[str, object]:
    return {"messages": [turn]}


@pytest.mark.parametrize(
    ("record", "error"),
    [
        ('{"messages": [', rf"broken JSON \(Expecting value, column 15\); {SHAPES}"),
        ("[" * 100_000, r"broken JSON \(.*recursion.*\); allowed"),
        ("9" * 5_000, r"broken JSON \(Exceeds the limit.*\); allowed"),
        ("[]", rf"no turns in \[\]; {SHAPES}"),
        ({"prompt": "hi"}, rf'no turns in {{"prompt": "hi"}}; {SHAPES}'),
        ({"messages": [], "conversations": []}, f"two lists of turns in .*; {SHAPES}"),
        ({"messages": []}, r"'messages' is \[\]; allowed: a list of at least one turn"),
        ({"conversations": "hi"}, "'conversations' is \"hi\"; allowed: a list of at least one turn"),
        ({"messages": ["hi"]}, 'turn 1 is "hi"; allowed: an object with role and content, or with from and value'),
        (one(role="user", value="hi"), "turn 1 is {.*}; allowed: an object with role and content, or"),
        (
            one(role="asistant", content=""),
            rf"turn 1 has the unknown role .*, did you mean 'assistant'\?; allowed: {ROLE_NAMES}",
        ),
        (one(role="xyz", content=""), f'turn 1 has the unknown role "xyz"; allowed: {ROLE_NAMES}'),
        (one(role=None, content=""), f"turn 1 has the unknown role null; allowed: {ROLE_NAMES}"),
        (one(role="user", content=None), "turn 1 has the content null; allowed: a string"),
        (one(role="user", content=[{"type": "text"}]), r'turn 1 has the content \[{"type": "text"}\]; allowed: a str'),
        (one(**{"from": "human", "value": 3}), "turn 1 has the value 3; allowed: a string"),
        (one(role="user", content=["x" * 1_000]), r'turn 1 has the content \["xxx.* \.\.\.; allowed: a string'),
        (one(role="user", content="\ud83d"), r"turn 1 holds half a surrogate pair, \\ud83d; allowed: whole characters"),
        (one(role="user", content="", tool_calls=[{}]), "turn 1: 'tool_calls' would be lost; allowed: its text inside"),
        ({**one(role="user", content=""), "tools": [{}]}, "'tools' would be lost; allowed: its text inside"),
        ({**one(role="user", content=""), "id": 1.5}, "'id' is 1.5; allowed: a string or a whole number"),
        ({**one(role="user", content=""), "category": 1}, "'category' is 1; allowed: a string"),
        ({**one(role="user", content=""), "id": "line-1"}, "id 'line-1' is already that of line 1; allowed: a diff"),
        ({"messages": turns("hi", "yo")[1:]}, "turn 1, an assistant turn, answers nothing; allowed: after a user"),
        (
            {"messages": [*turns("hi", "yo"), turns("", "yo")[1]]},
            "turn 3, an assistant turn, answers nothing; allowed: after",
        ),
    ],
)
def test_a_broken_record_is_named_with_file_and_line_and_what_is_allowed(tmp_path, record, error) -> None:
    path = tmp_path / "a.jsonl"
    line = record if isinstance(record, str) else json.dumps(record)
    path.write_text(json.dumps({"messages": turns("hi")}) + "\n\n" + line)
    with pytest.raises(ValueError, match=rf"^{re.escape(str(path))}:3: {error}") as caught:
        read_conversations(path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


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
def test_a_file_that_cannot_be_read_is_named(tmp_path, content, error) -> None:
    path = tmp_path / "a.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))}{error}"):
        read_conversations(path)
