"""The target's features and logits against transformers' own `output_hidden_states`, for every family."""

from types import SimpleNamespace

import pytest
import torch

IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16], [30, 3, 31, 4, 32, 5, 33, 6, 34, 7, 35, 8]])


@pytest.fixture
def reference(toy: SimpleNamespace, family: str) -> tuple[SimpleNamespace, SimpleNamespace]:
    """A target, and what transformers says about the same model; its hidden_states[-1] is the state after the norm."""
    target = toy.make_target(family)
    with torch.no_grad():
        out = target.model(IDS, output_hidden_states=True, use_cache=False)
    return target, out


def test_the_feature_of_layer_i_is_the_stream_that_enters_it(
    reference: tuple[SimpleNamespace, SimpleNamespace],
) -> None:
    target, out = reference
    for layer in range(4):
        features, _ = target.hidden(IDS, (layer,))
        torch.testing.assert_close(features, out.hidden_states[layer], atol=1e-12, rtol=0)
    assert len({float(state.sum()) for state in out.hidden_states}) == 5  # five different things were compared


def test_last_is_the_state_after_the_final_norm(reference: tuple[SimpleNamespace, SimpleNamespace]) -> None:
    target, out = reference
    features, last = target.hidden(IDS, ("last",))
    torch.testing.assert_close(last, out.hidden_states[-1], atol=1e-12, rtol=0)
    assert torch.equal(features, last)


def test_the_number_of_layers_names_the_stream_before_the_final_norm(
    reference: tuple[SimpleNamespace, SimpleNamespace],
) -> None:
    target, out = reference
    before_norm, last = target.hidden(IDS, (4,))
    norm = target.body.ln_f if hasattr(target.body, "ln_f") else target.body.norm
    torch.testing.assert_close(norm(before_norm), last, atol=1e-12, rtol=0)
    assert float((before_norm - last).abs().max()) > 0.1


def test_several_features_stand_side_by_side_in_the_asked_order(
    reference: tuple[SimpleNamespace, SimpleNamespace],
) -> None:
    target, out = reference
    features, _ = target.hidden(IDS, (3, "last", 1))
    expected = torch.cat([out.hidden_states[i] for i in (3, -1, 1)], dim=-1)
    torch.testing.assert_close(features, expected, atol=1e-12, rtol=0)


def test_forward_gives_the_model_s_logits_and_the_same_features(
    reference: tuple[SimpleNamespace, SimpleNamespace],
) -> None:
    """Ours goes through the cache and a mask of our own; twelve tokens are more than the sliding window."""
    target, out = reference
    ours = target.forward(IDS, target.new_cache(2, 12), (2, "last"))
    atol = 1e-5 if target.config.model_type == "gemma2" else 1e-10  # its eager softmax is in fp32
    torch.testing.assert_close(ours.logits, out.logits, atol=atol, rtol=0)
    torch.testing.assert_close(ours.features, torch.cat([out.hidden_states[i] for i in (2, -1)], -1), atol=atol, rtol=0)


def test_unembed_of_the_last_state_gives_the_model_s_logits(
    reference: tuple[SimpleNamespace, SimpleNamespace],
) -> None:
    """Gemma 2's soft-capping included: the toy's head alone would be off by more than one."""
    target, out = reference
    torch.testing.assert_close(target.unembed(out.hidden_states[-1]), out.logits, atol=1e-12, rtol=0)
    if target.config.model_type == "gemma2":
        plain = out.hidden_states[-1] @ target.head_weight().T
        assert float((plain - out.logits).abs().max()) > 1


def test_embed_gives_the_rows_of_the_input_embedding(reference: tuple[SimpleNamespace, SimpleNamespace]) -> None:
    target, _ = reference
    assert torch.equal(target.embed(IDS), target.model.get_input_embeddings().weight[IDS])
