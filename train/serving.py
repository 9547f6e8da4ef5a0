"""What a run leaves behind: the drafter and, where training adapted the target, that target with its distance from the original."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from draftsmith import drafters
from draftsmith.drafters.adapters import compare
from draftsmith.drafters.base import TrainableDrafter
from draftsmith.drafters.checkpoint import replace_folder
from draftsmith.inference.decode import generate
from draftsmith.inference.sampling import Sampler
from draftsmith.inference.target import ADAPTED_FROM, Target
from draftsmith.train.config import EvalConfig

Answer = tuple[list[int], list[int]]
"""Token ids of a prompt and of what follows it."""


def serve(target: Target, drafter: TrainableDrafter, answers: Sequence[Answer] = ()) -> tuple[Target, TrainableDrafter]:
    """What decodes after training: the target, adapted if the kind does so, and the drafter made for it.

    Args:
        target: the original.
        drafter: in training; it is not changed.
        answers: where the distance of an adapted target is measured (`distance`); noted in its config with the original's name.
    """
    model = drafter.adapted_model()
    if model is None:
        return target, drafter.served(target.shape)
    adapted = Target(model, target.tokenizer, f"{target.name}, adapted")
    origin = {"path": target.name, "fingerprint": target.shape.fingerprint}
    if str(target.form):
        origin["form"] = str(target.form)
    setattr(model.config, ADAPTED_FROM, {**origin, **(distance(target, adapted, answers) if answers else {})})
    return adapted, drafter.served(adapted.shape)


def save(target: Target, drafter: TrainableDrafter, folder: Path) -> None:
    """Writes drafter/ and, of an adapted target, target/ with its tokenizer; each is replaced only once it is complete."""
    if target.adapted_from is not None:
        temporary = folder / "target.writing"
        shutil.rmtree(temporary, ignore_errors=True)
        target.model.save_pretrained(temporary)
        assert target.tokenizer is not None
        target.tokenizer.save_pretrained(temporary)
        replace_folder(temporary, folder / "target")
    drafters.save(drafter, folder / "drafter")


def distances(target: Target) -> dict[str, float]:
    """What the metrics of a run say of an adapted target; nothing of another one."""
    found = target.adapted_from or {}
    return {f"adapted/{name}": found[name] for name in ("kl", "top1_agreement") if name in found}


def origin(folder: Path) -> dict[str, Any]:
    """What the saved target of a run folder was adapted from."""
    found: dict[str, Any] = json.loads((folder / "target" / "config.json").read_text())[ADAPTED_FROM]
    return found


def plain_answers(target: Target, prompts: Sequence[list[int]], config: EvalConfig) -> list[Answer]:
    """The target's own answers to held-out prompts, as long as those that acceptance is measured on."""
    outputs = generate(
        target,
        prompts,
        max_new=config.max_new,
        sampler=Sampler(config.temperature),
        seeds=range(len(prompts)),
        max_batch=config.batch_size,
    )
    return [(prompt, output.ids) for prompt, output in zip(prompts, outputs, strict=True)]


@torch.no_grad()
def distance(original: Target, adapted: Target, answers: Sequence[Answer]) -> dict[str, float]:
    """How far an adapted target's laws are from the original's over the tokens of some answers.

    Returns:
        `kl`, the mean KL(original ‖ adapted) in nats; `top1_agreement`, the share of tokens at which both would choose the same.
    """
    total, same, tokens = 0.0, 0, 0
    for prompt, answer in answers:
        ids_1T = torch.tensor([[*prompt, *answer]], device=original.device)
        before_nD, after_nD = (t.hidden(ids_1T)[1][0, len(prompt) - 1 : -1] for t in (original, adapted))
        kl_n, _, argmax_n = compare(before_nD, after_nD, original)
        total += float(kl_n.sum())
        same += int((original.unembed(before_nD).argmax(1) == argmax_n).sum())
        tokens += len(answer)
    return {"kl": total / tokens, "top1_agreement": same / tokens}
