"""The target adapter at toy size: masks, ragged batches, what it leaves unchanged, and what it refuses."""

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate
import pytest
import torch
import transformers

from draftsmith.drafters import tree
from draftsmith.inference.architecture import fingerprint
from draftsmith.inference.decode import generate
from draftsmith.inference.load_target import load
from draftsmith.inference.placement import refuse_offloaded
from draftsmith.inference.sampling import Sampler
from draftsmith.inference.speculation import Speculation
from draftsmith.inference.target import Target

PARENTS = (-1, -1, 0, 0, 1, 4)  # drawn in test_tree.py
PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15], [21], [30, 31, 32, 33]]


def test_every_tree_node_gets_the_logits_of_a_chain_along_its_own_path(
    toy: SimpleNamespace, tools: SimpleNamespace, family: str
) -> None:
    """Rows of unequal length, each with a tree of its own; the longest is beyond the toy's sliding window of 8."""
    target = toy.make_target(family)
    cache = target.new_cache(3, 32)
    padded = torch.tensor([prompt + [0] * (11 - len(prompt)) for prompt in PROMPTS])
    target.forward(padded, cache)
    cache.commit([len(prompt) for prompt in PROMPTS])
    new_BR = torch.arange(40, 61).view(3, 7)
    shapes = [PARENTS, (-1, 0, 1, 2, -1, 4), (-1,) * 6]
    out = target.forward(new_BR, cache, (2, "last"), tree=tree.Tree(torch.tensor(shapes), 4))
    for row, (prompt, parents) in enumerate(zip(PROMPTS, shapes, strict=True)):
        for node, path in enumerate(tree.fixed(parents).paths(torch.arange(7))):
            chain = prompt + new_BR[row, path[: tree.depths(parents)[node] + 1]].tolist()
            alone = tools.prefill(target, chain, (2, "last"))[1]
            for name in ("logits", "features", "last"):
                got, expected = getattr(out, name)[row, node], getattr(alone, name)[0, -1]
                torch.testing.assert_close(got, expected, atol=tools.atol(family), rtol=0)


@pytest.mark.parametrize("family", ["mistral", "gemma2"])
def test_a_tree_deeper_than_the_sliding_window_forgets_its_own_first_nodes(
    toy: SimpleNamespace, tools: SimpleNamespace, family: str
) -> None:
    """Window 3, tree depth 5: the distance along the path counts, not that of the slots."""
    target = toy.make_target(family, sliding_window=3)
    parents = (-1, -1, 0, 2, 3, 1, 4)
    cache = target.new_cache(1, 16)
    target.forward(torch.tensor([[5, 6, 7, 8]]), cache)
    cache.commit([4])
    new_BR = torch.arange(40, 48)[None]
    out = target.forward(new_BR, cache, tree=tree.fixed(parents))
    for node, path in enumerate(tree.fixed(parents).paths(torch.arange(len(parents) + 1))):
        chain = [5, 6, 7, 8, *new_BR[0, path[: tree.depths(parents)[node] + 1]].tolist()]
        alone = tools.prefill(target, chain)[1].logits[0, -1]
        torch.testing.assert_close(out.logits[0, node], alone, atol=tools.atol(family), rtol=0)


def test_ragged_decoding_with_the_cache_equals_one_pass_without(
    toy: SimpleNamespace, tools: SimpleNamespace, family: str
) -> None:
    """Three rows of unequal length read 1 to 3 tokens at a time, keep some of them, and end beyond the sliding window."""
    target = toy.make_target(family)
    torch.manual_seed(0)
    texts = torch.randint(3, 64, (3, 40)).tolist()
    lengths = [11, 1, 4]
    cache = target.new_cache(3, 48)
    padded = torch.zeros(3, 11, dtype=torch.int64)
    for row, length in enumerate(lengths):
        padded[row, :length] = torch.tensor(texts[row][:length])
    target.forward(padded, cache)
    cache.commit(lengths)
    with torch.no_grad():
        whole = [target.model(torch.tensor([text])).logits[0] for text in texts]
    for width, counts in [(1, [1, 1, 1]), (3, [3, 1, 2]), (3, [1, 3, 3]), (2, [2, 2, 1]), (3, [1, 2, 3])]:
        ids = torch.tensor([texts[row][length : length + width] for row, length in enumerate(cache.lengths)])
        out = target.forward(ids, cache)
        for row, length in enumerate(cache.lengths):
            expected = whole[row][length : length + width]
            torch.testing.assert_close(out.logits[row], expected, atol=tools.atol(family), rtol=0)
        cache.commit(counts)


def test_features_of_a_row_do_not_depend_on_padding_or_batch(
    toy: SimpleNamespace, tools: SimpleNamespace, family: str
) -> None:
    target = toy.make_target(family)
    layers = (0, 2, 4, "last")
    padded = torch.tensor([prompt + [0] * (11 - len(prompt)) for prompt in PROMPTS])
    features, last = target.hidden(padded, layers)
    for row, prompt in enumerate(PROMPTS):
        alone, alone_last = target.hidden(torch.tensor([prompt]), layers)
        torch.testing.assert_close(features[row, : len(prompt)], alone[0], atol=tools.atol(family), rtol=0)
        torch.testing.assert_close(last[row, : len(prompt)], alone_last[0], atol=tools.atol(family), rtol=0)


