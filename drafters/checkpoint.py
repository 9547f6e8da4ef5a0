"""The drafter folder: `config.json` (kind, settings, target sizes) and `model.safetensors`. No pickle anywhere."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from draftsmith.drafters.base import Drafter, Shape, TrainableDrafter
from draftsmith.drafters.settings import parse
from draftsmith.drafters.vocabulary import check_hash, check_offsets, vocabulary_hash

FORMAT = "draftsmith-1"


def build(kind: str, settings: dict[str, Any], shape: Shape, where: str = "drafter") -> TrainableDrafter:
    """An untrained drafter of a kind, from plain settings and the target's sizes."""
    from draftsmith.drafters import kind_module

    module = kind_module(kind)
    model: TrainableDrafter = module.Model(parse(module.Config, settings, where), shape)
    return model


def kind_of(drafter: Drafter) -> str:
    """The name of its kind, which is that of its module."""
    return type(drafter).__module__.rsplit(".", 1)[-1]


def save(drafter: TrainableDrafter, folder: str | Path) -> None:
    """Writes the drafter folder; an older one is replaced only once the new one is complete."""
    assert not drafter.adapts_target, "save what `served` gives"
    folder = Path(folder)
    temporary = folder.with_name(folder.name + ".writing")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    record = {
        "format": FORMAT,
        "kind": kind_of(drafter),
        "config": dataclasses.asdict(drafter.config),
        "shape": dataclasses.asdict(drafter.shape),
        "vocabulary_hash": vocabulary_hash(drafter.token_ids_W),
    }
    (temporary / "config.json").write_text(json.dumps(record, indent=2) + "\n")
    state = {name: tensor.detach().contiguous().cpu() for name, tensor in drafter.state_dict().items()}
    safetensors.torch.save_file(state, temporary / "model.safetensors")
    replace_folder(temporary, folder)


def replace_folder(complete: Path, folder: Path) -> None:
    """Puts a completely written folder in place of an older one; a reader sees the old or the new one, or for a moment none."""
    old = folder.with_name(folder.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    complete.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Writes a UTF-8 file under a temporary name and renames it: a reader sees the old file or the complete new one."""
    temporary = path.with_name(path.name + ".writing")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def load(path: str | Path, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> TrainableDrafter:
    """The drafter in a drafter folder, or in the `drafter/` of a run folder, in eval mode.

    Args:
        path: the folder.
        dtype: floating-point type of the weights; None keeps the stored one.
        device: where to put it.

    Raises:
        ValueError: no drafter there, another format, missing or unexpected tensors, or wrong sizes.
    """
    folder = Path(path)
    if (folder / "drafter" / "config.json").exists():
        folder = folder / "drafter"
    config_file, weights_file = folder / "config.json", folder / "model.safetensors"
    for file in (config_file, weights_file):
        if not file.exists():
            raise ValueError(f"{path} is no drafter: {file} does not exist; give a run folder or its drafter folder")
    try:
        record = json.loads(config_file.read_text())
    except ValueError as error:  # not JSON, or not text
        raise ValueError(f"{config_file} is not valid JSON ({error}); it is damaged: restore or train again") from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise ValueError(f"{config_file} is not a draftsmith drafter (its format is not {FORMAT!r})")
    missing = [name for name in ("kind", "config", "shape") if name not in record]
    if missing:
        raise ValueError(f"{config_file} lacks {', '.join(missing)}; it is damaged: restore or train again")
    shape = parse(Shape, record["shape"], f"{config_file}: shape")
    with torch.device("meta"):
        drafter = build(record["kind"], record["config"], shape, f"{config_file}: config")
    try:
        state = safetensors.torch.load_file(weights_file, device=str(device))
    except Exception as error:  # safetensors raises its own undocumented types on damaged files
        raise ValueError(f"{weights_file} cannot be read ({error}); it is damaged: restore or train again") from error
    if "d2t" in drafter.state_dict() and "d2t" not in state:
        raise ValueError(
            f"{weights_file} lacks d2t, the map of the draft vocabulary, so its head's rows mean nothing; restore the file that "
            "training wrote, or train again"
        )
    try:
        drafter.load_state_dict(state, assign=True)
    except RuntimeError as error:
        detail = " ".join(str(error).split())
        raise ValueError(f"{weights_file} does not fit {config_file}: {detail}") from error
    if "d2t" in state:
        check_offsets(state["d2t"], shape.vocab_size)
        check_vocabulary(drafter, record.get("vocabulary_hash"), weights_file)
    drafter.to(device=device, dtype=dtype)
    drafter.requires_grad_(False)
    return drafter.eval()


def check_vocabulary(drafter: TrainableDrafter, expected: Any, weights_file: Path) -> None:
    """ValueError unless the map is the one that the config names (drafters saved before it did have none) and agrees with EAGLE-3's
    `t2d`, which says the same the other way round."""
    ids_W, state = drafter.token_ids_W, drafter.state_dict()
    if expected is not None:
        mend = "put the model.safetensors and the config.json of one and the same drafter together, or train again"
        check_hash(vocabulary_hash(ids_W), str(expected), str(weights_file), mend)
    if ids_W is not None and "t2d" in state and state["t2d"].nonzero()[:, 0].tolist() != ids_W.tolist():
        raise ValueError(
            f"{weights_file}: d2t and t2d name different draft vocabularies; it is damaged: restore or train again"
        )
