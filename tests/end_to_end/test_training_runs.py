"""Training as a user starts it: real processes that finish, get killed and continue, report, and refuse.

Everything is fp32 with one thread, so "the same" means the same bits.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import yaml

from draftsmith import drafters
from draftsmith.inference.load_target import load
from draftsmith.scripts.main import main
from draftsmith.train.config import read

KIND_SETTINGS: dict[str, dict[str, Any]] = {
    "eagle": {"draft_vocab_size": 128, "steps": 2},
    "dflash": {
        "num_layers": 2,
        "block_size": 4,
        "layers": [1, 2, 3],
        "draft_vocab_size": 128,
        "anchors": 8,
        "markov_rank": 4,
    },
    "draft_lm": {"layers": [0, 3], "draft_vocab_size": 128, "on_policy": 0.5},
    "eagle3": {"layers": [1, 2, 3], "draft_vocab_size": 128},
    "hydra": {"num_heads": 3, "prefix_attention": True, "draft_vocab_size": 128},
    "medusa": {"num_heads": 3, "draft_vocab_size": 128},
    "p_eagle": {"layers": [1, 2, 3], "depth": 3, "num_layers": 2, "draft_vocab_size": 128},
    "medusa2": {"num_heads": 3, "draft_vocab_size": 128, "adapt_rank": 4},
}
STEPS, CHECKPOINT_EVERY = 60, 10
NOT_AVERAGED = ("medusa", "medusa2")
"""The other kinds are trained with an average of their weights."""
DIFFERENT = ("draft_lm", "eagle3", "medusa", "medusa2")
"""Kinds whose runs hold different things: a whole LM and its own texts, an average, neither, adapters. That every kind learns the
same bits from the same seed is in tests/unit."""


def conversations(path: Path, count: int, *, answers: bool) -> str:
    records = []
    for i in range(count):
        messages = [{"role": "user", "content": f"hello {i}, how are you today?"}]
        if answers:
            messages.append(
                {"role": "assistant", "content": " ".join(f"the fox {j * i % 7} jumps" for j in range(2 + i % 4))}
            )
        records.append({"id": f"c{i}", "messages": messages})
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def write_config(folder: Path, target: Path, kind: str, output: str = "run") -> Path:
    """24 conversations, batches of 4, 10 epochs: 60 steps."""
    config = {
        "output": str(folder / output),
        "target": {"path": str(target), "dtype": "float32"},
        "drafter": {"kind": kind, **KIND_SETTINGS.get(kind, {})},
        "data": {"train": [conversations(folder / "train.jsonl", 24, answers=True)]},
        "features": {"store": "online"},
        "optim": {"learning_rate": 3e-3, "ema": None if kind in NOT_AVERAGED else 0.8},
        "loop": {
            "epochs": 10,
            "batch_size": 4,
            "precision": "float32",
            "log_every": 5,
            "checkpoint_every": CHECKPOINT_EVERY,
        },
        "eval": {
            "prompts": conversations(folder / "held.jsonl", 4, answers=False), "every": 20, "max_new": 12, "depth": 3,
        },
        "tracking": {"tracker": "none"},
    }  # fmt: skip
    path = folder / f"{output}.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def environment(**changes: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB", "ACCELERATE", "PYTEST"))}
    return {**kept, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", **changes}


def start(config: Path, *overrides: str, launcher: tuple[str, ...] = (), **variables: str) -> subprocess.Popen[str]:
    command = [*(launcher or (sys.executable,)), "-m", "draftsmith.train.run", str(config), *overrides]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, cwd=config.parent, env=environment(**variables), stdout=pipe, stderr=pipe, text=True
    )


def run(config: Path, *overrides: str, **options: Any) -> subprocess.CompletedProcess[str]:
    process = start(config, *overrides, **options)
    out, err = process.communicate(timeout=300)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without how fast the machine was."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in line.items() if not name.startswith(("speed/", "memory/"))} for line in lines
    ]


def adapts(folder: Path) -> bool:
    """Whether the run's kind adapts its target."""
    adapted: bool = drafters.kind_module(read(folder / "config.yaml").kind).Model.adapts_target
    return adapted


