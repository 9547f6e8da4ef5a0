"""draftsmith's side of the race (`race_speculators`): EAGLE-3 as `train` trains it, on stored features.

python -m draftsmith.scripts.race_ours FOLDER DRAFTER [--freeze-head]
"""

import argparse
import dataclasses
import json
from pathlib import Path

import safetensors.torch
import torch
from torch import nn

from draftsmith import drafters
from draftsmith.drafters.base import TrainableDrafter, TrainingBatch
from draftsmith.inference.load_target import load
from draftsmith.scripts.race_worker import Contestant, serve
from draftsmith.scripts.resident import Memory
from draftsmith.train.captured import Captured, from_records
from draftsmith.train.config import OptimConfig
from draftsmith.train.data import Sequence
from draftsmith.train.features import collate
from draftsmith.train.optim import make_optimizers, set_rates


class Ours(Contestant):
    def __init__(self, folder: Path, drafter: str, freeze_head: bool) -> None:
        self.folder, self.plan = folder, json.loads((folder / "race.json").read_text())
        self.sequences = [Sequence(**json.loads(line)) for line in (folder / "sequences.jsonl").open()]
        self.target = load(self.plan["target"], dtype=torch.bfloat16)
        # Features are stored: embedding and head are all that is read of the target, and all that stays of its file.
        self.target.layers = self.target.model.model.layers = nn.ModuleList()
        for parameter in self.target.model.parameters():
            parameter.data = parameter.data.clone()
        model = drafters.load(drafter)
        assert isinstance(model, TrainableDrafter)
        self.drafter = model.requires_grad_(True).train()
        if freeze_head:
            self.drafter.lm_head.requires_grad_(False)
        self.drafter.bind(self.target)
        self.config = OptimConfig(
            learning_rate=self.plan["learning_rate"],
            betas=(0.9, 0.999),
            weight_decay=0.01,
            schedule="linear",
            warmup=self.plan["warmup_steps"] / self.plan["steps"],
            final=0.0,
        )
        self.optimizers = make_optimizers(self.drafter, self.config)

    def batch(self, pack: list[int], all_supervised: bool) -> TrainingBatch:
        sequences = [self.sequences[index] for index in pack]
        if all_supervised:
            sequences = [dataclasses.replace(s, loss_mask=[True] * len(s.ids)) for s in sequences]
        captured = [self._captured(index) for index in pack]
        return collate(sequences, captured, self.drafter.feature_layers, torch.bfloat16, torch.device("cpu"))

    def _captured(self, index: int) -> Captured:
        read = safetensors.torch.load((self.folder / "ours" / f"{index}.safetensors").read_bytes())
        law = {name: read[name] for name in ("normaliser", "argmax")}
        layers = {layer: {"codes": read[f"layer{layer}"]} for layer in self.plan["layers"]}
        return from_records({**layers, "last": {"codes": read["last"], **law}})

    def step(self, batch: TrainingBatch, number: int) -> dict[str, float]:
        with torch.autocast("cpu", torch.bfloat16):
            parts = self.drafter(batch)
        (parts.sum / parts.count).backward()
        set_rates(self.optimizers, number, self.plan["steps"], self.config)
        nn.utils.clip_grad_norm_(self.drafter.parameters(), self.config.clip_norm)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        accuracy_J = parts.metrics["correct"] / parts.metrics["supervised"]
        return {f"accuracy/{j}": float(accuracy) for j, accuracy in enumerate(accuracy_J)}

    def save(self, folder: str) -> None:
        drafters.save(self.drafter, folder)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("drafter")
    parser.add_argument("--freeze-head", action="store_true")
    options = parser.parse_args()
    memory = Memory()
    serve(Ours(options.folder, options.drafter, options.freeze_head), memory)


if __name__ == "__main__":
    main()
