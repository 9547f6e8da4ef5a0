"""Loads a frozen target: its weights from a folder, a hub id or a GGUF file, what is done to them, its tokenizer.

Weights are read from safetensors (or GGUF) alone. What was done to them is the target's `form`, where they lie its placement.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from draftsmith.inference.architecture import fingerprint
from draftsmith.inference.form import Form, Quantisation, check_form
from draftsmith.inference.lora import add_adapter
from draftsmith.inference.placement import Placement, check_placement, refuse_offloaded
from draftsmith.inference.quantised import bitsandbytes, checkpoint_fingerprint
from draftsmith.inference.target import Target


def load(
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    placement: Placement = "replicated",
    quantisation: Quantisation | None = None,
    adapter: str | Path | None = None,
    merge_adapter: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Target:
    """Loads a target from a folder, a hub id, or a GGUF file.

    Args:
        path: the folder, id or `.gguf` file.
        dtype: of weights and activations; None takes the checkpoint's own (fp32 for GGUF).
        device: where to put it, or what of it this process holds.
        placement: how it lies over devices and processes (`placement`).
        quantisation: of the decoder's matrices, by bitsandbytes.
        adapter: a LoRA adapter as peft saves it, a folder or a hub id.
        merge_adapter: add it to the weights, in their dtype; else it runs beside them.
        revision: of a hub id.
        trust_remote_code: run modelling code that comes with the checkpoint; only ever on the user's explicit request.

    Raises:
        ValueError: nothing there, not a causal LM, an architecture that cannot be driven exactly, an adapter that does not fit, or
            things that exclude each other.
    """
    name, device = str(path), torch.device(device)
    check_form(name, placement, quantisation, None if adapter is None else str(adapter), merge_adapter)
    check_placement(placement, name)
    place, extra = _source(path)
    common: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code, **extra}
    try:
        config = AutoConfig.from_pretrained(place, **common)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"target {name!r} cannot be read: {_first_line(error)}") from error
    if not trust_remote_code and config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ValueError(f"target {name!r} is a {config.model_type!r} model, not a causal LM; give a text decoder")
    architectures = config.architectures or []
    if architectures and not any("CausalLM" in kind or "LMHead" in kind for kind in architectures):
        raise ValueError(f"target {name!r} is a {architectures[0]}, not a causal LM; give a text decoder")
    if extra:
        from transformers import GgufConfig

        common["quantization_config"] = GgufConfig(dequantize=True)
    if quantisation is not None:
        common["quantization_config"] = bitsandbytes(quantisation, config, name, dtype)
    unset_hf_deepspeed_config()  # a launch under ZeRO-3 would have every model cut up as it is loaded
    # Quantising happens on the device; what is sharded or merged is cut up or added to before it goes there.
    spread: Any = "auto" if placement == "device_map" else {"": device} if quantisation is not None else None
    try:
        model = AutoModelForCausalLM.from_pretrained(
            place, dtype=dtype or "auto", use_safetensors=True, device_map=spread, **common
        )
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"target {name!r} cannot be loaded: {_first_line(error)}") from error
    tokenizer = load_tokenizer(path, revision=revision, trust_remote_code=trust_remote_code)
    if placement == "device_map":
        refuse_offloaded(model, name)

    weights = fingerprint(model) if quantisation is None else checkpoint_fingerprint(model, place, revision)
    if adapter is not None:
        model, weights = add_adapter(model, adapter, weights, merge=merge_adapter)
    form = Form(
        quantisation=quantisation,
        adapter=None if adapter is None else str(adapter),
        merged=merge_adapter,
        fingerprint=weights,
    )
    if placement == "replicated" and quantisation is None:
        model = model.to(device)
    target = Target(model, tokenizer, name, form=form)
    if placement in ("fsdp", "zero3"):
        target.shard(placement, device)
    return target


def load_tokenizer(
    path: str | Path, *, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """A target's tokenizer alone, for work that needs no weights; arguments and errors as of `load`."""
    place, extra = _source(path)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            place, revision=revision, trust_remote_code=trust_remote_code, **extra
        )
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"the tokenizer of target {str(path)!r} cannot be loaded: {_first_line(error)}") from error
    return tokenizer


def _source(path: str | Path) -> tuple[str, dict[str, str]]:
    path = Path(path)
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise ValueError(f"target {str(path)!r} does not exist")
        return str(path.parent), {"gguf_file": path.name}
    if path.is_dir() and not (path / "config.json").exists():
        raise ValueError(f"target {str(path)!r} has no config.json; give a model folder, a hub id or a .gguf file")
    return str(path), {}


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
