"""Masking conversations. Toy tokenizers and templates, each with one habit of a real model family (`test_templates` has real ones).

Expected values: positions listed by hand, or transformers' own one-call rendering with the prompt.
"""

import dataclasses
import json
import random
import re
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from draftsmith.inference import rows as rows_module
from draftsmith.inference.records import Conversation, prompt_messages
from draftsmith.inference.rendering import Rendered, prompt_ids, render, render_all
from draftsmith.inference.turns import BadRecord

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


def turns(*contents: str) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


def talk(*contents: str, **fields: Any) -> Conversation:
    return Conversation("c", tuple(turns(*contents)), **fields)


def stretches(tokenizer: PreTrainedTokenizerFast, rendered: Rendered) -> list[str]:
    """What the target generated, decoded; neighbours joined."""
    assert len(rendered.ids) == len(rendered.loss_mask)
    found: list[list[int]] = []
    for i, (token, on) in enumerate(zip(rendered.ids, rendered.loss_mask, strict=True)):
        if on and (i == 0 or not rendered.loss_mask[i - 1]):
            found.append([])
        if on:
            found[-1].append(token)
    return [tokenizer.decode(stretch) for stretch in found]


# Masks


def test_the_supervised_positions_of_a_two_turn_conversation_are_those_listed_by_hand() -> None:
    tokenizer = words(CHATML)
    (rendered,) = render(tokenizer, talk("hi", "yo", "more", "yo done"))
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
        ("chatml", turns("hi", "yo", "hi", "yo hi"), [["yo<|im_end|>", "yo hi<|im_end|>"]]),
        ("llama3", turns("hi", " yo ", "hi", "yo hi"), [["yo<|im_end|>", "yo hi<|im_end|>"]]),  # the template trims
        ("gemma", turns("hi", "yo", "hi", "yo hi"), [["yo<|im_end|>", "yo hi<|im_end|>"]]),
        ("mistral", turns("hi", "yo", "hi", "yo hi"), [[" yo</s>", " yo hi</s>"]]),
        ("phi3", turns("hi", "yo", "hi", "yo hi"), [["yo<|end|>", "yo hi<|end|>"]]),
        ("vicuna", turns("hi", "yo", "hi", "yo hi"), [["yo", "yo hi"]]),
        ("plain", turns("hi", "yo", "hi", "yo hi"), [[" yo</s>", " yo hi</s>"]]),
        # the scaffold is forced before every answer but shown with the last only: each was given after other text
        ("think_off", turns("hi", "yo", "hi", "yo hi"), [["yo<|im_end|>"], ["yo hi<|im_end|>"]]),
        ("think_shown", turns("hi", "yo"), [["yo<|im_end|>"]]),
        # what the template never shows behind its prompt was not given by this target
        ("think_on", turns("hi", "yo yo yo yo", "hi", "<think>\nhi</think>yo"), [["hi</think>yo<|im_end|>"]]),
        ("chatml", turns("hi", "<think>\n\n</think>yo"), [["<think>\n\n</think>yo<|im_end|>"]]),  # the data's
        (
            "drops_reasoning",
            turns("hi", "yo", "hi", "<think>hi</think>yo"),
            [["yo<|im_end|>", "<think>hi</think>yo<|im_end|>"]],
        ),
        (
            "drops_reasoning",
            turns("hi", "<think>hi</think>yo", "hi", "yo"),
            [["<think>hi</think>yo<|im_end|>"], ["yo<|im_end|>"]],
        ),
        (
            "drops_reasoning",  # the third row begins with the fourth answer's context, the second with none of the others'
            turns("hi", "yo", "hi", "<think>hi</think>yo", "hi", "yo hi", "hi", "<think>yo</think>hi"),
            [
                ["<think>hi</think>yo<|im_end|>"],
                ["yo<|im_end|>", "yo hi<|im_end|>", "<think>yo</think>hi<|im_end|>"],
            ],
        ),
        ("chatml", turns("hi", ""), [["<|im_end|>"]]),
        ("vicuna", turns("hi", ""), [[]]),
        ("chatml", turns("hi", ">"), [["><|im_end|>"]]),
        ("chatml", turns("hi", "yo<|tool|>"), [["yo<|tool|><|im_end|>"]]),  # a special token of the answer's own
        ("phi3", turns("hi", "yo<|tool|>"), [["yo<|tool|><|end|>"]]),
        ("chatml", turns("hi", "yo<|im_end|>hi"), [["yo<|im_end|>"]]),  # there the target would have stopped
        ("vicuna", turns("hi", "yo<|tool|>"), [["yo<|tool|>"]]),
        ("chatml", turns("hi", "yo \n"), [["yo \n<|im_end|>"]]),
    ],
)
def test_what_is_supervised_is_what_the_target_writes(template, messages, expected) -> None:
    tokenizer = byte_bpe(TEMPLATES[template])
    rows = render(tokenizer, Conversation("c", tuple(messages)))
    assert [stretches(tokenizer, row) for row in rows] == expected
    (last,) = render(tokenizer, Conversation("c", tuple(messages)), reasoning="last")
    assert last == rows[-1]
    assert {row.method for row in rows} == {"plain" if template == "plain" else "prefixes"}


