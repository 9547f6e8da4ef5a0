"""What the frozen target says about the training sequences: features, last states, and its law's normaliser.

Three stores give the same batches: `online` runs the target in every step and keeps nothing, `memory` and `disk` run it
once. Stores are filled in fixed groups, so a value never depends on which step asked for it first, and a resumed run sees
the same bits. A disk store carries an identity and a run that does not match it stops.

Letters: B sequences, T positions, F captured width, D width, V vocabulary.
"""

import hashlib
import json
import sys
import time
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import NamedTuple

import safetensors.torch
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from draftsmith.drafters.base import LayerId, TrainingBatch
from draftsmith.inference.decode import pad_ids
from draftsmith.inference.target import Target
from draftsmith.train.data import Sequence

LOGIT_ELEMENTS = 1 << 23


class Captured(NamedTuple):
    """The target's view of one sequence of T tokens; the last two are 0 where nothing is supervised."""

    layers: dict[int, Tensor]
    last_TD: Tensor
    log_normaliser_T: Tensor
    argmax_T: Tensor


def capture(target: Target, sequences: SequenceOf[Sequence], layers: SequenceOf[LayerId]) -> list[Captured]:
    """Runs the target over right-padded sequences and looks at its law wherever the next token is supervised."""
    ids_BT = pad_ids([sequence.ids for sequence in sequences]).to(target.device)
    hidden = [layer for layer in layers if layer != "last"]  # "last" is kept in any case
    features_BTF, last_BTD = target.hidden(ids_BT, hidden)
    teaches_BT = torch.zeros_like(ids_BT, dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        teaches_BT[row, : len(sequence.ids) - 1] = torch.tensor(sequence.loss_mask[1:])
    normaliser_BT, argmax_BT = _law(target, last_BTD, teaches_BT)
    per_layer = dict(zip(hidden, features_BTF.split(target.shape.hidden_size, dim=-1), strict=False))

    def cut(tensor_BT: Tensor, row: int) -> Tensor:
        return tensor_BT[row, : len(sequences[row].ids)].clone()  # a view would keep the whole padded batch alive

    return [
        Captured(
            {layer: cut(tensor, row) for layer, tensor in per_layer.items()},
            cut(last_BTD, row),
            cut(normaliser_BT, row),
            cut(argmax_BT, row),
        )
        for row in range(len(sequences))
    ]


def _law(target: Target, last_BTD: Tensor, teaches_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Log-normaliser (fp32 or wider) and argmax of the target's law at the marked positions, 0 elsewhere; logits in chunks."""
    normalisers, argmaxes = [], []
    with torch.no_grad():
        for chunk in last_BTD[teaches_BT].split(max(1, LOGIT_ELEMENTS // target.shape.vocab_size)):
            logits = target.unembed(chunk)
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            largest, argmax = logits.max(-1)
            normalisers.append(logits.sub_(largest[:, None]).exp_().sum(-1).log() + largest)
            argmaxes.append(argmax)
    normaliser_BT = torch.zeros(teaches_BT.shape, dtype=normalisers[0].dtype, device=teaches_BT.device)
    normaliser_BT[teaches_BT] = torch.cat(normalisers)
    argmax_BT = torch.zeros(teaches_BT.shape, dtype=torch.int64, device=teaches_BT.device)
    argmax_BT[teaches_BT] = torch.cat(argmaxes)
    return normaliser_BT, argmax_BT


def collate(
    sequences: SequenceOf[Sequence],
    captured: SequenceOf[Captured],
    layers: SequenceOf[LayerId],
    device: torch.device,
    epoch: int = 0,
) -> TrainingBatch:
    """Right-padded batch with the given layers as features; padding is zero and unsupervised."""

    def pad(tensors: Iterable[Tensor]) -> Tensor:
        return pad_sequence(list(tensors), batch_first=True).to(device)

    last_BTD = pad(c.last_TD for c in captured)
    features = [last_BTD if layer == "last" else pad(c.layers[layer] for c in captured) for layer in layers]
    return TrainingBatch(
        ids_BT=pad_ids([sequence.ids for sequence in sequences]).to(device),
        loss_mask_BT=pad(torch.tensor(sequence.loss_mask) for sequence in sequences),
        features_BTF=torch.cat(features, dim=-1) if features else last_BTD[..., :0],
        last_BTD=last_BTD,
        log_normaliser_BT=pad(c.log_normaliser_T for c in captured),
        argmax_BT=pad(c.argmax_T for c in captured),
        epoch=epoch,
    )


class FeatureStore:
    """Gives training batches; see the module's docstring for the three kinds of store."""

    def __init__(
        self,
        target: Target,
        sequences: SequenceOf[Sequence],
        layers: SequenceOf[LayerId],
        *,
        store: str = "online",
        folder: str | Path | None = None,
        capture_batch: int = 16,
    ) -> None:
        self.target, self.sequences, self.layers = target, sequences, tuple(layers)
        self.store = store
        order = sorted(range(len(sequences)), key=lambda index: (len(sequences[index].ids), index))
        self.groups = [order[i : i + capture_batch] for i in range(0, len(order), capture_batch)]
        self._memory: dict[int, Captured] = {}
        self._folder = Path(folder) if folder is not None else None
        self._place = {index: (g, k) for g, group in enumerate(self.groups) for k, index in enumerate(group)}

    def batch(self, indices: SequenceOf[int], epoch: int = 0) -> TrainingBatch:
        """The training batch of the given sequences, on the target's device."""
        chosen = [self.sequences[index] for index in indices]
        if self.store == "online":
            captured = capture(self.target, chosen, self.layers)
        elif self.store == "memory":
            captured = [self._memory[index] for index in indices]
        else:
            captured = [self._read(index) for index in indices]
        return collate(chosen, captured, self.layers, self.target.device, epoch)

    def fill(self) -> None:
        """Runs the target over everything that the store lacks; nothing to do online. Shows progress on stderr."""
        if self.store == "online":
            return
        if self._folder is not None:
            self._open_folder(self._folder)
        missing = [number for number in range(len(self.groups)) if not self._holds(number)]
        total = sum(len(self.sequences[index].ids) for number in missing for index in self.groups[number])
        start, tokens, shown = time.perf_counter(), 0, 0.0
        for number in missing:
            group = self.groups[number]
            chosen = [self.sequences[index] for index in group]
            captured = capture(self.target, chosen, self.layers)
            if self._folder is not None:
                self._write(number, captured)
            else:
                self._memory |= dict(zip(group, captured, strict=True))
            tokens += sum(len(sequence.ids) for sequence in chosen)
            elapsed = time.perf_counter() - start
            if elapsed - shown > 10 or number == missing[-1]:
                shown = elapsed
                rate = tokens / elapsed
                left = (total - tokens) / rate / 60
                print(
                    f"features: {tokens:,} of {total:,} tokens, {rate:.0f} tokens/s, {left:.1f} min left",
                    file=sys.stderr,
                )

    def bytes_per_token(self) -> int:
        """What a stored token takes."""
        width = self.target.shape.hidden_size
        return (len(set(self.layers) | {"last"})) * width * self.target.dtype.itemsize + 12

    def identity(self) -> dict[str, str]:
        """What a stored value depends on (which layers a store holds is seen from its files)."""
        digest = hashlib.sha256(json.dumps([[s.ids, s.loss_mask] for s in self.sequences]).encode())
        return {
            "fingerprint": self.target.shape.fingerprint,
            "dtype": str(self.target.dtype),
            "sequences": digest.hexdigest()[:16],  # of token ids: tokenizer, template and data at once
            "group": str(len(self.groups[0])),
        }

    def _open_folder(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        file, identity = folder / "identity.json", self.identity()
        if file.exists():
            there = json.loads(file.read_text())
            differing = [name for name in identity if there.get(name) != identity[name]]
            if differing:
                raise ValueError(
                    f"the feature store {folder} was made with other {', '.join(differing)}; "
                    "give another features.folder, or delete this one"
                )
        else:
            temporary = file.with_suffix(".writing")
            temporary.write_text(json.dumps(identity, indent=2))
            temporary.replace(file)

    def _holds(self, group: int) -> bool:
        """Whether the folder has this group with all layers that are wanted; another kind may have stored it with more."""
        if self._folder is None or not self._file(group).exists():
            return False
        with safetensors.safe_open(self._file(group), framework="pt") as file:
            names = set(file.keys())
        return all(layer == "last" or f"0.layer{layer}" in names for layer in self.layers)

    def _file(self, group: int) -> Path:
        assert self._folder is not None
        return self._folder / f"group-{group:06d}.safetensors"

    def _write(self, group: int, captured: SequenceOf[Captured]) -> None:
        tensors: dict[str, Tensor] = {}
        for k, c in enumerate(captured):
            tensors |= {f"{k}.layer{layer}": tensor for layer, tensor in c.layers.items()}
            tensors |= {f"{k}.last": c.last_TD, f"{k}.normaliser": c.log_normaliser_T, f"{k}.argmax": c.argmax_T}
        temporary = self._file(group).with_suffix(".writing")
        safetensors.torch.save_file({name: tensor.cpu() for name, tensor in tensors.items()}, temporary)
        temporary.replace(self._file(group))

    def _read(self, index: int) -> Captured:
        group, k = self._place[index]
        with safetensors.safe_open(self._file(group), framework="pt") as file:
            layers = {layer: file.get_tensor(f"{k}.layer{layer}") for layer in self.layers if layer != "last"}
            last, normaliser, argmax = (file.get_tensor(f"{k}.{name}") for name in ("last", "normaliser", "argmax"))
            return Captured(layers, last, normaliser, argmax)
