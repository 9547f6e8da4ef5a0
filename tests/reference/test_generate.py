"""Decoding against transformers' `generate(do_sample=False)`: token for token, for every family and every drafter kind."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from draftsmith import drafters
from draftsmith.drafters.tree import chain
from draftsmith.inference.decode import generate
from draftsmith.inference.sampling import Sampler
from draftsmith.inference.speculation import Speculation

PROMPTS = [[5, 6, 7, 8], [9], [10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20], [21, 22], [30, 31, 32]]


def reference(target: Any, prompt: list[int], num_tokens: int, eos: list[int] | None = None) -> list[int]:
    settings = GenerationConfig(max_new_tokens=num_tokens, do_sample=False, eos_token_id=eos, pad_token_id=0)
    ids = torch.tensor([prompt])
    out = target.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
    answer: list[int] = out[0, len(prompt) :].tolist()
    return answer


def greedy(
    target: Any, prompts: list[list[int]], num_tokens: int, drafter: Any = None, depth: int = 3
) -> list[list[int]]:
    speculation = Speculation(drafter, chain(depth)) if drafter else None
    outputs = generate(
        target, prompts, max_new=num_tokens, sampler=Sampler(), speculation=speculation, stop_at_eos=False
    )
    return [output.ids for output in outputs]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_greedy_tokens_equal_those_of_generate(toy: SimpleNamespace, family: str, dtype: torch.dtype) -> None:
    """Plain and with every drafter kind, in a ragged batch and alone; 20 tokens, beyond the sliding windows."""
    target = toy.make_target(family, dtype)
    target.model.generation_config.eos_token_id = None
    expected = [reference(target, prompt, 20) for prompt in PROMPTS]
    assert all(len(answer) == 20 for answer in expected)
    assert greedy(target, PROMPTS, 20) == expected
    for kind in drafters.kinds():
        drafter = toy.make_drafter(kind, target)
        assert greedy(target, PROMPTS, 20, drafter, depth=4) == expected
        assert greedy(target, PROMPTS[1:2], 20, drafter, depth=2) == expected[1:2]


def test_generation_ends_where_that_of_transformers_ends(toy: SimpleNamespace) -> None:
    """Several end-of-sequence ids, as chat models have; the end itself belongs to the output in both."""
    target = toy.make_target("llama")
    free = [reference(target, prompt, 20) for prompt in PROMPTS]
    ends = [free[0][7], free[2][3]]
    target.eos_ids = tuple(ends)
    drafter = toy.make_drafter("eagle3", target)
    outputs = generate(target, PROMPTS, max_new=20, sampler=Sampler(), speculation=Speculation(drafter, chain(3)))
    expected = [reference(target, prompt, 20, ends) for prompt in PROMPTS]
    assert [output.ids for output in outputs] == expected
    assert len(set(map(len, expected))) > 1
