"""A target with a LoRA adapter (Hu et al. 2021, arXiv 2106.09685) as peft saves it: beside the weights, or added to them.

Both give the same function up to rounding, and one fingerprint, made of the checkpoint's and the adapter's. What trains low-rank
adapters is `drafters.adapters`.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from draftsmith.inference.architecture import digest_tensors

FILES = ("adapter_config.json", "adapter_model.safetensors")


def add_adapter(model: Any, adapter: str | Path, weights: str, *, merge: bool) -> tuple[Any, str]:
    """Puts an adapter into a model.

    Args:
        model: the Hugging Face model; it is changed.
        adapter: a folder or a hub id.
        weights: fingerprint of the model without it.
        merge: add it to the weights; else it runs beside them, in the dtype of each layer.

    Returns:
        the model with it, and the fingerprint of both.

    Raises:
        ValueError: no adapter there, another method than LoRA, or one that was not made for this model.
    """
    try:
        from peft import LoraModel, PeftConfig, set_peft_model_state_dict
    except ImportError as error:
        raise ValueError(f"target.adapter needs peft ({error}); install draftsmith[lora], or peft alone") from error
    folder = _folder(adapter)
    tensors = _read(folder / FILES[1])
    _check_method(folder / FILES[0])
    try:
        config = PeftConfig.from_pretrained(str(folder))
    except (OSError, ValueError, TypeError, KeyError) as error:  # fields that peft does not know
        raise ValueError(f"{folder / FILES[0]} cannot be read: {' '.join(str(error).split())}") from error
    _check(config, str(adapter), model, merge)
    config.inference_mode = True
    try:
        adapted = LoraModel(model, config, "default").eval()
        for name, parameter in adapted.named_parameters():  # and no buffer: rotary frequencies stay fp32
            if "lora_" in name:
                parameter.data = parameter.data.to(model.get_output_embeddings().weight.dtype)
        # Names in the file begin with the wrapper around this one.
        result = set_peft_model_state_dict(
            adapted, {name.removeprefix("base_model."): x for name, x in tensors.items()}
        )
    except (ValueError, RuntimeError) as error:
        raise ValueError(
            f"adapter {str(adapter)!r} does not fit the target: {' '.join(str(error).split())[:400]}; give the target that it was "
            f"trained on (its config names {config.base_model_name_or_path!r})"
        ) from error
    absent = [name for name in result.missing_keys if ".lora_" in name]
    if absent or result.unexpected_keys:
        odd = ", ".join([*absent, *result.unexpected_keys][:3])
        raise ValueError(
            f"adapter {str(adapter)!r} does not fit the target: {len(absent)} of its matrices are not in {FILES[1]} and "
            f"{len(result.unexpected_keys)} there have no place in the target ({odd}); give the target that it was trained on "
            f"(its config names {config.base_model_name_or_path!r})"
        )
    named = hashlib.sha256(f"{weights} {_scaling(config)} {digest_tensors(tensors)}".encode()).hexdigest()[:16]
    return adapted.merge_and_unload(safe_merge=True) if merge else adapted.model, named


def _folder(adapter: str | Path) -> Path:
    """The adapter's folder, fetched if it is a hub id; ValueError unless both files are there."""
    folder = Path(adapter)
    if not folder.exists():
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

        try:
            folder = Path(snapshot_download(str(adapter), allow_patterns=[*FILES]))
        except (OSError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
            raise ValueError(
                f"adapter {str(adapter)!r} is no folder, and as an adapter of the hub it cannot be had: "
                f"{' '.join(str(error).split())}"
            ) from error
    for name in FILES:
        if not (folder / name).is_file():
            raise ValueError(
                f"adapter {str(adapter)!r} has no {name}; give a folder as peft's save_pretrained writes it (safetensors)"
            )
    return folder


def _read(file: Path) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load_file(file)
    except Exception as error:  # safetensors raises its own undocumented types on damaged files
        raise ValueError(f"{file} cannot be read ({error}); it is damaged: restore it") from error


def _check_method(file: Path) -> None:
    """ValueError unless an adapter's config is that of a LoRA adapter."""
    try:
        record = json.loads(file.read_text())
    except ValueError as error:  # not JSON, or not text
        raise ValueError(f"{file} is not valid JSON ({error}); it is damaged: restore it") from error
    method = record.get("peft_type") if isinstance(record, dict) else None
    if method != "LORA":
        raise ValueError(f"{file} has the peft_type {method!r}; only LORA can be used")


def _check(config: Any, adapter: str, model: Any, merge: bool) -> None:
    """ValueError unless it changes the decoder's layers alone."""
    if config.modules_to_save:
        raise ValueError(
            f"adapter {adapter!r} brings whole modules ({', '.join(config.modules_to_save)}) beside its matrices; merge it into "
            "its model with peft (merge_and_unload), save that, and give it as the target"
        )
    ends = {name.rsplit(".", 1)[-1] for name, module in model.named_modules() if module in _whole(model)}
    named = config.target_modules if isinstance(config.target_modules, set | list | tuple) else ()
    outer = sorted(ends & {str(module).rsplit(".", 1)[-1] for module in named})
    if outer and not merge:
        raise ValueError(
            f"adapter {adapter!r} changes {', '.join(outer)}, which drafters read as plain matrices; give merge_adapter: true"
        )


def _whole(model: Any) -> list[Any]:
    return [model.get_input_embeddings(), model.get_output_embeddings()]


def _scaling(config: Any) -> str:
    """What an adapter's function depends on besides its matrices."""
    fields = ("r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "fan_in_fan_out")
    return json.dumps({name: getattr(config, name) for name in fields}, sort_keys=True, default=str)
