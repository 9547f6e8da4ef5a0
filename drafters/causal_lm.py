"""Small causal LMs as modules that can be trained: made from scratch, read from a checkpoint, or cut out of a target.

The modelling code is transformers' own, so a draft LM has its architecture's parameter names. The head is a matrix of its own,
never tied to the embedding, that may have rows for some tokens only. Low-rank adapters (Hu et al. 2021, arXiv 2106.09685) are
those of `peft`, put in place before training and added to the weights afterwards.

An `lm` dictionary is a Hugging Face config as plain JSON values: all that is needed to build the module again.

Letters: U tokens that the LM reads, W tokens that it can propose.
"""

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from draftsmith.drafters.adapters import are_transposed, linear_layers
from draftsmith.drafters.base import Shape

PER_LAYER = ("layer_types", "no_rope_layers", "mlp_layer_types")
"""Settings with one value per decoder layer."""
SCALES = ("logits_scaling", "logit_scale")
"""Settings by which an architecture scales its logits behind the head."""


def build(lm: Mapping[str, Any], num_draft_ids: int) -> Any:
    """A causal LM of that config in fp32 with random weights, and a head of W rows. On the meta device its parameters have no
    values, but its buffers do: rotary frequencies, which no checkpoint holds.

    Raises:
        ValueError: no such architecture in this transformers, or one whose logits are more than head times state.
    """
    try:
        config = AutoConfig.for_model(**lm)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"lm describes no model that this transformers knows ({error}); give a Hugging Face config"
        ) from error
    changed = [name for name in SCALES if getattr(config, name, None) not in (None, 1.0)]
    if changed:
        raise ValueError(
            f"a {config.model_type!r} model scales its logits behind the head ({', '.join(changed)}), which training a draft LM "
            "does not imitate; give source: scratch, or a checkpoint of another architecture"
        )
    if torch.empty(0).is_meta:
        from accelerate import init_empty_weights

        with torch.device("cpu"), init_empty_weights(include_buffers=False):
            return _build(config, num_draft_ids)
    return _build(config, num_draft_ids)


def _build(config: Any, num_draft_ids: int) -> Any:
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if model.get_output_embeddings().bias is not None:
        raise ValueError(
            f"the head of a {config.model_type!r} model has a bias; give a draft LM of another architecture"
        )
    head = nn.Linear(model.get_output_embeddings().in_features, num_draft_ids, bias=False)
    nn.init.normal_(head.weight, std=getattr(config, "initializer_range", 0.02))
    model.set_output_embeddings(head)
    return model


def describe(config: Any) -> dict[str, Any]:
    """The `lm` dictionary of a Hugging Face config, without the soft cap that Gemma 2 puts on its logits: it changes no order, and
    the draft learns to do without."""
    found: dict[str, Any] = json.loads(config.to_json_string())
    for name in ("dtype", "quantization_config", "transformers_version", "_name_or_path"):
        found.pop(name, None)
    if "final_logit_softcapping" in found:
        found["final_logit_softcapping"] = None
    return {**found, "tie_word_embeddings": False}


def llama(shape: Shape, **changes: Any) -> dict[str, Any]:
    """The `lm` dictionary of a Llama with a target's sizes, some of them changed."""
    sizes = {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate_size,
        "rms_norm_eps": shape.rms_norm_eps,
        "max_position_embeddings": shape.max_positions,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
    }
    return {"model_type": "llama", "tie_word_embeddings": False, **sizes, **changes}


def read_config(source: str) -> dict[str, Any]:
    """The `lm` dictionary of a checkpoint; ValueError if there is none."""
    try:
        return describe(AutoConfig.from_pretrained(source).get_text_config())
    except (OSError, ValueError, KeyError) as error:
        detail = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ValueError(
            f"source {source!r} cannot be read ({detail}); give a model folder, a hub id, 'target' or 'scratch'"
        ) from error


