"""Heads inside a target's checkpoint: three layouts written by hand, what a draft with them computes, and everything refused."""

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from draftsmith.drafters import tree
from draftsmith.inference.decode import generate
from draftsmith.inference.load_target import load
from draftsmith.inference.loading import load_drafter
from draftsmith.inference.native_mtp import load_native_mtp
from draftsmith.inference.sampling import Sampler
from draftsmith.inference.speculation import Speculation
from draftsmith.inference.target import Target

WIDTH, INNER, LAYERS = 32, 64, 4
BLOCK = {
    "self_attn.q_proj.weight": (32, WIDTH),
    "self_attn.k_proj.weight": (16, WIDTH),
    "self_attn.v_proj.weight": (16, WIDTH),
    "self_attn.o_proj.weight": (WIDTH, 32),
    "mlp.gate_proj.weight": (INNER, WIDTH),
    "mlp.up_proj.weight": (INNER, WIDTH),
    "mlp.down_proj.weight": (WIDTH, INNER),
    "input_layernorm.weight": (WIDTH,),
    "post_attention_layernorm.weight": (WIDTH,),
}
HEADS: dict[str, tuple[str, dict[str, tuple[int, ...]]]] = {  # prefix, and the names of the released checkpoints
    "qwen3_next": (
        "mtp.",
        {
            "fc.weight": (WIDTH, 2 * WIDTH),
            "pre_fc_norm_embedding.weight": (WIDTH,),
            "pre_fc_norm_hidden.weight": (WIDTH,),
            "norm.weight": (WIDTH,),
            **{f"layers.0.{name}": size for name, size in BLOCK.items()},
        },
    ),
    "mimo": (
        "model.mtp_layers.0.",
        {
            "input_proj.weight": (WIDTH, 2 * WIDTH),
            "token_layernorm.weight": (WIDTH,),
            "hidden_layernorm.weight": (WIDTH,),
            "final_layernorm.weight": (WIDTH,),
            "self_attn.q_proj.bias": (32,),
            "self_attn.k_proj.bias": (16,),
            "self_attn.v_proj.bias": (16,),
            **BLOCK,
        },
    ),
    "deepseek_v3": (
        f"model.layers.{LAYERS}.",
        {
            "eh_proj.weight": (WIDTH, 2 * WIDTH),
            "enorm.weight": (WIDTH,),
            "hnorm.weight": (WIDTH,),
            "shared_head.norm.weight": (WIDTH,),
            **BLOCK,
        },
    ),
}
Tensors = dict[str, Tensor]


def head(layout: str) -> Tensors:
    """A random head, norms around 1, by the checkpoint's names without the prefix."""
    generator = torch.Generator().manual_seed(7)
    return {
        name: torch.randn(size, generator=generator) * 0.3 + (1.0 if len(size) == 1 and "bias" not in name else 0.0)
        for name, size in HEADS[layout][1].items()
    }


def write(toy: SimpleNamespace, folder: Path, layout: str, tensors: Tensors, **changes: Any) -> Target:
    """A checkpoint of two files: the target's own tensors, and the head's. transformers must load it as if there were no head."""
    plain = toy.make_model("llama", **changes)
    nn.init.uniform_(plain.model.norm.weight, 0.5, 2.0)  # with ones, the state before the final norm would do as well
    plain.save_pretrained(folder)
    toy.make_tokenizer().save_pretrained(folder)
    prefix = HEADS[layout][0]
    state = {prefix + name: tensor.contiguous() for name, tensor in tensors.items()}
    safetensors.torch.save_file(state, folder / "model-mtp.safetensors", {"format": "pt"})
    target = load(folder, dtype=torch.float64)
    for name, parameter in target.model.named_parameters():
        assert torch.equal(parameter, plain.get_parameter(name).double())
    return target