def test_logits_can_be_asked_for_one_row_of_each_sequence(toy: SimpleNamespace) -> None:
    target = toy.make_target("llama")
    ids = torch.tensor([[5, 6, 7], [8, 9, 0]])
    every = target.forward(ids, target.new_cache(2, 8)).logits
    asked = target.forward(ids, target.new_cache(2, 8), logits_at_B=torch.tensor([2, 1])).logits
    assert asked.shape == (2, 1, 64)
    torch.testing.assert_close(asked[:, 0], every[torch.tensor([0, 1]), torch.tensor([2, 1])], atol=1e-12, rtol=0)


def test_no_call_changes_the_target(toy: SimpleNamespace, family: str) -> None:
    target = toy.make_target(family)
    before = snapshot(target)
    target.hidden(torch.tensor([[5, 6, 7]]), (1, 4, "last"))
    target.forward(torch.tensor([[5, 6, 7]]), target.new_cache(1, 8), (0, "last"))
    drafter = toy.make_drafter("eagle3", target)
    generate(target, PROMPTS, max_new=6, sampler=Sampler(0.8), speculation=Speculation(drafter, tree.chain(3)))
    with pytest.raises(IndexError):  # a call that fails half-way leaves no hook behind
        target.hidden(torch.tensor([[5, 6, 10_000]]), (1, "last"))
    after = snapshot(target)
    for name, tensor in before.pop("tensors").items():
        assert torch.equal(tensor, after["tensors"][name]), name
    after.pop("tensors")
    assert after == before


def test_wrapping_freezes_the_model_and_puts_it_into_eval_mode(toy: SimpleNamespace) -> None:
    model = toy.make_model("llama").train()
    target = Target(model, None, "toy")
    assert not any(p.requires_grad for p in target.model.parameters())
    assert not any(m.training for m in target.model.modules())


def snapshot(target: Target) -> dict[str, Any]:
    model = target.model
    tensors = {name: t.clone() for name, t in [*model.named_parameters(), *model.named_buffers()]}
    return {
        "tensors": tensors,
        "config": copy.deepcopy(model.config.to_dict()),
        "generation_config": copy.deepcopy(model.generation_config.to_dict()),
        "requires_grad": {name: p.requires_grad for name, p in model.named_parameters()},
        "grad": {name: p.grad for name, p in model.named_parameters()},
        "training": {name: m.training for name, m in model.named_modules()},
        "hooks": {name: len(m._forward_hooks) + len(m._forward_pre_hooks) for name, m in model.named_modules()},
        "attributes": {name: sorted(vars(m)) for name, m in model.named_modules()},
    }


# ---- loading ------------------------------------------------------------------------------------------------------


def test_a_saved_folder_loads_with_its_tokenizer_and_gives_the_same_logits(
    toy: SimpleNamespace, toy_folder: Path
) -> None:
    target = load(toy_folder)
    model = toy.make_model("llama", vocab_size=320)
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        expected = model(ids).logits
    torch.testing.assert_close(target.forward(ids, target.new_cache(1, 4)).logits, expected, atol=1e-6, rtol=0)
    assert target.dtype == torch.float32
    assert target.tokenizer.decode(target.tokenizer("hello")["input_ids"]) == "hello"
    assert target.eos_ids == (2,) and target.tokenizer.eos_token_id == 2
    shape = target.shape
    assert (shape.hidden_size, shape.vocab_size, shape.num_layers) == (32, 320, 4)
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.max_positions) == (4, 2, 8, 256)


def test_the_asked_dtype_is_the_one_loaded(toy_folder: Path) -> None:
    assert load(toy_folder, dtype=torch.float64).dtype == torch.float64


def test_the_fingerprint_of_a_bf16_checkpoint_is_the_same_in_every_dtype(toy: SimpleNamespace, tmp_path: Path) -> None:
    toy.make_model("llama", torch.bfloat16, vocab_size=320).save_pretrained(tmp_path)
    toy.make_tokenizer().save_pretrained(tmp_path)
    prints = {load(tmp_path, dtype=dtype).shape.fingerprint for dtype in (None, torch.float32, torch.bfloat16)}
    assert len(prints) == 1 and len(prints.pop()) == 16


def test_the_fingerprint_changes_with_the_weights(toy: SimpleNamespace) -> None:
    assert fingerprint(toy.make_model("llama", seed=0)) != fingerprint(toy.make_model("llama", seed=1))
    assert fingerprint(toy.make_model("llama", seed=0)) == fingerprint(toy.make_model("llama", seed=0))
    changed = toy.make_model("llama")
    with torch.no_grad():
        changed.lm_head.weight.mul_(1.01)
    assert fingerprint(changed) != fingerprint(toy.make_model("llama"))