def check_tokenizer(source: str, tokenizer: Any) -> None:
    """ValueError unless a checkpoint's ids mean what they mean to the target; nothing to compare for a target without tokenizer."""
    if tokenizer is None:
        return
    try:
        theirs = AutoTokenizer.from_pretrained(source).get_vocab().items()
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"source {source!r} has no tokenizer that can be read; give a checkpoint with the target's"
        ) from error
    ours = tokenizer.get_vocab().items()
    if not (ours <= theirs or theirs <= ours):
        raise ValueError(
            f"the tokenizer of source {source!r} is not the target's: the same ids mean other tokens; give a checkpoint of the "
            "target's family, or source: target or scratch"
        )


def load_weights(model: Any, source: str, kept_W: Tensor) -> None:
    """Copies a checkpoint's weights, of its head the rows `kept_W`."""
    loaded = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, use_safetensors=True)
    _copy(model, loaded.state_dict(), loaded.get_output_embeddings().weight, kept_W)


def cut_config(config: Any, layers: Sequence[int]) -> dict[str, Any]:
    """The `lm` dictionary of a target of which only some decoder layers are kept."""
    cut = copy.deepcopy(config)
    cut.num_hidden_layers = len(layers)
    for name in PER_LAYER:
        if (values := getattr(config, name, None)) is not None:
            setattr(cut, name, [values[layer] for layer in layers])
    return describe(cut)


def cut_weights(model: Any, target: Any, layers: Sequence[int], kept_W: Tensor) -> None:
    """Copies the target's embedding, final norm, head rows `kept_W`, and the given decoder layers.

    Args:
        model: built from `cut_config`.
        target: a `TargetHead`.
        layers: which of its layers.
        kept_W: which rows of its head.
    """
    (place,) = (name for name, module in target.model.named_modules() if module is target.layers)
    others = {name: tensor for name, tensor in target.model.state_dict().items() if not name.startswith(f"{place}.")}
    own = {
        f"{place}.{number}.{name}": tensor
        for number, layer in enumerate(layers)
        for name, tensor in target.layers[layer].state_dict().items()
    }
    _copy(model, {**others, **own}, target.head_weight(), kept_W)


def _copy(model: Any, state: Mapping[str, Tensor], head_UD: Tensor, kept_W: Tensor) -> None:
    head = model.get_output_embeddings()
    (name,) = (name for name, module in model.named_modules() if module is head)
    rows_WD = head_UD.detach()[kept_W.to(head_UD.device)]
    try:
        model.load_state_dict({**state, f"{name}.weight": rows_WD})
    except RuntimeError as error:
        raise ValueError(
            f"the weights do not fit a {model.config.model_type!r} model ({' '.join(str(error).split())}); give another source"
        ) from error


# ---- low-rank adapters ------------------------------------------------------------------------------------------------


def add_adapters(model: Any, rank: int) -> None:
    """Puts adapters (scale 1) beside every matrix between embedding and head, and freezes the rest; ValueError without `peft`."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ValueError("lora_rank needs the package peft; install draftsmith[lora], or set lora_rank: 0") from error
    head = model.get_output_embeddings()
    inner = {name: module for name, module in linear_layers(model).items() if module is not head}
    config = LoraConfig(r=rank, lora_alpha=rank, target_modules=[*inner], fan_in_fan_out=are_transposed(inner.values()))
    inject_adapter_in_model(config, model)


def merged(model: Any) -> dict[str, Tensor]:
    """The weights under their plain names, adapters added to the matrices beside which they stand."""
    state = {name.replace(".base_layer.", "."): tensor for name, tensor in model.state_dict().items()}
    plain = {name: tensor.detach().clone() for name, tensor in state.items() if ".lora_" not in name}
    for name, module in model.named_modules():
        if hasattr(module, "get_delta_weight"):  # peft's layers have no common public class
            plain[f"{name}.weight"] += module.get_delta_weight("default").detach()
    return plain
