"""The peer's side of the race (`race_speculators`): speculators' EAGLE-3, with its own data set, collation, model, loss, optimizer.

    python -m draftsmith.scripts.race_theirs FOLDER DRAFTER

Its `Trainer` moves everything to an accelerator, so its step is spelled out here: forward under autocast, backward, clipping at 1,
optimizer, schedule. Two settings differ from a GPU's, where it has kernels of its own: attention is `sdpa`, the loss `eager`.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel
from speculators.models.eagle3.data import shift_batch
from speculators.train.data import ArrowDataset, CollateFn
from speculators.train.optimizers import build_optimizers
from speculators.train.trainer import TrainerConfig
from transformers import AutoConfig, get_linear_schedule_with_warmup

from draftsmith.scripts.race_worker import Contestant, serve
from draftsmith.scripts.resident import Memory


class Theirs(Contestant):
    def __init__(self, folder: Path, drafter: Path) -> None:
        self.plan, self.drafter = json.loads((folder / "race.json").read_text()), drafter
        self.data = ArrowDataset(max_len=self.plan["tokens"], datapath=folder / "theirs", on_missing="raise")
        start = safetensors.torch.load_file(drafter / "model.safetensors")
        layer = AutoConfig.from_pretrained(self.plan["target"])
        layer.num_hidden_layers = 1
        self.model: Any = Eagle3DraftModel.from_training_args(
            layer,
            t2d=start["t2d"],
            d2t=start["d2t"],
            verifier_name_or_path=self.plan["target"],
            target_layer_ids=self.plan["layers"],
            draft_vocab_size=len(start["d2t"]),
            draft_attn_impl="sdpa",
            ttt_steps=self.plan["depths"],
            norm_before_residual=False,
            norm_before_fc=True,
            norm_output=True,
        )
        missing, unexpected = self.model.load_state_dict(_renamed(start, "midlayer.", "layers.0."), strict=False)
        assert not unexpected and all(name.startswith(("embed_tokens", "verifier_")) for name in missing)
        self.model.float().train()  # the target's weights came in its own dtype
        self.arguments = {
            "ttt_steps": self.plan["depths"],
            "ttt_step_loss_decay": self.plan["decay"],
            "loss_config": resolve_loss_config("kl_div", "eager"),
        }
        config = TrainerConfig(lr=self.plan["learning_rate"], num_epochs=1, save_path="")
        self.optimizers = build_optimizers(self.model, config)
        warmup, steps = self.plan["warmup_steps"], self.plan["steps"]
        self.schedulers = [get_linear_schedule_with_warmup(o, warmup, steps) for o in self.optimizers]

    def batch(self, pack: list[int], all_supervised: bool) -> dict[str, Any]:
        samples = [self.data[index] for index in pack]
        if all_supervised:
            samples = [sample | {"loss_mask": torch.ones_like(sample["loss_mask"])} for sample in samples]
        # Exactly as long as the pack is, where its own loader would pad to the budget.
        width = sum(len(sample["input_ids"]) - 1 for sample in samples)
        collate = CollateFn(width, self.model.hidden_size, len(self.plan["layers"]), torch.bfloat16, shift_batch)
        return collate(samples)

    def step(self, batch: dict[str, Any], number: int) -> dict[str, float]:
        with torch.autocast("cpu", torch.bfloat16):
            _, loss, metrics = self.model(**batch, **self.arguments)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer, scheduler in zip(self.optimizers, self.schedulers, strict=True):
            optimizer.step()
            scheduler.step()
        depths = range(self.plan["depths"])
        return {f"accuracy/{j}": float(metrics[f"full_acc_{j}_sum"] / metrics[f"full_acc_{j}_total"]) for j in depths}

    def save(self, folder: str) -> None:
        """As a drafter folder of draftsmith's: the parts are the same, their names differ."""
        shutil.copytree(self.drafter, folder, dirs_exist_ok=True)
        kept = safetensors.torch.load_file(self.drafter / "model.safetensors").keys()
        state = _renamed(self.model.state_dict(), "layers.0.", "midlayer.")
        safetensors.torch.save_file(
            {name: state[name].contiguous() for name in kept}, Path(folder) / "model.safetensors"
        )


def _renamed(state: dict[str, Any], before: str, after: str) -> dict[str, Any]:
    return {after + n.removeprefix(before) if n.startswith(before) else n: tensor for n, tensor in state.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("drafter", type=Path)
    options = parser.parse_args()
    memory = Memory()
    serve(Theirs(options.folder, options.drafter), memory)


if __name__ == "__main__":
    main()
