"""A real chat model, SmolLM2-135M-Instruct, in fp32: tokens against transformers, prompts against its own chat template."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from draftsmith import drafters
from draftsmith.drafters.tree import chain
from draftsmith.inference.conversations import read_conversations
from draftsmith.inference.decode import generate
from draftsmith.inference.load_target import load
from draftsmith.inference.output import Output
from draftsmith.inference.records import Conversation
from draftsmith.inference.rendering import prompt_ids, render, render_all
from draftsmith.inference.sampling import Sampler
from draftsmith.inference.speculation import Speculation
from draftsmith.inference.target import Target

pytestmark = pytest.mark.model

MESSAGES = [
    [{"role": "user", "content": "Name three fruits."}],
    [{"role": "user", "content": "Write a Python function that adds two numbers, and explain it in one sentence."}],
    [
        {"role": "system", "content": "You answer in French."},
        {"role": "user", "content": "Hi!"},
        {"role": "assistant", "content": "Bonjour !"},
        {"role": "user", "content": "What is the capital of Italy?"},
    ],
]
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def target(smollm2: Path) -> Target:
    return load(smollm2, dtype=torch.float32)


@pytest.mark.parametrize("quantisation, same, size", [("8bit", 0.8, 0.3), ("4bit", 0.5, 0.15)])
def test_a_quantised_target_mostly_chooses_what_it_chose_before_in_less_memory(
    quantisation: Any, same: float, size: float, smollm2: Path, target: Target, prompts: list[list[int]]
) -> None:
    """Measured on its own conversations: 89 % and 67 %."""
    pytest.importorskip("bitsandbytes")
    try:
        ours = load(smollm2, dtype=torch.float32, quantisation=quantisation)
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"bitsandbytes: {error}")
    assert ours.shape == target.shape  # fingerprint and all
    choices = [
        torch.cat([t.unembed(t.hidden(torch.tensor([ids]))[1])[0].argmax(1) for ids in prompts]) for t in (target, ours)
    ]
    assert same < float((choices[0] == choices[1]).float().mean()) < 1
    whole, packed = (sum(p.nbytes for p in t.layers.parameters()) for t in (target, ours))
    assert packed < size * whole


@pytest.fixture(scope="module")
def prompts(target: Target) -> list[list[int]]:
    return [prompt_ids(target.tokenizer, messages) for messages in MESSAGES]


@pytest.fixture(scope="module")
def plain(target: Target, prompts: list[list[int]]) -> dict[float, list[Output]]:
    """Plain decoding as one batch, per temperature, computed once."""
    return {temperature: decode(target, prompts, temperature, None) for temperature in (0.0, 1.0)}


def decode(
    target: Target, prompts: list[list[int]], temperature: float, drafter: Any, num_tokens: int = NUM_TOKENS
) -> list[Output]:
    return generate(
        target,
        prompts,
        max_new=num_tokens,
        sampler=Sampler(temperature),
        speculation=Speculation(drafter, chain(2)) if drafter else None,
        seeds=[11, 12, 13][: len(prompts)],
    )


def test_prompt_ids_equal_the_chat_template_s(target: Target, prompts: list[list[int]]) -> None:
    for messages, ids in zip(MESSAGES, prompts, strict=True):
        expected = target.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert ids == expected


def test_a_rendered_conversation_equals_the_chat_template_s_up_to_the_end_of_the_answer(target: Target) -> None:
    """The template writes a newline behind the end of turn, which the target never generates."""
    tokenizer = target.tokenizer
    messages = [*MESSAGES[2], {"role": "assistant", "content": "Rome est la capitale de l'Italie."}]
    (rendered,) = render(tokenizer, Conversation("c", tuple(messages)))
    expected = tokenizer.apply_chat_template(messages, return_dict=False)
    assert rendered.ids == expected[: len(rendered.ids)]
    assert tokenizer.decode(expected[len(rendered.ids) :]).strip() == ""
    supervised = [i for i, keep in zip(rendered.ids, rendered.loss_mask, strict=True) if keep]
    assert tokenizer.decode(supervised) == "Bonjour !<|im_end|>Rome est la capitale de l'Italie.<|im_end|>"


def test_bundled_conversations_become_the_chat_template_s_ids_and_only_what_the_target_wrote_is_supervised(
    target: Target,
) -> None:
    tokenizer = target.tokenizer
    conversations = read_conversations("configs/answers/smollm2_greedy.jsonl")[:200]
    for conversation, rows in zip(conversations, render_all(tokenizer, conversations), strict=True):
        assert rows == render(tokenizer, conversation)
        (row,) = rows
        ids = tokenizer.apply_chat_template(list(conversation.messages), return_dict=False)
        assert row.ids == ids[: len(row.ids)] and tokenizer.decode(ids[len(row.ids) :]) in ("", "<|im_end|>\n")
        answers = [m["content"] for m in conversation.messages if m["role"] == "assistant"]
        written = tokenizer.decode([i for i, keep in zip(row.ids, row.loss_mask, strict=True) if keep])
        assert written == "<|im_end|>".join(answers) + "<|im_end|>" * (not conversation.truncated)


def test_greedy_decoding_equals_generate(
    target: Target, prompts: list[list[int]], plain: dict[float, list[Output]]
) -> None:
    settings = GenerationConfig(
        max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=list(target.eos_ids), pad_token_id=0
    )
    for prompt, output in zip(prompts, plain[0.0], strict=True):
        ids = torch.tensor([prompt])
        out = target.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
        assert output.ids == out[0, len(prompt) :].tolist()
    assert any(len(output.ids) == NUM_TOKENS for output in plain[0.0])


@pytest.mark.parametrize("kind", drafters.kinds())
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_untrained_drafter_changes_no_token(
    toy: SimpleNamespace,
    target: Target,
    prompts: list[list[int]],
    plain: dict[float, list[Output]],
    kind: str,
    temperature: float,
) -> None:
    """The same seeds, in a batch of three and for one prompt alone."""
    torch.manual_seed(0)
    drafter = drafters.build(kind, {"draft_vocab_size": 4096}, target.shape).eval()
    drafter.initialise(target, torch.ones(target.shape.vocab_size, dtype=torch.int64))
    expected = [output.ids for output in plain[temperature]]
    assert [output.ids for output in decode(target, prompts, temperature, drafter)] == expected
    (alone,) = decode(target, prompts[:1], temperature, drafter, num_tokens=8)
    assert alone.ids == expected[0][:8]
