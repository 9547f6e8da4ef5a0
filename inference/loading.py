"""The drafter that a user names: a run or drafter folder, a causal LM, "ngram", "suffix", or "mtp"."""

import json
import re
from pathlib import Path

from draftsmith import drafters
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.ngram import NGram
from draftsmith.drafters.suffix import Suffix
from draftsmith.inference.native_mtp import load_native_mtp
from draftsmith.inference.target import Target
from draftsmith.inference.tokenizers import load_draft_lm

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def load_drafter(name: str, target: Target) -> Drafter:
    """Loads a drafter for a target, in the target's dtype and on its device.

    Args:
        name: "ngram" for prompt lookup, "suffix" for suffix decoding, "mtp" for the head in the target's own folder; a folder
            that training or `drafters.save` wrote; or a causal LM as `inference.load_target.load` takes it (a model folder, a
            .gguf file, a hub id).
        target: what it drafts for.

    Raises:
        ValueError: nothing there, or not made for this target.
    """
    if name == "ngram":
        return NGram()
    if name == "suffix":
        return Suffix()
    if name == "mtp":
        return load_native_mtp(target.name, target)
    if is_language_model(Path(name)):
        return load_draft_lm(name, target)
    if HUB_ID.fullmatch(name) and not Path(name).exists():
        try:
            return load_draft_lm(name, target)
        except ValueError as error:
            raise ValueError(
                f"there is no folder {name!r}, and as a model of the hub it cannot be had: {error}"
            ) from error
    drafter = drafters.load(name, dtype=target.dtype, device=target.device)
    run = Path(name) if (Path(name) / "drafter").exists() else Path(name).parent
    try:
        drafter.check_target(target.shape)
    except ValueError as error:
        if not (run / "target" / "config.json").exists():
            raise
        raise ValueError(
            f"{error}: training adapted it too, it is {run / 'target'} (--target {run / 'target'})"
        ) from error
    return drafter


def is_language_model(path: Path) -> bool:
    """Whether there is a Hugging Face model or a GGUF file, and no drafter of ours."""
    if path.suffix.lower() == ".gguf":
        return True
    config = path / "config.json"
    if (path / "drafter").exists() or not config.is_file():
        return False
    try:
        return "model_type" in json.loads(config.read_text())
    except (ValueError, TypeError):  # a damaged file: whoever reads it says so
        return False
