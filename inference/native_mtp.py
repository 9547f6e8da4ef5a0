"""Multi-token-prediction heads that come inside a target's checkpoint. transformers leaves these tensors out when it loads the
target; here they are read from the safetensors files and become a drafter of kind `mtp`.

Three layouts are known, by the names of released models and the arithmetic with which serving engines (vLLM, SGLang) run them:
that of Qwen3-Next and Qwen3.5 (`mtp.fc`, `mtp.layers.0`), of MiMo (`model.mtp_layers.0`), and of DeepSeek-V3 and GLM, where the
head is one more decoder layer behind the last (`model.layers.{L}.eh_proj`). What the kind `mtp` cannot represent is refused by
name: experts, latent attention, norms of queries and keys, biases other than those of queries, keys and values, gates, quantised
weights, rotary positions other than plain ones, norm weights stored as a distance from 1, and more than one module.
"""

import dataclasses
import re
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from draftsmith import drafters
from draftsmith.drafters.base import TrainableDrafter
from draftsmith.inference.target import Target


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """How a family names its head.

    Attributes:
        family: whose it is, for messages.
        prefix: of all tensors of the head; `{L}` is the target's number of decoder layers.
        names: their names behind the prefix, without ".weight" → ours.
        block: prefix of the decoder block's tensors, behind `prefix`.
        more: a name that only a second module has.
        settings: of the kind `mtp`.
    """

    family: str
    prefix: str
    names: dict[str, str]
    block: str
    more: str
    settings: dict[str, Any]


LAYOUTS = (
    Layout(
        "Qwen3-Next",
        "mtp.",
        {
            "fc": "proj",
            "pre_fc_norm_hidden": "state_norm",
            "pre_fc_norm_embedding": "token_norm",
            "norm": "norm",
        },
        "layers.0.",
        "mtp.layers.1.",
        {"order": "token_first", "normed_state": True, "norm_output": True},
    ),
    Layout(
        "MiMo",
        "model.mtp_layers.0.",
        {
            "input_proj": "proj",
            "hidden_layernorm": "state_norm",
            "token_layernorm": "token_norm",
            "final_layernorm": "norm",
        },
        "",
        "model.mtp_layers.1.",
        {"order": "state_first", "normed_state": False, "norm_output": True},
    ),
    Layout(
        "DeepSeek-V3",
        "model.layers.{L}.",
        {
            "eh_proj": "proj",
            "hnorm": "state_norm",
            "enorm": "token_norm",
            "shared_head.norm": "norm",
            "shared_head.head": "lm_head",
        },
        "",
        "model.layers.{L+1}.",
        {"order": "token_first", "normed_state": True, "norm_output": False},
    ),
)

BLOCK = {
    *(f"self_attn.{part}_proj" for part in "qkvo"),
    *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
    "input_layernorm",
    "post_attention_layernorm",
}
REFUSED = {  # what a name betrays, the first that fits
    "quantised weights": r"weight_scale|\.scales$|qweight|qzeros",
    "experts": r"\.experts|shared_expert|mlp\.gate\.|\.moe\.",
    "latent attention": r"_a_proj|_b_proj|kv_a_|q_a_|indexer",
    "norms of queries and keys": r"[qk]_norm",
    "biases": r"\.bias$",
}