def test_a_truncated_answer_has_no_end_of_turn_and_given_ids_are_taken_as_they_are() -> None:
    tokenizer = byte_bpe(CHATML)
    (row,) = render(tokenizer, talk("hi", "yo", "hi", "yo hi", truncated=True))
    assert stretches(tokenizer, row) == ["yo<|im_end|>", "yo hi"] and row.loss_mask[-1]
    (row,) = render(tokenizer, Conversation("c", (), given=((5, 3, 4), (False, True, True))))
    assert row == Rendered([5, 3, 4], [False, True, True], "given")


# Generation tags


def tagged(assistant: str, user: str = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n") -> str:
    return (
        "{% for m in messages %}{% if m.role == 'assistant' %}" + assistant + "{% else %}" + user + "{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


@pytest.mark.parametrize(
    ("template", "method"),
    [
        (
            tagged("<|im_start|>assistant\n{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{{ '\n' }}"),
            "tags",
        ),
        # an end of turn is written by the target all the same, and a newline or a header is not
        (tagged("<|im_start|>assistant\n{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>\n"), "tags"),
        (
            tagged("<|im_start|>assistant\n{% generation %}{{ m.content }}<|im_end|>{{ '\n' }}{% endgeneration %}"),
            "tags",
        ),
        (
            tagged("{% generation %}<|im_start|>assistant\n{{ m.content }}<|im_end|>{{ '\n' }}{% endgeneration %}"),
            "tags",
        ),
        (
            tagged("<|im_start|>assistant\n{{ m.content }}{% generation %}<|im_end|>{% endgeneration %}{{ '\n' }}"),
            "prefixes",
        ),
        (
            tagged(
                "<|im_start|>assistant\n{% generation %}{{ m.content[:5] }}{% endgeneration %}{{ m.content[5:] }}<|im_end|>\n"
            ),
            "prefixes",
        ),
        (
            tagged(
                "<|im_start|>assistant\n{% generation %}{{ m.content }}<|im_end|>{{ '\n' }}{% endgeneration %}",
                "<|im_start|>user\n{% generation %}{{ m.content }}<|im_end|>{{ '\n' }}{% endgeneration %}",
            ),
            "prefixes",
        ),
        ("{% generation %}" + CHATML + "{% endgeneration %}", "prefixes"),
    ],
    ids=["exact", "no end of turn", "newline", "header", "nothing", "a part of the last", "the user too", "everything"],
)
def test_tags_are_believed_where_they_mark_what_the_target_writes_and_the_mask_is_right_anyway(
    template, method
) -> None:
    conversation = talk("hi", "yo hi", "yo", "hi yo yo")
    (row,) = render(byte_bpe(template), conversation)
    (untagged,) = render(byte_bpe(CHATML), conversation)
    assert row == dataclasses.replace(untagged, method=method)


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
        rows = render(tokenizer, Conversation("c", tuple(messages)))
        prompts = {tuple(prompt_ids(tokenizer, messages[:i])) for i in range(1, number, 2)}
        for row in rows:
            mask = row.loss_mask
            starts = [i for i in range(1, len(mask)) if mask[i] and not mask[i - 1]]
            if template == "think_shown":  # what is shown but not forced lies between the prompt and the answer
                starts = [len(prompt_ids(tokenizer, messages[:-1]))] * (row is rows[-1])
            assert all(tuple(row.ids[:start]) in prompts for start in starts)
        if template not in ("plain", "phi3") and kind in ("byte_bpe", "metaspace"):  # the others lose or add spaces
            text = tokenizer.apply_chat_template(messages, tokenize=False)
            assert tokenizer.decode(rows[-1].ids).removeprefix(" ") == text.removeprefix(" ")


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
    assert (
        render(tokenizer, Conversation("c", tuple(messages)))[-1].ids
        == tokenizer.apply_chat_template(messages)["input_ids"]
    )


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
    (rendered,) = render(tokenizer, Conversation("c", tuple(messages)))
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
    for ids in (prompt_ids(tokenizer, turns("hi")), render(tokenizer, talk("hi", "yo"))[0].ids):
        assert ids.count(tokenizer.bos_token_id) == count
        assert count == 0 or ids[0] == tokenizer.bos_token_id


def test_a_tokenizer_without_a_template_gets_the_plain_format() -> None:
    tokenizer = byte_bpe(None)
    messages = [{"role": "system", "content": "yo"}, *turns("hi", "yo", "hi")]
    expected = "System: yo\n\nUser: hi\n\nAssistant: yo</s>\n\nUser: hi\n\nAssistant:"
    assert tokenizer.decode(prompt_ids(tokenizer, messages)) == expected


def test_turns_after_the_last_answer_are_left_out() -> None:
    tokenizer = byte_bpe(DROPS_REASONING)
    contents = ("hi", "<think>hi</think>yo")
    assert render(tokenizer, talk(*contents, "yo")) == render(tokenizer, talk(*contents))


def test_a_tool_turn_is_read_not_written() -> None:
    tokenizer = byte_bpe(CHATML)
    messages = [*turns("hi", "yo"), {"role": "tool", "content": "hi"}, {"role": "assistant", "content": "yo yo"}]
    (row,) = render(tokenizer, Conversation("c", tuple(messages)))
    assert stretches(tokenizer, row) == ["yo<|im_end|>", "yo yo<|im_end|>"]


def test_a_very_long_answer_is_supervised_whole_and_without_a_warning(caplog) -> None:
    tokenizer = words(CHATML)
    tokenizer.model_max_length = 100
    (row,) = render(tokenizer, talk("hi", "yo" + " " * 200_000))
    assert sum(row.loss_mask) == 1 + 200_000 + 1
    assert not caplog.records


@pytest.mark.parametrize("template", ["chatml", "drops_reasoning", "phi3", "vicuna", "plain"])
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_many_conversations_at_once_give_what_each_gives_alone(kind, template) -> None:
    tokenizer = TOKENIZERS[kind](TEMPLATES[template])
    rng = random.Random(0)
    bits = ["hi", "yo", " ", "\n", ":", "é", "<think>", "</think>", "<|im_end|>"]
    conversations = [
        talk(*("".join(rng.choices(bits, k=rng.randrange(6))) for _ in range(rng.randrange(1, 6)))) for _ in range(150)
    ]
    refused = 0
    for conversation, rows in zip(conversations, render_all(tokenizer, conversations), strict=True):
        if isinstance(rows, BadRecord):
            refused += 1
            with pytest.raises(ValueError, match=re.escape(str(rows))):
                render(tokenizer, conversation)
        else:
            assert rows == render(tokenizer, conversation)
    assert 0 < refused < 100


def test_the_tokenised_text_grows_with_the_number_of_turns_not_with_its_square(monkeypatch) -> None:
    encode, seen = rows_module._encode, []
    monkeypatch.setattr(rows_module, "_encode", lambda tokenizer, texts: seen.extend(texts) or encode(tokenizer, texts))
    lengths = []
    for number in (10, 100):
        seen.clear()
        render(byte_bpe(CHATML), talk(*["hi yo"] * number))
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
        render(tokenizer, Conversation("c", tuple(messages)), where="a.jsonl:3")
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


def test_an_answer_that_is_read_only_is_shown_and_not_supervised() -> None:
    tokenizer = byte_bpe(CHATML)
    for learned, expected in (
        ((False, True), [["yo hi<|im_end|>"]]),
        ((True, False), [["yo<|im_end|>"]]),
        ((False, False), []),
    ):
        messages = turns("hi", "yo", "hi", "yo hi")
        messages[1]["supervised"], messages[3]["supervised"] = learned
        for reasoning in ("rows", "last"):
            rows = render(tokenizer, Conversation("c", tuple(messages)), reasoning=reasoning)
            assert [stretches(tokenizer, row) for row in rows] == expected


def test_a_template_that_shows_the_day_gives_the_same_ids_every_day() -> None:
    """Templates ask for the day by `strftime_now`; what they are told does not change."""
    tokenizer = byte_bpe("{{ strftime_now('%Y-%m-%d') }}" + CHATML)
    (row,) = render(tokenizer, Conversation("c", tuple(turns("hi", "yo"))))
    assert tokenizer.decode(row.ids).startswith("2026-01-01<|im_start|>user")