def logits(layout: str, w: Tensors, target: Target, ids: list[int], steps: int) -> list[Tensor]:
    """What the engines compute behind a text: the next `steps` draft laws, the most likely tokens drafted; by their names."""
    state_T, last_T = target.hidden(torch.tensor([ids[:-1]]), [LAYERS])
    fed = list((state_T if layout == "mimo" else last_T)[0])  # vLLM's MiMo hands over the state before the final norm
    names = {
        "qwen3_next": ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "layers.0."),
        "mimo": ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm", ""),
        "deepseek_v3": ("eh_proj", "enorm", "hnorm", "shared_head.norm", ""),
    }[layout]
    proj, token_norm, state_norm, norm, block = names

    def rms(x: Tensor, name: str) -> Tensor:
        return nn.functional.rms_norm(x, (WIDTH,), w[f"{name}.weight"], target.shape.rms_norm_eps)

    def heads(x: Tensor, part: str, positions: Tensor) -> Tensor:
        name = f"{block}self_attn.{part}_proj"
        out = (nn.functional.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))).unflatten(1, (-1, 8))
        if part == "v":
            return out
        angle = positions[:, None] * target.shape.rope_theta ** (-torch.arange(0, 8, 2) / 8)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        first, second = out.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    drafted, tokens = [], ids[1:]
    for _ in range(steps):
        token = rms(target.embed(torch.tensor(tokens)), token_norm)
        state = rms(torch.stack(fed), state_norm)
        parts = [state, token] if layout == "mimo" else [token, state]
        x = torch.cat(parts, 1) @ w[f"{proj}.weight"].T
        normed, place = rms(x, f"{block}input_layernorm"), torch.arange(len(x), dtype=torch.float64)
        q, k, v = (heads(normed, part, place) for part in "qkv")
        mixed = nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1),
            k.repeat_interleave(2, 1).transpose(0, 1),
            v.repeat_interleave(2, 1).transpose(0, 1),
            is_causal=True,
        )
        x = x + mixed.transpose(0, 1).flatten(1) @ w[f"{block}self_attn.o_proj.weight"].T
        z = rms(x, f"{block}post_attention_layernorm")
        gate, up = (z @ w[f"{block}mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        x = x + (nn.functional.silu(gate) * up) @ w[f"{block}mlp.down_proj.weight"].T
        read = rms(x, norm)
        drafted.append(read[-1] @ w.get("shared_head.head.weight", target.head_weight()).T)
        fed.append((x if layout == "deepseek_v3" else read)[-1])
        tokens = [*tokens, int(drafted[-1].argmax())]
    return drafted


@pytest.mark.parametrize("layout", HEADS)
def test_a_loaded_head_drafts_what_the_engines_compute(toy: SimpleNamespace, tmp_path: Path, layout: str) -> None:
    weights = head(layout)
    target = write(toy, tmp_path, layout, weights, vocab_size=320)
    drafter: Any = load_drafter("mtp", target)
    assert drafter.dtype == torch.float64 and not any(p.requires_grad for p in drafter.parameters())
    ids = [5, 9, 40, 12, 7, 21, 30]
    expected = logits(layout, {name: tensor.double() for name, tensor in weights.items()}, target, ids, 3)

    drafter.bind(target)
    cache, text = target.new_cache(1, 20), torch.tensor([ids[:-1]])
    features = target.forward(text, cache, drafter.feature_layers).features
    watch = toy.Watch()
    with torch.inference_mode():
        state = drafter.observe(drafter.init(1, 20), text, features, torch.tensor(ids[-1:]), [len(ids) - 1])
        drafter.propose(state, tree.chain(3), watch)
    for ours, theirs in zip(watch.seen, expected, strict=True):
        torch.testing.assert_close(ours[0], theirs, rtol=1e-5, atol=1e-5)  # fp32 rotary tables

    plain = generate(target, [ids], max_new=15, sampler=Sampler(0.7), stop_at_eos=False)
    for plan in (tree.chain(3), tree.Dynamic(6, 3, 2)):
        outputs = generate(
            target, [ids], max_new=15, sampler=Sampler(0.7), stop_at_eos=False, speculation=Speculation(drafter, plan)
        )
        assert outputs[0].ids == plain[0].ids


def test_a_head_and_an_embedding_that_are_copies_of_the_targets_are_shared(
    toy: SimpleNamespace, tmp_path: Path
) -> None:
    model, weights = toy.make_model("llama", vocab_size=320), head("deepseek_v3")
    weights["shared_head.head.weight"] = model.lm_head.weight.detach().clone()
    weights["embed_tokens.weight"] = model.model.embed_tokens.weight.detach().clone()
    target = write(toy, tmp_path / "copies", "deepseek_v3", weights, vocab_size=320)
    assert not load_native_mtp(tmp_path / "copies", target).config.own_head
    weights["shared_head.head.weight"] += 1
    target = write(toy, tmp_path / "own", "deepseek_v3", weights, vocab_size=320)
    drafter: Any = load_native_mtp(tmp_path / "own", target)
    assert drafter.config.own_head and torch.equal(drafter.lm_head.weight, weights["shared_head.head.weight"].double())


def added(name: str, *size: int) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: torch.zeros(size)})