def load_native_mtp(folder: str | Path, target: Target) -> TrainableDrafter:
    """The head in a target's folder as a drafter of kind `mtp`, in the target's dtype and on its device.

    Args:
        folder: where the target's safetensors files are.
        target: loaded from there.

    Raises:
        ValueError: no folder, no head in it, or one that the kind cannot represent; it says which part.
    """
    files = _files(Path(folder))
    num_layers = target.shape.num_layers
    for layout in LAYOUTS:
        prefix = layout.prefix.format(L=num_layers)
        ours = {name.removeprefix(prefix): file for name, file in files.items() if name.startswith(prefix)}
        if f"{next(iter(layout.names))}.weight" in ours:
            break
    else:
        looked = ", ".join(layout.prefix.format(L=num_layers) + next(iter(layout.names)) for layout in LAYOUTS)
        raise ValueError(f"{folder} has no multi-token-prediction head (looked for {looked}); train a drafter for it")

    def refuse(what: str) -> ValueError:
        return ValueError(
            f"{folder}: its multi-token-prediction head (layout of {layout.family}) has {what}; only one plain Llama or Qwen2 "
            "block can be loaded: train a drafter, or use another one"
        )

    if any(name.startswith(layout.more.replace("{L+1}", str(num_layers + 1))) for name in files):
        raise refuse(f"more than one module ({layout.more.replace('{L+1}', str(num_layers + 1))}…)")
    renamed = {name: _our_name(name, layout) for name in ours}
    strange = sorted(name for name, new in renamed.items() if new is None)
    if strange:
        reasons = {_reason(name): name for name in reversed(strange)}  # one example of each
        raise refuse(", ".join(f"{reason} ({name})" for reason, name in sorted(reasons.items())))
    if odd := _odd_arithmetic(target):
        raise refuse(odd)

    tensors = {new: _read(ours[name], prefix + name) for name, new in renamed.items() if new is not None}
    embedding = tensors.pop("embed_tokens.weight", None)
    if embedding is not None and not _same(embedding, target.embed(torch.arange(len(embedding), device=target.device))):
        raise refuse("an embedding of its own (embed_tokens.weight)")
    if "lm_head.weight" in tensors and _same(tensors["lm_head.weight"], target.head_weight()):
        del tensors["lm_head.weight"]
    settings = {
        **layout.settings,
        "own_head": "lm_head.weight" in tensors,
        "attention_bias": "block.self_attn.q_proj.bias" in tensors,
    }
    drafter = drafters.build("mtp", settings, target.shape)
    expected = drafter.state_dict()
    tensors["d2t"] = expected["d2t"]
    if missing := sorted(expected.keys() - tensors.keys()):
        raise ValueError(
            f"{folder}: its multi-token-prediction head lacks {', '.join(missing)}; the download is incomplete"
        )
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape:
            raise refuse(f"{name} of size {tuple(tensor.shape)} where a plain block has {tuple(expected[name].shape)}")
    drafter.load_state_dict(tensors)
    drafter.requires_grad_(False).to(target.device, target.dtype)
    return drafter.eval()


def _files(folder: Path) -> dict[str, Path]:
    """Which file holds each tensor of a checkpoint."""
    if not folder.is_dir():
        raise ValueError(
            f"{folder} is no folder, and the head that comes with a target is read from its files; load the target from "
            "a downloaded folder"
        )
    found: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safetensors.safe_open(path, framework="pt") as file:
            found |= dict.fromkeys(file.keys(), path)
    return found


def _read(path: Path, name: str) -> Tensor:
    with safetensors.safe_open(path, framework="pt") as file:
        tensor: Tensor = file.get_tensor(name)
    return tensor


def _our_name(name: str, layout: Layout) -> str | None:
    """The parameter of the kind `mtp`; None if it has no such thing."""
    stem, _, kind = name.rpartition(".")
    if kind == "weight" and stem in layout.names:
        return f"{layout.names[stem]}.weight"
    if name == "embed_tokens.weight":
        return name
    part = stem.removeprefix(layout.block)
    if stem.startswith(layout.block) and part in BLOCK:
        if kind == "weight" or (kind == "bias" and re.fullmatch(r"self_attn\.[qkv]_proj", part)):
            return f"block.{part}.{kind}"
    return None


def _reason(name: str) -> str:
    return next((reason for reason, pattern in REFUSED.items() if re.search(pattern, name)), "an unknown part")


def _odd_arithmetic(target: Target) -> str:
    """What the target's config says about its blocks that a plain one does not do; empty if nothing."""
    config = target.config
    rope = getattr(config, "rope_parameters", None) or {}
    if config.model_type.startswith(("qwen3_next", "qwen3_5")):
        return "norm weights that are stored as a distance from 1"
    if getattr(config, "hidden_act", "silu") != "silu":
        return f"the activation {config.hidden_act!r}"
    if rope.get("rope_type", "default") != "default":
        return f"rotary positions of type {rope['rope_type']!r}"
    if rope.get("partial_rotary_factor", 1.0) != 1:
        return "rotary positions on a part of each head"
    return ""


def _same(tensor: Tensor, other: Tensor) -> bool:
    return tensor.shape == other.shape and torch.equal(tensor.to(other), other)
