"""Reasoning is told from the answer by the tags of the target's own template."""

from types import SimpleNamespace

import pytest

from draftsmith.train.reasoning import Spoken, split, spoken


@pytest.mark.parametrize(
    "text, opened, expected",
    [
        ("plain", False, Spoken("plain")),
        ("<think>\nwhy\n</think>\n\nyes\n", False, Spoken("yes\n", "why")),
        ("why\n</think>\n\nyes", True, Spoken("yes", "why")),  # DeepSeek-R1's prompt opens the tag
        ("<think>\n\n</think>\n\nyes", False, Spoken("yes")),  # Qwen3 with /no_think
        ("<think>\nstill at it", False, Spoken("", "<think>\nstill at it", ended=False)),
        ("still at it", True, Spoken("", "still at it", ended=False)),
        ("<think>a</think>b</think>c", False, Spoken("b</think>c", "a")),
    ],
)
def test_think_tags(text: str, opened: bool, expected: Spoken) -> None:
    assert split(text, opened=opened) == expected


@pytest.mark.parametrize(
    "text, expected",
    [
        (
            "<|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>final<|message|>yes",
            Spoken("yes", "why"),
        ),
        ("<|channel|>final<|message|>yes", Spoken("yes")),
        ("<|channel|>analysis<|message|>wh", Spoken("", "<|channel|>analysis<|message|>wh", ended=False)),
    ],
)
def test_channels(text: str, expected: Spoken) -> None:
    assert split(text, "<|channel|>") == expected


def test_only_a_template_that_knows_the_tags_has_them_taken_out(toy: SimpleNamespace) -> None:
    tokenizer = toy.make_tokenizer()
    ids = tokenizer("<think>why</think>yes", add_special_tokens=False)["input_ids"]
    assert spoken(tokenizer, [], ids) == Spoken("<think>why</think>yes")
    tokenizer.chat_template += "{# <think> #}"
    assert spoken(tokenizer, [], ids) == Spoken("yes", "why")
    opening = tokenizer("<|im_start|>assistant\n<think>\n", add_special_tokens=False)["input_ids"]
    assert spoken(tokenizer, opening, ids[-3:]) == Spoken("", tokenizer.decode(ids[-3:]), ended=False)


def test_tags_that_a_tokenizer_calls_special_are_seen(toy: SimpleNamespace) -> None:
    tokenizer = toy.make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["[THINK]", "[/THINK]"]})
    tokenizer.chat_template += "{# [THINK] #}"
    ids = tokenizer("[THINK]why[/THINK]yes<|im_end|>", add_special_tokens=False)["input_ids"]
    assert spoken(tokenizer, [], ids) == Spoken("yes", "why")
