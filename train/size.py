"""What a run's drafter weighs, worked out on the meta device: nothing is downloaded or allocated."""

import torch

from draftsmith import drafters
from draftsmith.drafters.base import Shape
from draftsmith.inference.architecture import describe
from draftsmith.train.config import RunConfig


def describe_size(config: RunConfig) -> str:
    """One line with the drafter's parameters and bytes; ValueError if the target's sizes are not to be had."""
    shape = config.target.shape or _shape_from_config(config)
    with torch.device("meta"):
        drafter = drafters.build(config.kind, config.drafter_settings, shape)
    parameters = sum(p.numel() for p in drafter.parameters())
    itemsize: int = getattr(torch, config.target.dtype).itemsize
    return (
        f"{config.kind} for {config.target.path}: {parameters / 1e6:.1f} M parameters, "
        f"{parameters * itemsize / 1e6:.0f} MB in {config.target.dtype} beside the target"
    )


def _shape_from_config(config: RunConfig) -> Shape:
    from transformers import AutoConfig

    section = config.target
    try:
        found = AutoConfig.from_pretrained(
            section.path, revision=section.revision, trust_remote_code=section.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise ValueError(f"target {section.path!r} cannot be read; give target.shape in the config") from error
    return describe(found.get_text_config())
