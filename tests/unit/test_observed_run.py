"""What a run says of itself: names of figures, a profiled window, compiled layers, and a batch that is not finite; toy runs in this
process."""

import dataclasses
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
import yaml

from draftsmith import drafters
from draftsmith.drafters.compiling import compile_layers
from draftsmith.train import run
from draftsmith.train.config import FeaturesConfig, read
from draftsmith.train.data import Sequence
from draftsmith.train.features import FeatureStore

DOCS = Path(__file__).parents[2] / "docs" / "training_tracking.md"
STEPS = 8
HIDDEN = "ignore:The .grad attribute of a Tensor that is not a leaf"
"""Dynamo hides this warning of its own, but not from a filter that makes errors of warnings."""


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")


@pytest.fixture
def config(toy: SimpleNamespace, toy_folder: Path, tmp_path: Path) -> Path:
    """8 conversations, batches of 2, 2 epochs: 8 steps, logged every 2, checkpoints every 3."""
    lines = []
    for i in range(8):
        answer = " ".join(f"the fox {j * i % 7} jumps" for j in range(2 + i % 4))
        messages = [{"role": "user", "content": f"hello {i}"}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"messages": messages}))
    (tmp_path / "train.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "held.jsonl").write_text('{"messages": [{"role": "user", "content": "hello there"}]}\n')
    settings = {
        "output": str(tmp_path / "run"),
        "target": {"path": str(toy_folder), "dtype": "float32"},
        "drafter": {"kind": "medusa", **toy.KIND_SETTINGS["medusa"]},
        "data": {"train": [str(tmp_path / "train.jsonl")]},
        "features": {"store": "memory"},
        "optim": {"learning_rate": 3e-3},
        "loop": {"epochs": 2, "batch_size": 2, "precision": "float32", "log_every": 2, "checkpoint_every": 3},
        "eval": {"prompts": str(tmp_path / "held.jsonl"), "every": 4, "max_new": 8, "depth": 3},
        "tracking": {"tracker": "none"},
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def train(config: Path, name: str, *overrides: str) -> Path:
    return run.train(read(config, [*overrides, f"output={config.parent / name}"]))


def figures(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_every_name_in_metrics_jsonl_is_documented_and_every_documented_name_is_there(config: Path) -> None:
    documented = set(re.findall(r"^\| `([^`]+)`", DOCS.read_text().split("## Figures")[1].split("\n## ")[0], re.M))
    elsewhere = {"memory/allocated_peak_gb", "memory/reserved_peak_gb"}  # on a GPU
    elsewhere |= {"regression/i", "adapted_kl", "adapted/kl", "adapted/top1_agreement"}  # other kinds
    assert elsewhere < documented
    names = {
        re.sub(r"(?<=[/_])\d+$", "i", name)
        for line in figures(train(config, "run", "loop.peak_tflops=1"))
        for name in line
    }
    assert names - {"step"} == documented - elsewhere


def test_a_profiled_window_leaves_a_trace_and_a_table(config: Path) -> None:
    folder = train(config, "run", "loop.profile={start: 3, steps: 2}")
    trace = json.loads((folder / "profile" / "trace.json").read_text())
    names = [event.get("name") for event in trace["traceEvents"]]
    assert "aten::mm" in names and "_FusedBackward" in names
    assert sum(name == "Optimizer.step#AdamW.step" for name in names) == 2  # the two steps of the window
    table = (folder / "profile" / "operators.txt").read_text()
    assert table.startswith("steps 3 to 4\n") and "aten::mm" in table
    assert not (train(config, "plain") / "profile").exists()


def test_a_window_behind_the_end_of_a_run_is_cut(config: Path) -> None:
    folder = train(config, "run", f"loop.profile={{start: {STEPS}, steps: 5}}")
    assert (folder / "profile" / "operators.txt").read_text().startswith(f"steps {STEPS} to {STEPS}\n")


@pytest.mark.filterwarnings(HIDDEN, "ignore::DeprecationWarning")  # inductor uses what PyTorch has deprecated
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="torch.compile needs a C++ compiler")
def test_a_compiled_run_has_the_same_losses_and_names_in_its_checkpoints(config: Path) -> None:
    plain, compiled = (train(config, name, f"loop.compile={name}") for name in ("false", "true"))
    for name in ("loss", "gradient_norm"):
        ours, theirs = ([line[name] for line in figures(folder) if name in line] for folder in (compiled, plain))
        assert len(ours) == 4 and ours == pytest.approx(theirs, rel=1e-4)
    ours, theirs = (
        safetensors.torch.load_file(folder / "checkpoints" / "step-00000006" / "model.safetensors")
        for folder in (compiled, plain)
    )
    assert ours.keys() == theirs.keys()
    assert drafters.load(compiled).state_dict().keys() == drafters.load(plain).state_dict().keys()


@pytest.mark.filterwarnings(HIDDEN)
@pytest.mark.parametrize("kind", drafters.kinds())
def test_compiled_layers_have_the_same_loss_and_gradients(kind: str, toy: SimpleNamespace) -> None:
    """Dynamo's "eager" backend traces and guards like the others, without a compiler."""
    torch.compiler.reset()
    texts = [Sequence([3 + (7 * i + n) % 50 for i in range(n)], [i > 4 for i in range(n)]) for n in (20, 13, 31)]
    target = toy.make_target()
    drafter = toy.make_drafter(kind, target).train()
    store = FeatureStore(target, texts, drafter.feature_layers, FeaturesConfig())
    found = []
    for compiled in (False, True):
        if compiled:
            compile_layers(drafter, backend="eager")
        for indices in ([0, 1], [2], [1, 2]):
            drafter.zero_grad()
            parts = drafter(store.batch(indices))
            parts.sum.backward()
            found.append([parts.sum.detach()] + [p.grad.clone() for p in drafter.parameters() if p.grad is not None])
    for plain, traced in zip(found[:3], found[3:], strict=True):
        for a, b in zip(plain, traced, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-9)
    kept = torch._dynamo.utils.counters
    assert not kept["graph_break"] and kept["stats"]["unique_graphs"] > 0


def poisoned(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """The training batch of that number, counted from 1, has a feature that is not a number."""
    plain, count = FeatureStore.batch, 0
    bad: list[tuple[list[int], int]] = []

    def batch(self: FeatureStore, indices: Any, epoch: int | None = None) -> Any:
        nonlocal count
        made = plain(self, indices) if epoch is None else plain(self, indices, epoch)
        if epoch is None:  # for starting values
            return made
        count += 1
        if count == number:
            bad.append((list(indices), epoch))
        if (list(indices), epoch) in bad:
            made = dataclasses.replace(made, last_BTD=made.last_BTD.index_fill(1, torch.tensor([5]), torch.nan))
        return made

    monkeypatch.setattr(FeatureStore, "batch", batch)


@pytest.mark.parametrize("number", [3, 4, 6])
def test_a_bad_batch_stops_the_run_and_its_newest_checkpoint_is_good(
    number: int, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(config, "whole")
    with monkeypatch.context() as patch:
        poisoned(patch, number)
        with pytest.raises(ValueError, match=f"the loss of step {number} is not finite.*last_BTD"):
            train(config, "run")
    folder = config.parent / "run"
    (record,) = (json.loads(path.read_text()) for path in (folder / "bad-batch").glob("*.json"))
    assert record["step"] == number and record["not_finite"]["last_BTD"]["first"][0] == [0, 5, 0]
    kept = [path.name for path in folder.glob("checkpoints/*")]  # 3 is the first, 6 would have been the next
    assert kept == ([] if number == 3 else ["step-00000003"])
    assert train(config, "run") == folder  # the data are good again
    ours, theirs = (drafters.load(one).state_dict() for one in (folder, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert [line for line in figures(folder) if "acceptance/tau" in line] == [
        line for line in figures(whole) if "acceptance/tau" in line
    ]
