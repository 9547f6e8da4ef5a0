"""A section of `check_cuda`: what training EAGLE-3 and Medusa takes for a target of Llama-3.1-8B's shape with random weights, as
the shipped configs set them up, on one device. Weights are made on the device; nothing is downloaded.

Printed for each kind: tokens/s of the optimizer steps alone (features ready) and with the target's forward pass in each of them,
as `features.store: online` has it; the share of the device's peak (`train.meter`); peak memory, the target included.
"""

import time
from collections.abc import Callable

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from draftsmith import drafters
from draftsmith.configs import locate
from draftsmith.drafters.base import Load, TrainingBatch
from draftsmith.drafters.compiling import compile_training
from draftsmith.inference.target import Target
from draftsmith.scripts.benchmark_training import optimizer_step
from draftsmith.train.config import FeaturesConfig, RunConfig, read
from draftsmith.train.data import Sequence
from draftsmith.train.features import FeatureStore
from draftsmith.train.meter import batch_flops, peak_tflops
from draftsmith.train.optim import make_optimizers

KINDS = ("eagle3", "medusa")
STEPS, WARM_UP = 8, 3


def run(device: torch.device, dry: bool) -> None:
    target = _target(device, dry)
    size = sum(parameter.numel() for parameter in target.model.parameters())
    print(
        f"Target: {size / 1e9:.2f} G parameters, bf16, random; texts of {'32' if dry else '512 to 2,048'} tokens, packed."
    )
    print()
    print(
        "| kind | tokens of a step | features ready, tokens/s | supervised | MFU | online, tokens/s | MFU | peak, GiB |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for kind in KINDS:
        _measure(read(locate(f"configs/{kind}_llama31_8b.yaml")), target, device, dry)


def _measure(config: RunConfig, target: Target, device: torch.device, dry: bool) -> None:
    settings = {**config.drafter_settings, **({"draft_vocab_size": 256} if dry else {})}
    if dry and config.kind == "eagle3":
        settings["layers"] = [1, 2, 3]
    torch.manual_seed(0)
    drafter = drafters.build(config.kind, settings, target.shape)
    drafter.initialise(target, torch.ones(target.shape.vocab_size, dtype=torch.int64))
    drafter.to(device, torch.float32).train()
    compile_training(drafter, device.type == "cuda")
    optimizers = make_optimizers(drafter, config.optim)
    texts = _texts([32, 32, 32] if dry else [512, 2048, 1024, 512], target.shape.vocab_size)
    store = FeatureStore(
        target, texts, drafter.feature_layers, FeaturesConfig(store="online", capture_batch=len(texts))
    )
    ready = store.batch(range(len(texts)))
    load = Load(ready.ids_BT.numel(), ready.layout.num_supervised, len(texts))

    def step(batch: TrainingBatch) -> None:
        optimizer_step(drafter, batch, optimizers, config.optim.clip_norm)

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    alone = _seconds(lambda: step(ready), device, dry)
    online = _seconds(lambda: step(store.batch(range(len(texts)))), device, dry)
    peak, known = "-", peak_tflops(device, None)
    if device.type == "cuda":
        peak = f"{torch.cuda.max_memory_allocated() / 2**30:.1f}"
    shares = ["-", "-"]
    if known is not None:
        flops = [batch_flops(drafter, asked)(load) for asked in (None, target)]
        shares = [f"{f / s / known / 1e12:.1%}" for f, s in zip(flops, (alone, online), strict=True)]
    cells = [
        config.kind,
        f"{load.tokens:,}",
        f"{load.tokens / alone:,.0f}",
        f"{load.supervised / alone:,.0f}",
        shares[0],
        f"{load.tokens / online:,.0f}",
        shares[1],
        peak,
    ]
    print(f"| {' | '.join(cells)} |", flush=True)


def _seconds(step: Callable[[], None], device: torch.device, dry: bool) -> float:
    """Mean over steps that follow each other without waiting, as in training."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    for _ in range(1 if dry else WARM_UP):
        step()
    wait()
    count, start = 2 if dry else STEPS, time.perf_counter()
    for _ in range(count):
        step()
    wait()
    return (time.perf_counter() - start) / count


def _target(device: torch.device, dry: bool) -> Target:
    shape = read(locate("configs/eagle3_llama31_8b.yaml")).target.shape
    assert shape is not None
    sizes = {
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "vocab_size": shape.vocab_size,
    }
    if dry:
        sizes = {**dict.fromkeys(sizes, 4), "hidden_size": 128, "intermediate_size": 256, "vocab_size": 512}
    config = LlamaConfig(
        **sizes, max_position_embeddings=8192, rms_norm_eps=shape.rms_norm_eps, tie_word_embeddings=False,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return Target(model, None, "random weights")


def _texts(lengths: list[int], vocab: int) -> list[Sequence]:
    """Random ones; the first third of each is prompt."""
    generator = torch.Generator().manual_seed(0)
    return [
        Sequence(
            torch.randint(3, vocab, (length,), generator=generator).tolist(), [i >= length // 3 for i in range(length)]
        )
        for length in lengths
    ]
