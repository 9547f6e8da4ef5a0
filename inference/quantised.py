"""A target whose decoder's matrices are quantised by bitsandbytes while they are loaded; embedding, norms and head are not."""

import json
import logging
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    cached_file,
    is_bitsandbytes_available,
)

from draftsmith.inference.architecture import digest_samples, sample
from draftsmith.inference.form import Quantisation


def bitsandbytes(quantisation: Quantisation, config: Any, name: str, dtype: torch.dtype | None) -> Any:
    """transformers' settings: 8bit is LLM.int8 (Dettmers et al. 2022, arXiv 2208.07339), 4bit is NF4 with doubly quantised scales
    (Dettmers et al. 2023, arXiv 2305.14314).

    Args:
        quantisation: which.
        config: the model's.
        name: of the target, for messages.
        dtype: of activations; None takes the checkpoint's own.

    Raises:
        ValueError: no bitsandbytes, or a checkpoint that is quantised already.
    """
    from transformers import BitsAndBytesConfig

    if not is_bitsandbytes_available():
        raise ValueError(
            f"target.quantisation: {quantisation} needs bitsandbytes; install draftsmith[quantised], or leave it out"
        )
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(f"target {name!r} is a quantised checkpoint already; leave quantisation out")
    # One line for every layer, that bf16 activations become fp16.
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    if quantisation == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype or config.dtype or torch.float32,
    )


def checkpoint_fingerprint(model: Any, place: str, revision: str | None) -> str:
    """`fingerprint` of the model as it would be without quantising: a few numbers of each tensor are read from the checkpoint.

    Raises:
        ValueError: the checkpoint's tensors have other names than the model's parameters.
    """
    files = _files(place, revision)
    found: dict[str, tuple[tuple[int, ...], Tensor]] = {}
    absent = []
    for name, _ in model.named_parameters():
        if name not in files:
            absent.append(name)
            continue
        with safe_open(files[name], framework="pt") as file:  # mapped: only what is sampled is read
            tensor = file.get_tensor(name)
            found[name] = tuple(tensor.shape), sample(tensor)
    if absent:
        raise ValueError(
            f"target {place!r} cannot be quantised: its checkpoint has no tensors of the names {', '.join(absent[:3])} "
            f"({len(absent)} in all), so its weights could not be named; leave quantisation out"
        )
    return digest_samples(found)


def _files(place: str, revision: str | None) -> dict[str, str]:
    """The file of each tensor of a checkpoint."""
    options: dict[str, Any] = {"revision": revision, "_raise_exceptions_for_missing_entries": False}
    index = cached_file(place, SAFE_WEIGHTS_INDEX_NAME, **options)
    if index is not None:
        names: dict[str, str] = json.loads(Path(index).read_text())["weight_map"]
        return {tensor: str(Path(index).parent / file) for tensor, file in names.items()}
    single = cached_file(place, SAFE_WEIGHTS_NAME, **options)
    if single is None:
        return {}
    with safe_open(single, framework="pt") as file:
        return dict.fromkeys(file.keys(), single)
