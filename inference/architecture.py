"""What a Hugging Face causal LM is to us: sizes, the name of its weights, its decoder layers; and which cannot be driven."""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.drafters.base import Shape


def describe(config: Any, *, vocab_size: int | None = None, fingerprint: str = "") -> Shape:
    """A target's sizes from its Hugging Face config; works without weights."""
    heads = config.num_attention_heads
    rope = setting(config, "rope_parameters") or {}
    if "rope_theta" not in rope:  # one entry per layer type: the full-attention one sets the scale
        rope = rope.get("full_attention", {})
    return Shape(
        hidden_size=config.hidden_size,
        vocab_size=vocab_size or config.vocab_size,
        num_layers=config.num_hidden_layers,
        intermediate_size=setting(config, "intermediate_size") or 4 * config.hidden_size,
        num_heads=heads,
        num_kv_heads=setting(config, "num_key_value_heads") or heads,
        head_dim=setting(config, "head_dim") or config.hidden_size // heads,
        rms_norm_eps=float(setting(config, "rms_norm_eps") or 1e-6),
        rope_theta=float(rope.get("rope_theta") or setting(config, "rope_theta") or 10000.0),
        max_positions=config.max_position_embeddings,
        fingerprint=fingerprint,
    )


def fingerprint(model: nn.Module) -> str:
    """Names the weights: a hash of names, sizes and sixteen bf16 samples of every parameter, the same for every dtype
    that a bf16 checkpoint is loaded in."""
    return digest_tensors({name: parameter.detach() for name, parameter in model.named_parameters()})


def digest_tensors(tensors: Mapping[str, Tensor]) -> str:
    """The hash in which `fingerprint` consists, of any named tensors."""
    return digest_samples({name: (tuple(tensor.shape), sample(tensor)) for name, tensor in tensors.items()})


def sample(tensor: Tensor) -> Tensor:
    """Sixteen of its numbers, evenly spread, rounded to bf16; fp32 on the CPU."""
    flat = tensor.reshape(-1)
    return flat[:: max(1, len(flat) // 16)][:16].to(torch.bfloat16).float().cpu()


def digest_samples(samples: Mapping[str, tuple[tuple[int, ...], Tensor]]) -> str:
    """The same from each tensor's sizes and `sample`."""
    digest = hashlib.sha256()
    for name, (sizes, numbers) in sorted(samples.items()):
        digest.update(f"{name}{sizes}".encode() + numbers.numpy().tobytes())
    return digest.hexdigest()[:16]


def refuse_other_states(model: nn.Module, config: Any, name: str) -> None:
    """ValueError if some layer is not plain attention, full or in a sliding window."""
    others = set(setting(config, "layer_types") or ()) - {"full_attention", "sliding_attention"}
    if others or getattr(model, "_is_stateful", False):  # transformers' own mark of recurrent models
        raise ValueError(
            f"{name} is a {config.model_type!r} model whose layers ({', '.join(sorted(others)) or 'recurrent'}) keep a state "
            "that cannot be rolled back, so rejected drafts could not be taken back; use a target with plain attention"
        )


def refuse_moving_rope(config: Any, name: str) -> None:
    """ValueError if rotary frequencies depend on the longest row of a call: neighbours and drafts would change a row."""
    rope = setting(config, "rope_parameters") or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        raise ValueError(
            f"{name} has rotary positions of type {rope['rope_type']!r}, which change with the length of the batch, so "
            "speculative decoding would not be exact; use a target with fixed rotary frequencies"
        )


def decoder_layers(body: nn.Module, num_layers: int) -> nn.ModuleList:
    lists = [m for m in body.children() if isinstance(m, nn.ModuleList) and len(m) == num_layers]
    if len(lists) != 1:
        raise ValueError(
            f"{type(body).__name__} has no single list of {num_layers} decoder layers; it is not supported"
        )
    return lists[0]


def setting(config: Any, name: str) -> Any:
    """A setting that only some architectures have."""
    return getattr(config, name, None)
