"""Training from every feature store ends with the same weights, through the real loop."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
import yaml

from draftsmith import drafters
from draftsmith.scripts.sweep import read_runs
from draftsmith.train import loop, run
from draftsmith.train.config import read

STORES = ("online", "memory", "disk", "hybrid")


@pytest.fixture
def config(toy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """20 conversations of different lengths, batches of 4, two epochs of 5 steps."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    lines = []
    for i in range(20):
        answer = " ".join(f"the fox {j * i % 7} jumps" for j in range(1 + i % 6))
        messages = [
            {"role": "user", "content": "hello " * (1 + i % 3) + str(i)},
            {"role": "assistant", "content": answer},
        ]
        lines.append(json.dumps({"id": f"c{i}", "messages": messages}))
    (tmp_path / "train.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "held.jsonl").write_text('{"messages": [{"role": "user", "content": "hello there"}]}\n')
    settings = {
        "output": str(tmp_path / "run"),
        "target": {"path": str(toy_folder), "dtype": "float32"},
        "drafter": {"kind": "eagle3", "layers": [1, 2, 3], "draft_vocab_size": 48},
        "data": {"train": [str(tmp_path / "train.jsonl")]},
        "optim": {"learning_rate": 3e-3},
        "loop": {"epochs": 2, "batch_size": 4, "precision": "float32", "checkpoint_every": 9},
        "eval": {"prompts": str(tmp_path / "held.jsonl"), "every": 100, "max_new": 4, "depth": 3},
        "tracking": {"tracker": "none"},
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def weights(config: Path, store: str, *overrides: str, name: str | None = None) -> dict[str, torch.Tensor]:
    """After the last step but one, as they are trained, and after the last, as they are served."""
    name = name or store
    features = {"store": store, "folder": str(config.parent / f"{name}-f") if store in ("disk", "hybrid") else None}
    settings = [f"features.{key}={json.dumps(value)}" for key, value in features.items()]
    folder = run.train(read(config, [*settings, *overrides, f"output={config.parent / name}"]))
    trained = safetensors.torch.load_file(folder / "checkpoints" / "step-00000009" / "model.safetensors")
    served = drafters.load(folder).state_dict()
    return trained | {f"served.{key}": tensor for key, tensor in served.items()}


def largest_difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Relative to the largest weight of each tensor."""
    assert ours.keys() == theirs.keys()
    floating = [name for name, tensor in ours.items() if tensor.is_floating_point()]
    return max(
        float((ours[n].float() - theirs[n].float()).abs().max() / theirs[n].float().abs().max()) for n in floating
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_store_gives_the_same_weights_bit_for_bit(dtype: str, config: Path) -> None:
    setting = f"target.dtype={dtype}"
    online = weights(config, "online", setting)
    for store in STORES[1:]:
        ours = weights(config, store, setting)
        assert all(torch.equal(ours[name], tensor) for name, tensor in online.items()), store
    again = weights(
        config, "hybrid", setting, f"features.folder={config.parent / 'disk-f'}", name="from the disk store"
    )
    assert all(torch.equal(again[name], tensor) for name, tensor in online.items())


def test_the_comparison_notices_a_rounding_of_the_features(config: Path) -> None:
    """The control: in eight bits the weights differ, and by how much shows that the others could not have passed by chance."""
    online = weights(config, "online")
    eight_bits = weights(config, "disk", "features.dtype=int8")
    assert largest_difference(eight_bits, online) > 1e-4


def test_eight_bits_train_the_same_weights_from_every_store(config: Path) -> None:
    online = weights(config, "online", "features.dtype=float8")
    disk = weights(config, "disk", "features.dtype=float8")
    assert all(torch.equal(disk[name], tensor) for name, tensor in online.items())


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.1)])
def test_sequences_captured_together_train_the_same_weights_within_a_tolerance(
    dtype: str, tolerance: float, config: Path
) -> None:
    """Ten steps of AdamW at a rate of 3e-3; the tolerance is that of docs/data_store.md."""
    settings = [f"target.dtype={dtype}", "features.capture_batch=8"]
    assert 0 < largest_difference(weights(config, "disk", *settings), weights(config, "online", *settings)) < tolerance


def test_a_hybrid_run_that_was_interrupted_goes_on_with_what_it_stored(
    config: Path, toy: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    online = weights(config, "online")
    plain = loop.set_rates
    calls: list[int] = []

    def stops(*arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        plain(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "set_rates", stops)
        with pytest.raises(KeyboardInterrupt):
            weights(config, "hybrid")
    ours = weights(config, "hybrid")
    assert all(torch.equal(ours[name], tensor) for name, tensor in online.items())


def test_a_grid_of_dtypes_is_one_command_and_shares_one_folder(config: Path) -> None:
    """How the cost of a dtype is measured: `draftsmith train CONFIG --grid features.dtype=target,float8,int8`."""
    folder = config.parent / "features"
    grid = ["features.dtype=target,float8,int8"]
    runs = read_runs([str(config)], ["features.store=disk", f"features.folder={folder}", "loop.epochs=1"], grid)
    trained = [drafters.load(run.train(one)).state_dict() for one in runs]
    assert len({one.output for one in runs}) == 3
    names = {file.name.removesuffix("-00000.bin") for file in folder.glob("*.bin")}
    states = ("layer1", "layer2", "layer3", "last")
    assert names == {f"{state}-{dtype}" for state in states for dtype in ("target", "float8", "int8")}
    assert all(largest_difference(trained[0], other) > 1e-5 for other in trained[1:])
