"""The loop of training inside of this process, at toy size: same seed, same bits; the average; the time budget.

What needs real processes (kills, launchers) is in tests/end_to_end.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
import yaml

from draftsmith import drafters
from draftsmith.train import clock, loop, run
from draftsmith.train.config import read
from draftsmith.train.evaluation import Evaluation
from draftsmith.train.features import FeatureStore
from draftsmith.train.optim import schedule

STEPS = 12


def write_config(folder: Path, target: Path, kind: str, settings: dict[str, Any]) -> Path:
    """12 conversations, batches of 4, 4 epochs: 12 steps; every step is logged and kept."""
    lines = []
    for i in range(12):
        answer = " ".join(f"the fox {j * i % 7} jumps" for j in range(2 + i % 4))
        messages = [{"role": "user", "content": f"hello {i}"}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"id": f"c{i}", "messages": messages}))
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "held.jsonl").write_text('{"messages": [{"role": "user", "content": "hello there"}]}\n')
    config = {
        "output": str(folder / "run"),
        "target": {"path": str(target), "dtype": "float32"},
        "drafter": {"kind": kind, **settings},
        "data": {"train": [str(folder / "train.jsonl")]},
        "features": {"store": "memory"},
        "optim": {"learning_rate": 3e-3},
        "loop": {
            "epochs": 4,
            "batch_size": 4,
            "precision": "float32",
            "log_every": 1,
            "checkpoint_every": 1,
            "keep_checkpoints": 99,
        },
        "eval": {"prompts": str(folder / "held.jsonl"), "every": 4, "max_new": 4, "depth": 3},
        "tracking": {"tracker": "none"},
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")


@pytest.fixture
def config(toy: SimpleNamespace, toy_folder: Path, tmp_path: Path) -> Path:
    return write_config(tmp_path, toy_folder, "medusa", toy.KIND_SETTINGS["medusa"])


def train(config: Path, name: str, *overrides: str) -> Path:
    return run.train(read(config, [*overrides, f"output={config.parent / name}"]))


def lines(folder: Path, key: str) -> list[Any]:
    read_lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line[key] for line in read_lines if key in line]


def weights(folder: Path, step: int, file: str = "model.safetensors") -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(folder / "checkpoints" / f"step-{step:08d}" / file)


def equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    assert ours.keys() == theirs.keys()
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("kind", drafters.kinds())
def test_the_same_seed_gives_the_same_bits_and_another_seed_others(
    kind: str, toy: SimpleNamespace, toy_folder: Path, tmp_path: Path
) -> None:
    config = write_config(tmp_path, toy_folder, kind, toy.KIND_SETTINGS.get(kind, {}))
    first, second = (train(config, name, "loop.epochs=2") for name in ("first", "second"))
    for step in range(1, STEPS // 2):
        assert equal(weights(first, step), weights(second, step)), step
    drafter, again = (drafters.load(folder).state_dict() for folder in (first, second))
    assert equal(drafter, again)
    other = train(config, "other", "seed=1", "loop.epochs=1")
    assert not equal(weights(first, 1), weights(other, 1))


def evaluation(tau: float) -> Evaluation:
    """One that says nothing but tau."""
    interval = {"value": tau, "low": tau, "high": tau}
    report = {"tokens_per_round": interval, "cond_accept": [], "uncond_accept": [], "ngram_tau": 1.0}
    return Evaluation({"acceptance/tau": tau}, report, {})


def scripted_acceptance(monkeypatch: pytest.MonkeyPatch, taus: list[float]) -> list[dict[str, torch.Tensor]]:
    """Evaluations give these values one after the other; returns the weights that they are handed."""
    handed: list[dict[str, torch.Tensor]] = []

    def evaluate_now(config: Any, target: Any, drafter: Any, held_out: Any) -> Evaluation:
        handed.append({name: tensor.clone() for name, tensor in drafter.state_dict().items()})
        return evaluation(taus[len(handed) - 1])

    monkeypatch.setattr(loop, "evaluate_now", evaluate_now)
    return handed


def test_the_average_is_evaluated_and_saved_and_changes_nothing_in_training(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = train(config, "plain")
    handed = scripted_acceptance(monkeypatch, [1.5, 2.0, 1.0])
    folder = train(config, "averaged", "optim.ema=0.5")
    assert all(equal(weights(plain, step), weights(folder, step)) for step in range(1, STEPS))

    for step in range(2, STEPS):  # against a loop over the raw weights
        before, after = (weights(folder, s, "average.safetensors") for s in (step - 1, step))
        decay = min(0.5, (1 + step) / (10 + step))
        for name, raw in weights(folder, step).items():
            expected = decay * before[name].double() + (1 - decay) * raw.double()
            torch.testing.assert_close(after[name].double(), expected, rtol=1e-5, atol=1e-6)
    for index, step in enumerate((4, 8)):
        assert equal(handed[index], weights(folder, step, "average.safetensors"))
    saved = drafters.load(folder).state_dict()  # the best of the three
    assert equal(saved, handed[1]) and not equal(saved, weights(folder, 8))


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock on which a step takes one second and an evaluation a thousand; step `stop` never ends."""
    time = SimpleNamespace(now=0.0, batches=0, stop=None)
    monkeypatch.setattr(clock, "perf_counter", lambda: time.now)
    plain = FeatureStore.batch

    def batch(self: FeatureStore, *arguments: Any) -> Any:
        if len(arguments) == 2:  # a training batch; those for starting values have no epoch
            time.batches += 1
            if time.batches == time.stop:
                raise KeyboardInterrupt
            time.now += 1
        return plain(self, *arguments)

    def evaluate_now(*arguments: Any) -> Evaluation:
        time.now += 1000
        return evaluation(1.0 + time.now)

    monkeypatch.setattr(FeatureStore, "batch", batch)
    monkeypatch.setattr(loop, "evaluate_now", evaluate_now)
    return time


