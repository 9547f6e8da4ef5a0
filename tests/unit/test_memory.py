"""Memory by shape, against tensors that really exist."""

from types import SimpleNamespace

import torch

from draftsmith.drafters.language_model import DraftLM
from draftsmith.drafters.ngram import NGram
from draftsmith.drafters.tree import branching, chain
from draftsmith.inference.memory import footprint


def test_bytes_per_token_are_those_of_the_caches(toy: SimpleNamespace) -> None:
    target = toy.make_target("qwen3", torch.float32)
    cache = target.new_cache(1, 10)
    target.forward(torch.tensor([[1, 2, 3]]), cache)
    kept = sum(b.keys_BHSE.nbytes + b.values_BHSE.nbytes for b in cache._layers.values())
    assert target.bytes_per_token == kept / 10
    drafter = toy.make_drafter("eagle3", target)
    state = drafter.init(1, 10)
    assert drafter.bytes_per_token == (state.cache.keys_BHSE.nbytes + state.cache.values_BHSE.nbytes) / 10
    assert DraftLM(target).bytes_per_token == target.bytes_per_token


def test_a_verify_pass_is_priced_by_its_rows(toy: SimpleNamespace) -> None:
    target = toy.make_target("llama", torch.float32)
    drafter = toy.make_drafter("eagle3", target)
    plan, cache = branching([2, 2]), target.new_cache(3, 10)
    out = target.forward(torch.ones(3, plan.nodes + 1, dtype=torch.int64), cache, drafter.feature_layers)
    sizes = footprint(target, drafter, plan, 3)
    assert sizes["verify_logits"] == out.logits.nbytes
    assert sizes["captured_features"] == out.features.nbytes
    assert sizes["drafter_weights"] == sum(p.nbytes for p in drafter.parameters())


def test_no_weights_and_no_features_cost_nothing(toy: SimpleNamespace) -> None:
    sizes = footprint(toy.make_target("llama"), NGram(), chain(3), 1)
    assert sizes["drafter_weights"] == sizes["draft_state_per_token"] == sizes["captured_features"] == 0
    assert sizes["scratch_state"] > 0
