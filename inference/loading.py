"""The drafter that a user names: a run or drafter folder, a causal LM, or "ngram"."""

import json
from pathlib import Path

from draftsmith import drafters
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.ngram import NGram
from draftsmith.inference.target import Target
from draftsmith.inference.tokenizers import load_draft_lm


def load_drafter(name: str, target: Target) -> Drafter:
    """Loads a drafter for a target, in the target's dtype and on its device.

    Args:
        name: "ngram" for prompt lookup; a folder that training or `drafters.save` wrote; or a causal LM as
            `inference.target.load` takes it (a model folder, a .gguf file).
        target: what it drafts for.

    Raises:
        ValueError: nothing there, or not made for this target.
    """
    if name == "ngram":
        return NGram()
    if is_language_model(Path(name)):
        return load_draft_lm(name, target)
    return drafters.load(name, dtype=target.dtype, device=target.device)


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