def test_an_average_goes_on_after_a_kill_bit_for_bit(config: Path, ticking: SimpleNamespace) -> None:
    whole = train(config, "whole", "optim.ema=0.9")
    ticking.stop = ticking.batches + 8
    with pytest.raises(KeyboardInterrupt):
        train(config, "killed", "optim.ema=0.9")
    killed = train(config, "killed", "optim.ema=0.9")
    for file in ("model.safetensors", "average.safetensors"):
        assert equal(weights(whole, STEPS - 1, file), weights(killed, STEPS - 1, file))
    assert equal(drafters.load(whole).state_dict(), drafters.load(killed).state_dict())


def expected_rates(config: Path, position_per_step: float, steps: int, planned: int) -> list[float]:
    optim = read(config).optim
    return [optim.learning_rate * schedule(position_per_step * step, planned, optim) for step in range(steps)]


def test_a_time_budget_ends_the_run_and_the_learning_rate_with_it(config: Path, ticking: SimpleNamespace) -> None:
    folder = train(config, "run", "loop.epochs=20", "loop.max_minutes=0.2")  # 60 steps would be; 12 seconds are
    finished = json.loads((folder / "finished.json").read_text())
    assert finished["steps"] == STEPS and finished["evaluation_seconds"] == 3000  # evaluation is not counted
    assert finished["seconds"] == 3012
    assert lines(folder, "learning_rate") == pytest.approx(expected_rates(config, 5, STEPS, 60))
    assert lines(folder, "acceptance/tau") and lines(folder, "epoch")[-1] == 4
    assert drafters.load(folder)


def test_a_time_budget_counts_what_was_used_before_a_kill(config: Path, ticking: SimpleNamespace) -> None:
    settings = ("loop.epochs=20", "loop.max_minutes=0.2", "loop.checkpoint_every=5")
    ticking.stop = 8
    with pytest.raises(KeyboardInterrupt):
        train(config, "run", *settings)
    ticking.now += 10_000  # the night between
    folder = train(config, "run", *settings)
    finished = json.loads((folder / "finished.json").read_text())
    assert finished["steps"] == STEPS and finished["seconds"] - finished["evaluation_seconds"] == STEPS
    assert lines(folder, "learning_rate") == pytest.approx(expected_rates(config, 5, STEPS, 60))


def test_a_time_budget_that_is_not_used_up_changes_nothing(config: Path, ticking: SimpleNamespace) -> None:
    plain = train(config, "plain")
    folder = train(config, "budget", "loop.max_minutes=1")  # 60 seconds; 12 steps need 12
    assert json.loads((folder / "finished.json").read_text())["steps"] == STEPS
    assert lines(folder, "learning_rate") == lines(plain, "learning_rate")
    assert equal(weights(plain, STEPS - 1), weights(folder, STEPS - 1))