@pytest.mark.parametrize(
    "layout, change, message",
    [
        ("qwen3_next", added("layers.0.self_attn.q_norm.weight", 8), "norms of queries and keys (layers.0.self_attn.q_norm"),
        ("qwen3_next", added("layers.0.mlp.experts.3.up_proj.weight", 4, 4), "experts (layers.0.mlp.experts.3.up_proj.weight)"),
        ("qwen3_next", added("layers.0.mlp.gate.weight", 4, 32), "experts (layers.0.mlp.gate.weight)"),
        ("qwen3_next", added("layers.0.self_attn.q_proj.weight", 64, 32), "of size (64, 32) where a plain block has (32, 32)"),
        ("qwen3_next", added("layers.1.input_layernorm.weight", 32), "more than one module (mtp.layers.1.…)"),
        ("mimo", added("mlp.up_proj.bias", 64), "biases (mlp.up_proj.bias)"),
        ("mimo", added("self_attn.o_proj.bias", 32), "biases (self_attn.o_proj.bias)"),
        ("mimo", added("pre_mlp_layernorm.weight", 32), "an unknown part (pre_mlp_layernorm.weight)"),
        ("deepseek_v3", added("self_attn.kv_a_proj_with_mqa.weight", 8, 32), "latent attention (self_attn.kv_a_proj_with_mqa"),
        ("deepseek_v3", added("mlp.up_proj.weight_scale_inv", 1, 1), "quantised weights (mlp.up_proj.weight_scale_inv)"),
        ("deepseek_v3", added("embed_tokens.weight", 320, 32), "an embedding of its own"),
        ("deepseek_v3", lambda tensors: tensors.pop("hnorm.weight"), "lacks state_norm.weight; the download is incomplete"),
        ("deepseek_v3", lambda tensors: tensors.pop("eh_proj.weight"), "no multi-token-prediction head (looked for mtp.fc, "),
    ],
)  # fmt: skip
def test_what_cannot_be_represented_is_refused_by_name(
    toy: SimpleNamespace, tmp_path: Path, layout: str, change: Callable[[Tensors], None], message: str
) -> None:
    tensors = head(layout)
    change(tensors)
    target = write(toy, tmp_path, layout, tensors, vocab_size=320)
    with pytest.raises(ValueError, match=re.escape(message)):
        load_drafter("mtp", target)


def test_more_modules_behind_the_last_layer_are_refused(toy: SimpleNamespace, tmp_path: Path) -> None:
    tensors = head("deepseek_v3")
    target = write(toy, tmp_path, "deepseek_v3", tensors, vocab_size=320)
    safetensors.torch.save_file({"model.layers.5.enorm.weight": torch.ones(32)}, tmp_path / "more.safetensors")
    with pytest.raises(ValueError, match=re.escape("more than one module (model.layers.5.…)")):
        load_native_mtp(tmp_path, target)


def test_odd_rotary_positions_and_places_without_files_are_refused(toy: SimpleNamespace, tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    target = write(toy, tmp_path, "mimo", head("mimo"), vocab_size=320, rope_parameters=rope)
    with pytest.raises(ValueError, match="rotary positions of type 'linear'"):
        load_native_mtp(tmp_path, target)
    with pytest.raises(ValueError, match="toy llama is no folder, and the head that comes with a target"):
        load_drafter("mtp", toy.make_target())