@pytest.fixture(scope="module", params=drafters.kinds())
def finished(request: pytest.FixtureRequest, toy_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of an uninterrupted run, of every kind."""
    folder = tmp_path_factory.mktemp(request.param)
    config = write_config(folder, toy_folder, request.param)
    done = run(config)
    assert done.returncode == 0, done.stderr
    return folder / "run"


def test_a_run_leaves_everything_that_was_promised(finished: Path, toy_folder: Path) -> None:
    names = {path.name for path in finished.iterdir()}
    adapted = {"target"} if adapts(finished) else set()
    files = {"config.yaml", "metrics.jsonl", "acceptance.jsonl", "traces.jsonl", "finished.json"}
    assert names - {"warnings.jsonl"} == {"drafter", "checkpoints"} | files | adapted
    assert read(finished / "config.yaml") == read(finished.with_suffix(".yaml"))
    summary = json.loads((finished / "finished.json").read_text())
    assert summary["steps"] == STEPS and summary["answer_tokens"] > 0

    lines = metrics(finished)
    training, measured = ([line for line in lines if name in line] for name in ("loss", "acceptance/tau"))
    assert [line["step"] for line in training] == list(range(5, STEPS + 1, 5))
    assert [line["step"] for line in measured] == [20, 40, 60]
    # Fitted heads start close to where training brings them.
    fitted = read(finished / "config.yaml").kind in ("medusa", "medusa2", "hydra")
    assert training[-1]["loss"] < (0.99 if fitted else 0.9) * training[0]["loss"]
    assert training[-1]["epoch"] == 10
    assert max(line["acceptance/tau"] for line in measured) == summary["best_tau"] >= 1
    assert len(list((finished / "checkpoints").iterdir())) == 2  # older ones are deleted

    drafter = drafters.load(finished)
    drafter.bind(load(finished / "target" if adapted else toy_folder))
    assert all(bool(torch.isfinite(parameter).all()) for parameter in drafter.parameters())


def test_a_run_fits_medusas_starting_values_to_its_own_data(toy_folder: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, toy_folder, "medusa")
    losses = []
    for start in ("regression", "target"):
        done = run(config, f"drafter.initialise_head={start}", f"output={start}", "loop.epochs=1")
        assert done.returncode == 0, done.stderr
        losses.append(next(line["loss"] for line in metrics(tmp_path / start) if "loss" in line))
    assert losses[0] < losses[1]


def test_an_adapted_target_is_what_its_run_is_evaluated_with_and_says_so(
    toy_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = run(write_config(tmp_path, toy_folder, "medusa2"), "loop.epochs=2", "drafter.distill_weight=1")
    assert done.returncode == 0, done.stderr
    origin = json.loads((tmp_path / "run" / "finished.json").read_text())["target_adapted_from"]
    assert origin["path"] == str(toy_folder) and origin["fingerprint"] == load(toy_folder).shape.fingerprint
    assert origin["kl"] > 0 and 0 < origin["top1_agreement"] <= 1
    (measured,) = (line for line in metrics(tmp_path / "run") if "acceptance/tau" in line)
    assert [measured[f"adapted/{name}"] for name in ("kl", "top1_agreement")] == [
        origin["kl"],
        origin["top1_agreement"],
    ]
    trained = [line["adapted_kl"] for line in metrics(tmp_path / "run") if "loss" in line]
    assert trained[-1] > 0

    command = ["eval", str(tmp_path / "run"), "--prompts", str(tmp_path / "held.jsonl"), "--dtype", "float32", "--k", "2",
               "--max-new", "12", "--speed-prompts", "0", "--device", "cpu", "--json", str(tmp_path / "report.json")]  # fmt: skip
    main([*command, "--target", str(tmp_path / "run" / "target")])
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["record"]["target_adapted_from"] == origin and report["record"]["drafter"] == "medusa"
    assert report["results"][0]["agreement"]["identical"] == 4
    printed = capsys.readouterr().out
    assert (
        f"target adapted from {toy_folder}: lossless towards the adapted target, not towards the original (KL"
        in printed
    )
    with pytest.raises(SystemExit, match="2"):
        main([*command, "--target", str(toy_folder)])
    error = capsys.readouterr().err.splitlines()[-1]
    assert "made for another target (fingerprint: " in error and f"(--target {tmp_path / 'run' / 'target'})" in error


@pytest.mark.parametrize("settings", ["on_policy: 1.0", "lora_rank: 2"])
def test_a_draft_lm_is_trained_in_mixed_precision(settings: str, toy_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    config = write_config(tmp_path, toy_folder, "draft_lm")
    common = ["loop.epochs=3", "loop.precision=bfloat16"]
    if "lora" in settings:
        refused = run(config, f"drafter={{kind: draft_lm, layers: [0, 3], {settings}}}", *common)
        assert refused.returncode == 2 and "optim.ema cannot average the adapters" in refused.stderr
    common.append("optim.ema=null")
    done = run(config, f"drafter={{kind: draft_lm, layers: [0, 3], {settings}}}", *common)
    assert done.returncode == 0, done.stderr
    assert drafters.load(tmp_path / "run").config.lora_rank == 0
    losses = [line["loss"] for line in metrics(tmp_path / "run") if "loss" in line]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("finished", ["eagle3", "medusa2"], indirect=True)
def test_a_finished_run_is_not_trained_again_and_other_settings_are_refused(finished: Path) -> None:
    before = {file: file.stat().st_mtime_ns for file in finished.rglob("*") if file.is_file()}
    again = run(finished.with_suffix(".yaml"))
    assert again.returncode == 0 and "is finished; delete it or give another output" in again.stderr
    other = run(finished.with_suffix(".yaml"), "optim.learning_rate=1e-4")
    assert other.returncode == 2
    last = other.stderr.splitlines()[-1]
    assert "holds a run with other settings" in last and "give another output" in last
    assert "learning_rate: 0.0001" in last and "batch_size" not in last  # names what differs, and only that
    assert {file: file.stat().st_mtime_ns for file in finished.rglob("*") if file.is_file()} == before


@pytest.mark.parametrize("finished", DIFFERENT, indirect=True)
def test_a_run_killed_twice_ends_with_the_same_bits(
    finished: Path, toy_folder: Path, kill_at: Callable[..., None]
) -> None:
    kind = read(finished / "config.yaml").kind
    config = write_config(finished.parent, toy_folder, kind, output="killed")
    killed = finished.parent / "killed"
    for step in (CHECKPOINT_EVERY, 3 * CHECKPOINT_EVERY):
        process = start(config)
        marker = killed / "checkpoints" / f"step-{step:08d}" / "progress.json"
        kill_at(process, marker)
        assert not (killed / "finished.json").exists()
    last = run(config)
    assert last.returncode == 0, last.stderr
    assert "continuing from step" in last.stderr

    assert metrics(killed) == metrics(finished)
    checkpoint = f"checkpoints/step-{STEPS - CHECKPOINT_EVERY:08d}"
    averages = [] if kind in NOT_AVERAGED else [f"{checkpoint}/average.safetensors"]
    targets = ["target/model.safetensors"] if adapts(finished) else []
    for name in ("drafter/model.safetensors", f"{checkpoint}/model.safetensors", *averages, *targets):
        ours, theirs = (safetensors.torch.load_file(folder / name) for folder in (killed, finished))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours), name


@pytest.mark.parametrize("kind", DIFFERENT)
def test_two_processes_learn_what_one_does_with_two_micro_batches(kind: str, toy_folder: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, toy_folder, kind)
    common = ["loop.epochs=4", "loop.log_every=1", "loop.batch_size=2"]
    one = run(config, *common, "loop.accumulation=2")
    assert one.returncode == 0, one.stderr
    launcher = (str(Path(sys.executable).parent / "accelerate"), "launch", "--multi_gpu", "--num_processes", "2",
                "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0")  # fmt: skip
    two = run(config, *common, f"output={tmp_path / 'two'}", launcher=launcher, ACCELERATE_USE_CPU="true")
    assert two.returncode == 0, two.stderr
    ours, theirs = metrics(tmp_path / "two"), metrics(tmp_path / "run")
    assert [line["step"] for line in ours] == [line["step"] for line in theirs]
    assert len(ours) == 4 * 6 + 2  # 24 conversations, two of two to a step, four epochs; measured at 20 and 24
    for name in ("loss", "gradient_norm", "predicted_tau", "accuracy/0"):
        assert [line[name] for line in ours if name in line] == pytest.approx(
            [line[name] for line in theirs if name in line], rel=2e-4
        ), name
    ours_weights, theirs_weights = (drafters.load(tmp_path / name).state_dict() for name in ("two", "run"))
    for name, tensor in theirs_weights.items():
        torch.testing.assert_close(ours_weights[name], tensor, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["optim.learning_rat=1"], "optim: unknown key 'learning_rat'; did you mean 'learning_rate'?"),
        (["drafter.kind=eagel"], "unknown drafter kind 'eagel'; did you mean 'eagle'?"),
        (["target.path=/no/such/folder"], "/no/such/folder"),
        (["data.train=[/no/such.jsonl]"], "/no/such.jsonl does not exist; correct data.train or eval.prompts"),
        (["eval.prompts=/no/such.jsonl"], "/no/such.jsonl does not exist; correct data.train or eval.prompts"),
        (["data.max_length=8"], "no supervised token within 8 tokens; raise data.max_length"),
        (["drafter={kind: eagle3}"], "the default layers 2, L//2, L-3 collide for a target of 4 layers"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_a_user_gets_wrong_is_one_line_and_status_two(
    overrides: list[str], message: str, toy_folder: Path, tmp_path: Path
) -> None:
    done = run(write_config(tmp_path, toy_folder, "eagle3"), *overrides)
    assert done.returncode == 2, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("draftsmith train: ") and message in last
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("wrong", ["eval.prompts=/no/such.jsonl", "data.train=[/no/such.jsonl]"])
def test_a_run_that_could_not_start_can_be_started_again_with_the_mistake_corrected(
    wrong: str, toy_folder: Path, tmp_path: Path
) -> None:
    config = write_config(tmp_path, toy_folder, "medusa")
    assert run(config, "loop.epochs=1", wrong).returncode == 2
    corrected = run(config, "loop.epochs=1")
    assert corrected.returncode == 0, corrected.stderr


def test_a_config_that_does_not_exist_is_named(tmp_path: Path) -> None:
    done = run(tmp_path / "nowhere.yaml")
    assert done.returncode == 2 and done.stderr.strip().count("\n") == 0
    assert "nowhere.yaml cannot be read" in done.stderr
