"""A compiled target decodes the same tokens. Dynamo's "eager" backend traces and guards like the others, without a compiler."""

from types import SimpleNamespace

import pytest
import torch

from draftsmith.drafters.tree import Plan, branching, chain
from draftsmith.inference.decode import generate
from draftsmith.inference.sampling import Sampler
from draftsmith.inference.speculation import Speculation

PROMPTS = [[5, 6, 7, 8], [9], [10, 11, 12, 13, 14, 15]]


@pytest.mark.parametrize("plan", [chain(3), branching([2, 2])], ids=["chain", "tree"])
def test_decoding_with_a_compiled_target_is_the_same(toy: SimpleNamespace, plan: Plan) -> None:
    torch.compiler.reset()
    results = []
    for compiled in (False, True):
        target = toy.make_target("llama", num_hidden_layers=3)
        drafter = toy.make_drafter("eagle3", target, layers=[1, 3])
        if compiled:
            target.compile(drafter.feature_layers, backend="eager")
        for speculation in (None, Speculation(drafter, plan)):
            outputs = generate(target, PROMPTS, max_new=12, sampler=Sampler(0.8), speculation=speculation)
            results.append([output.ids for output in outputs])
    assert results[0] == results[1] == results[2] == results[3]


def test_compiling_twice_is_refused(toy: SimpleNamespace) -> None:
    target = toy.make_target("llama")
    target.compile(backend="eager")
    with pytest.raises(ValueError, match="compiled already"):
        target.compile(backend="eager")
