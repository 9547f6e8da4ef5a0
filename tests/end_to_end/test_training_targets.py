"""Targets of every form and warm starts, as a user trains for them: real processes and commands.

Everything is fp32 with one thread, so "the same" means the same bits.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftsmith import drafters
from draftsmith.drafters.vocabulary import vocabulary_hash
from draftsmith.inference.load_target import load
from draftsmith.scripts.main import main


def conversations(path: Path, count: int, animal: str) -> str:
    records = [
        {
            "id": f"{animal}{i}",
            "messages": [
                {"role": "user", "content": f"hello {i}, how are you today?"},
                {"role": "assistant", "content": " ".join(f"the {animal} {j * i % 7} jumps" for j in range(2 + i % 4))},
            ],
        }
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def write_config(folder: Path, target: Path, output: str, /, animal: str = "fox", **sections: Any) -> Path:
    """24 conversations, batches of 4, two epochs: 12 steps."""
    config = {
        "output": str(folder / output),
        "target": {"path": str(target), "dtype": "float32"},
        "drafter": {"kind": "eagle3", "layers": [1, 2, 3], "draft_vocab_size": 40, "steps": 2},
        "data": {"train": [conversations(folder / f"{animal}.jsonl", 24, animal)]},
        "optim": {"learning_rate": 3e-3},
        "loop": {"epochs": 2, "batch_size": 4, "precision": "float32", "log_every": 4, "checkpoint_every": 4},
        "eval": {"prompts": conversations(folder / "held.jsonl", 4, "dog"), "every": 4, "max_new": 8, "depth": 2},
        "tracking": {"tracker": "none"},
    }
    for name, values in sections.items():
        config[name] = {**config.get(name, {}), **values} if isinstance(values, dict) else values  # type: ignore[dict-item]
    path = folder / f"{output}.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def start(config: Path, *overrides: str, launcher: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB", "ACCELERATE", "PYTEST"))}
    variables = {
        **kept,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "DS_ACCELERATOR": "cpu",
    }
    if launcher:
        variables["ACCELERATE_USE_CPU"] = "true"
    command = [*(launcher or (sys.executable,)), "-m", "draftsmith.train.run", str(config), *overrides]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=config.parent, env=variables, stdout=pipe, stderr=pipe, text=True)


def run(config: Path, *overrides: str, launcher: tuple[str, ...] = (), status: int = 0) -> str:
    """What it wrote to stderr; a hang is an error after three minutes."""
    process = start(config, *overrides, launcher=launcher)
    try:
        _, errors = process.communicate(timeout=180)
    finally:
        process.kill()
    assert process.returncode == status, errors
    return errors


TWO = (str(Path(sys.executable).parent / "accelerate"), "launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1",
       "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0")  # fmt: skip


def weights(run_folder: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(run_folder / "drafter" / "model.safetensors")


def same(ours: Path, theirs: Path) -> bool:
    a, b = weights(ours), weights(theirs)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def last_step(run_folder: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    found: dict[str, Any] = [line for line in lines if "acceptance/tau" in line][-1]
    return found


# ---- where the target lies --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def replicated(toy_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two processes with the whole target in each."""
    folder = tmp_path_factory.mktemp("replicated")
    run(write_config(folder, toy_folder, "run"), launcher=TWO)
    return folder / "run"


@pytest.mark.parametrize("placement", ["fsdp", "zero3"])
def test_a_drafter_learns_the_same_bits_from_a_sharded_target(
    placement: str, replicated: Path, toy_folder: Path, tmp_path: Path
) -> None:
    """And its evaluations, in which every process decodes the same prompts, are level by themselves."""
    if placement == "zero3":
        pytest.importorskip("deepspeed", exc_type=ImportError)
    config = write_config(tmp_path, toy_folder, "run", target={"placement": placement})
    run(config, launcher=TWO)
    assert same(tmp_path / "run", replicated)
    assert last_step(tmp_path / "run") == last_step(replicated)


def test_one_process_is_told_that_it_cannot_shard(toy_folder: Path, tmp_path: Path) -> None:
    errors = run(write_config(tmp_path, toy_folder, "run", target={"placement": "fsdp"}), status=2)
    assert "cannot be sharded (fsdp) over one process; start several with accelerate launch" in errors.splitlines()[-1]


# ---- adapters ---------------------------------------------------------------------------------------------------------