def test_a_missing_path_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"target '.*nowhere' cannot be read"):
        load(tmp_path / "nowhere")


def test_a_missing_gguf_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"target '.*model\.gguf' does not exist"):
        load(tmp_path / "model.gguf")


def test_a_folder_without_a_config_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no config.json; give a model folder, a hub id or a .gguf file"):
        load(tmp_path)


def test_a_folder_with_a_config_of_no_known_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_model"}))
    with pytest.raises(ValueError, match=r"target '.*' cannot be read: .*no_such_model"):
        load(tmp_path)


def test_a_folder_without_weights_is_refused(toy: SimpleNamespace, tmp_path: Path) -> None:
    toy.make_model("llama").config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"target '.*' cannot be loaded"):
        load(tmp_path)


def test_an_encoder_is_refused_by_its_architecture(tmp_path: Path) -> None:
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=64
    )
    transformers.BertModel(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="BertModel, not a causal LM; give a text decoder"):
        load(tmp_path)


def test_an_encoder_decoder_is_refused_by_its_kind(tmp_path: Path) -> None:
    transformers.T5Config(d_model=32, num_layers=2, num_heads=4, vocab_size=64).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is a 't5' model, not a causal LM"):
        load(tmp_path)


MAMBA = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}
HYBRID = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "head_dim": 8, "num_experts": 0, "max_position_embeddings": 64,
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
CONVOLUTIONAL = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "max_position_embeddings": 64, "layer_types": ["conv", "full_attention"],
}  # fmt: skip


@pytest.mark.parametrize("kind, sizes", [("mamba", MAMBA), ("qwen3_next", HYBRID), ("lfm2", CONVOLUTIONAL)])
def test_a_model_with_a_state_that_cannot_be_rolled_back_is_refused_by_name(kind: str, sizes: dict[str, Any]) -> None:
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **sizes))
    with pytest.raises(ValueError, match=f"toy {kind}.* cannot be rolled back"):
        Target(model, None, f"toy {kind}")


def test_a_head_that_does_not_give_the_model_s_logits_is_refused(toy: SimpleNamespace) -> None:
    """A model with a logit bias that the adapter does not know of, as a new architecture would bring."""
    model = toy.make_model("llama")
    model.register_forward_hook(lambda _module, _args, out: setattr(out, "logits", out.logits * 1.5))
    with pytest.raises(
        ValueError, match="toy: the head on the last hidden state does not reproduce the model's logits"
    ):
        Target(model, None, "toy")


def test_a_target_that_is_spread_out_gives_the_same_states_laws_and_answers(
    toy: SimpleNamespace, tmp_path: Path
) -> None:
    """Spread by accelerate: two layers lie on disk and are fetched by its hooks at every pass, all on a CPU."""
    target = toy.make_target(tie_word_embeddings=False)
    ids_BT = torch.tensor([[5, 6, 7, 8, 9, 10], [30, 31, 32, 33, 0, 0]])
    layers = (1, "last", 3, 4)
    before = target.hidden(ids_BT, layers)
    answers = [output.ids for output in generate(target, PROMPTS, max_new=6, sampler=Sampler(0.0))]
    places = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    places |= {f"model.layers.{i}": "disk" if i in (1, 2) else "cpu" for i in range(4)}
    accelerate.dispatch_model(target.model, places, main_device="cpu", offload_dir=str(tmp_path), force_hooks=True)
    assert sum(parameter.is_meta for parameter in target.model.parameters()) > 10
    after = target.hidden(ids_BT, layers)
    assert torch.equal(after[0], before[0]) and torch.equal(after[1], before[1])
    assert target.unembed(after[1]).device == target.device == target.head_weight().device == torch.device("cpu")
    assert [output.ids for output in generate(target, PROMPTS, max_new=6, sampler=Sampler(0.0))] == answers
    with pytest.raises(
        ValueError, match=r"toy does not fit on the devices: \d+ of its tensors are offloaded; give more"
    ):
        refuse_offloaded(target.model, "toy")


def test_a_launch_under_zero_3_does_not_cut_the_target_up_as_it_is_loaded(toy_folder: Path) -> None:
    """accelerate keeps such a config for its lifetime, and transformers acts on it in every process."""
    pytest.importorskip("deepspeed", exc_type=ImportError)
    from transformers.integrations.deepspeed import HfDeepSpeedConfig, is_deepspeed_zero3_enabled

    kept = HfDeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}})
    assert is_deepspeed_zero3_enabled() and kept.is_zero3()
    target = load(toy_folder)
    assert all(parameter.numel() > 0 and not hasattr(parameter, "ds_id") for parameter in target.model.parameters())


def test_a_target_loaded_with_a_device_map_is_the_same_target(toy_folder: Path) -> None:
    ids_BT = torch.tensor([[5, 6, 7, 8]])
    spread, plain = load(toy_folder, placement="device_map"), load(toy_folder)
    assert spread.shape == plain.shape
    assert torch.equal(spread.hidden(ids_BT, (1, 4))[0], plain.hidden(ids_BT, (1, 4))[0])
