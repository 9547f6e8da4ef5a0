"""A section of `check_cuda`: losses and gradients of every kind, against the same drafter on the CPU in fp64, and packed against
padded; under bf16 autocast against fp32."""

from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from draftsmith import drafters
from draftsmith.drafters.base import TrainableDrafter, TrainingBatch
from draftsmith.drafters.unpack import one_per_row
from draftsmith.inference.target import Target
from draftsmith.scripts.check_cuda import check, relative
from draftsmith.train.data import Sequence
from draftsmith.train.features import FeatureStore

SETTINGS: dict[str, dict[str, Any]] = {
    "eagle": {"noise": 0.0, "steps": 2},
    "eagle3": {"layers": [1, 2, 3]},
    "p_eagle": {"layers": [1, 2, 3], "num_layers": 2},
    "dflash": {"layers": [1, 2, 3], "num_layers": 2, "block_size": 8, "markov_rank": 4},
    "draft_lm": {"layers": [1]},
    "hydra": {"num_heads": 3, "prefix_attention": True},
    "medusa": {"num_heads": 3},
    "medusa2": {"num_heads": 3, "adapt_rank": 4},
}
"""Of kinds whose defaults do not fit a target of four layers; tests keep small ones of their own."""


def run(device: torch.device, dry: bool) -> None:
    width, vocab, lengths = (64, 256, [23, 9, 40]) if dry else (512, 8192, [301, 17, 640, 128])
    for kind in drafters.kinds():
        try:
            reference = _drafter(kind, _target(width, vocab, torch.device("cpu"), torch.float64), vocab)
            drafter = _drafter(kind, _target(width, vocab, device, torch.float32), vocab)
        except ImportError as error:
            print(f"- {kind}: left out, {error}")
            continue
        drafter.load_state_dict(reference.state_dict())  # drawn in another precision, they would not be the same
        batch = _batch(drafter, lengths, vocab, device)
        right = _results(reference, _moved(batch, torch.device("cpu"), torch.float64))
        packed = _results(drafter, batch)
        check(f"{kind}, fp32 here against fp64 on the CPU", _worst(packed, right), 2e-3)
        check(f"{kind}, packed against padded, fp32", _worst(packed, _results(drafter, one_per_row(batch))), 1e-3)
        with torch.autocast(device.type, torch.bfloat16):
            half = drafter(batch)
        half.sum.backward()
        check(f"{kind}, bf16 autocast, loss", relative(half.sum, right[0]), 3e-2)
        check(f"{kind}, bf16 autocast, whole gradient", relative(_flat(_gradients(drafter)), _flat(right[1])), 8e-2)


def _target(width: int, vocab: int, device: torch.device, dtype: torch.dtype) -> Target:
    config = LlamaConfig(
        hidden_size=width, intermediate_size=2 * width, num_hidden_layers=4, num_attention_heads=width // 32,
        num_key_value_heads=max(1, width // 64), vocab_size=vocab, max_position_embeddings=2048, tie_word_embeddings=False,
        initializer_range=0.1, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return Target(model.to(device, dtype), None, "random weights")


def _drafter(kind: str, target: Target, vocab: int) -> TrainableDrafter:
    torch.manual_seed(1)
    settings = {"draft_vocab_size": vocab // 2, **SETTINGS.get(kind, {})}
    drafter = drafters.build(kind, settings, target.shape)
    drafter.initialise(target, torch.ones(vocab, dtype=torch.int64))
    with torch.no_grad():  # nothing starts at zero, so that no weight hides another
        for parameter in drafter.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.02)
    return drafter.to(target.device, target.dtype).train()


def _batch(drafter: TrainableDrafter, lengths: list[int], vocab: int, device: torch.device) -> TrainingBatch:
    generator = torch.Generator().manual_seed(0)
    texts = [
        Sequence(
            torch.randint(3, vocab, (length,), generator=generator).tolist(), [i >= length // 4 for i in range(length)]
        )
        for length in lengths
    ]
    return FeatureStore(drafter.target, texts, drafter.feature_layers).batch(range(len(texts)))


def _moved(batch: TrainingBatch, device: torch.device, dtype: torch.dtype) -> TrainingBatch:
    def move(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return x.to(device, dtype) if x.is_floating_point() else x.to(device)

    names = TrainingBatch.__dataclass_fields__
    return TrainingBatch(**{name: move(getattr(batch, name)) for name in names})


def _results(drafter: TrainableDrafter, batch: TrainingBatch) -> tuple[Tensor, dict[str, Tensor]]:
    parts = drafter(batch)
    parts.sum.backward()
    return parts.sum.detach(), _gradients(drafter)


def _gradients(drafter: TrainableDrafter) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in drafter.named_parameters() if p.grad is not None}
    drafter.zero_grad()
    return found


def _worst(ours: tuple[Tensor, dict[str, Tensor]], right: tuple[Tensor, dict[str, Tensor]]) -> float:
    assert ours[1].keys() == right[1].keys() and ours[1]
    scale = max(float(gradient.norm()) for gradient in right[1].values())
    deviations = [relative(ours[0], right[0])]
    for name, gradient in right[1].items():
        # A gradient that is nearly nothing is compared with the largest one.
        floor = float(gradient.norm()) / max(float(gradient.norm()), 1e-4 * scale)
        deviations.append(relative(ours[1][name], gradient) * floor)
    return max(deviations)


def _flat(gradients: dict[str, Tensor]) -> Tensor:
    return torch.cat([gradients[name].flatten().double().cpu() for name in sorted(gradients)])