def test_a_drafter_is_made_for_a_target_with_an_adapter_from_its_answers_to_its_text(
    toy_folder: Path, make_adapter: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = make_adapter(toy_folder, tmp_path / "adapter")
    config = write_config(tmp_path, toy_folder, "run")
    common = ["--target", str(toy_folder), "--dtype", "float32", "--device", "cpu"]
    adapted = [*common, "--adapter", str(adapter), "--merge-adapter"]
    out = tmp_path / "answers.jsonl"
    main(["data", str(tmp_path / "fox.jsonl"), "--out", str(out), "--max-new", "12", "--max-bad-share", "1", *adapted])
    made = json.loads((tmp_path / "answers.jsonl.meta.json").read_text())
    fingerprint = load(toy_folder, adapter=adapter).shape.fingerprint
    assert made["fingerprint"] == fingerprint != load(toy_folder).shape.fingerprint
    assert made["form"] == f"adapter {adapter} merged"

    run(
        config,
        f"target.adapter={adapter}",
        "target.merge_adapter=true",
        f"data.train=[{out}]",
        "drafter.draft_vocab_size=null",
    )
    assert drafters.load(tmp_path / "run").shape.fingerprint == fingerprint
    capsys.readouterr()
    report = tmp_path / "report.json"
    evaluate = ["eval", str(tmp_path / "run"), "--prompts", str(tmp_path / "held.jsonl"), "--k", "2", "--max-new", "8",
                "--speed-prompts", "0", "--json", str(report)]  # fmt: skip
    main([*evaluate, *adapted])
    record = json.loads(report.read_text())["record"]
    assert record["target_fingerprint"] == fingerprint and record["target_form"] == f"adapter {adapter} merged"
    assert f"for {toy_folder}, adapter {adapter} merged, float32" in capsys.readouterr().out
    main(["generate", str(tmp_path / "run"), "--prompt", "hello", "--max-new", "8", *common, "--adapter", str(adapter)])
    assert "lossless" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main([*evaluate, *common])
    assert "made for another target (fingerprint: " in capsys.readouterr().err.splitlines()[-1]


# ---- warm starts ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def revision(toy_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy target, trained on a little."""
    folder = tmp_path_factory.mktemp("revision") / "target"
    model = AutoModelForCausalLM.from_pretrained(toy_folder)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(toy_folder).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def old(toy_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run for the old target."""
    folder = tmp_path_factory.mktemp("old")
    run(write_config(folder, toy_folder, "run"))
    return folder / "run"


def test_a_warm_start_begins_with_the_weights_of_its_start(old: Path, revision: Path, tmp_path: Path) -> None:
    """With steps too small to change an fp32 weight, it ends with them, too."""
    config = write_config(
        tmp_path, revision, "run", start=str(old), optim={"learning_rate": 1e-30, "weight_decay": 0.0}
    )
    errors = run(config)
    assert f"starting from {old}, trained for {drafters.load(old).shape.fingerprint}" in errors
    assert same(tmp_path / "run", old)
    assert drafters.load(tmp_path / "run").shape.fingerprint == load(revision).shape.fingerprint


def test_other_answers_want_another_map_and_keep_the_old_one_by_request(
    old: Path, revision: Path, tmp_path: Path
) -> None:
    config = write_config(tmp_path, revision, "run", animal="cow with a hat", start=str(old))
    last = run(config, status=2).splitlines()[-1]
    there = vocabulary_hash(drafters.load(old).token_ids_W)
    assert (
        "has another draft vocabulary than this run's data choose" in last and f"(its map's hash is {there}, " in last
    )
    assert "set data.vocabulary: start" in last
    kept = run(config, "data.vocabulary=start")
    assert f"its draft vocabulary ({there}) covers" in kept
    assert "others (the same ones: others chose the map)" not in kept  # the held-out prompts have answers
    assert vocabulary_hash(drafters.load(tmp_path / "run").token_ids_W) == there


@pytest.mark.parametrize("vocabulary", ["data", "start"])
def test_a_killed_warm_start_continues_from_its_checkpoint_and_not_from_its_start(
    vocabulary: str, old: Path, revision: Path, tmp_path: Path, kill_at: Callable[..., None]
) -> None:
    """By its own map it does not even need the start any more."""
    copy = tmp_path / "start"
    shutil.copytree(old / "drafter", copy)
    common = {"start": str(copy), "data": {"vocabulary": vocabulary}}
    for name in ("whole", "killed"):
        write_config(tmp_path, revision, name, **common)
    run(tmp_path / "whole.yaml")
    process = start(tmp_path / "killed.yaml")
    marker = tmp_path / "killed" / "checkpoints" / "step-00000004" / "progress.json"
    kill_at(process, marker)
    if vocabulary == "data":
        shutil.rmtree(copy)
    assert "continuing from step" in run(tmp_path / "killed.yaml")
    assert same(tmp_path / "killed", tmp_path / "whole") and not same(tmp_path / "whole", old)
    assert last_step(tmp_path / "killed") == last_step(tmp_path / "whole")
