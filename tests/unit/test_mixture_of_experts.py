"""A mixture-of-experts target: routing works per token, so drafts and neighbours must not change it."""

from types import SimpleNamespace

import pytest
import torch

from draftsmith.drafters.tree import Dynamic, Fixed, Plan, chain
from draftsmith.inference.decode import generate
from draftsmith.inference.sampling import Sampler
from draftsmith.inference.speculation import Speculation

PROMPTS = [[5, 6, 7, 8], [9], [10, 11, 12, 13, 14, 15, 16]]


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
@pytest.mark.parametrize("plan", [chain(3), Fixed((-1, -1, 0, 0, 1)), Dynamic(6, 3, 2)], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_mixture_of_experts_gives_the_tokens_of_plain_decoding(
    toy: SimpleNamespace, family: str, plan: Plan, temperature: float
) -> None:
    experts = {"num_local_experts": 4} if family == "mixtral" else {"num_experts": 4, "moe_intermediate_size": 32}
    target = toy.make_target(family, torch.float32, num_experts_per_tok=2, **experts)  # their kernels lack fp64
    sampler = Sampler(temperature)
    plain = generate(target, PROMPTS, max_new=12, sampler=sampler, stop_at_eos=False)
    drafter = toy.make_drafter("eagle3", target)
    outputs = generate(
        target, PROMPTS, max_new=12, sampler=sampler, speculation=Speculation(drafter, plan), stop_at_eos=False
    )
    assert [output.ids for output in outputs] == [output.ids for output in plain]
    alone = generate(target, PROMPTS[2:], max_new=12, sampler=sampler, seeds=[2], stop_at_eos=False)
    assert alone[0].ids == plain[2].ids
