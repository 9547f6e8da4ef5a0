"""Runs that W&B records, as a user starts them and without a network; what it recorded is read from its own run file.

A toy target whose answers repeat themselves is drafted for by Medusa heads: some steps of milliseconds each.
"""

import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from draftsmith.train.wandb_run import WandbRun

pytest.importorskip("wandb")
from wandb.proto.wandb_internal_pb2 import Record  # noqa: E402

SECRET = "0123456789abcdef0123456789abcdef01234567"


def write_config(folder: Path, target: Path) -> Path:
    """24 conversations, batches of 4: 6 steps per epoch, 4 epochs, measured at 10, 20 and 24."""
    conversations = []
    for i in range(24):
        answer = " ".join(f"the fox {j * i % 7} jumps" for j in range(2 + i % 4))
        messages = [
            {"role": "user", "content": f"hello {i}, how are you today?"},
            {"role": "assistant", "content": answer},
        ]
        conversations.append({"messages": messages})
    (folder / "train.jsonl").write_text("".join(json.dumps(one) + "\n" for one in conversations))
    (folder / "held.jsonl").write_text(
        "".join(json.dumps({"messages": one["messages"][:1]}) + "\n" for one in conversations[:4])
    )
    config = {
        "output": str(folder / "run"),
        "target": {"path": str(target), "dtype": "float32"},
        "drafter": {"kind": "medusa", "num_heads": 3, "draft_vocab_size": 128},
        "data": {"train": [str(folder / "train.jsonl")]},
        "features": {"store": "memory"},
        "optim": {"learning_rate": 3e-3},
        "loop": {"epochs": 4, "batch_size": 4, "precision": "float32", "log_every": 2, "checkpoint_every": 5},
        "eval": {"prompts": str(folder / "held.jsonl"), "every": 10, "max_new": 12, "depth": 3},
        "tracking": {"tracker": "wandb", "project": "toys", "group": "tests", "tags": ["medusa", "toy"], "traces": 2},
        "guard": {"ngram_after": 0.0},
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def environment(folder: Path, **changes: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB", "ACCELERATE", "PYTEST"))}
    own = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "HOME": str(folder)}
    return {**kept, **own, "WANDB_SILENT": "true", **changes}


def start(config: Path, *overrides: str, launcher: tuple[str, ...] = (), **variables: str) -> subprocess.Popen[str]:
    command = [*(launcher or (sys.executable,)), "-m", "draftsmith.train.run", str(config), *overrides]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, cwd=config.parent, env=environment(config.parent, **variables), stdout=pipe, stderr=pipe, text=True
    )


def run(config: Path, *overrides: str, **options: Any) -> str:
    """What it said on stderr."""
    process = start(config, *overrides, **options)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return errors


def log_records(content: bytes) -> Iterator[bytes]:
    """The records of a W&B run file: LevelDB's log format behind a header of seven bytes (wandb ships no reader any more)."""
    assert content[:4] == b":W&B"
    position, record = 7, b""
    while position + 7 <= len(content):
        if (left := -position % 32768) and left < 7:  # no header fits: the block ends with zeros
            position += left
            continue
        length, kind = struct.unpack("<HB", content[position + 4 : position + 7])
        record += content[position + 7 : position + 7 + length]
        position += 7 + length
        if position > len(content):
            return  # cut off
        if kind in (1, 4):  # complete, or its last part
            yield record
            record = b""


class Recorded:
    """What is in the run files of a run folder, in the order of their beginning."""

    def __init__(self, folder: Path) -> None:
        self.folders = sorted(folder.glob("wandb/offline-run-*"))
        self.settings: dict[str, Any] = {}
        self.runs, self.artifacts, self.alerts = [], [], []
        self.history: list[dict[str, Any]] = []
        self.plots: dict[str, str] = {}
        for part in self.folders:
            (file,) = part.glob("run-*.wandb")
            for data in log_records(file.read_bytes()):
                self._add(Record.FromString(data))

    def _add(self, record: Any) -> None:
        kind = record.WhichOneof("record_type")
        if kind == "run":
            self.runs.append(record.run)
            self.settings |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        elif kind == "history":
            row: dict[str, Any] = {}
            for item in record.history.item:
                *outer, last = item.nested_key or [item.key]
                place = row
                for name in outer:
                    place = place.setdefault(name, {})
                place[last] = json.loads(item.value_json)
            self.history.append(row)
        elif kind == "config":
            for item in record.config.update:
                if list(item.nested_key[:2]) == ["_wandb", "visualize"]:
                    self.plots[item.nested_key[2]] = item.value_json
        elif kind == "request" and record.request.WhichOneof("request_type") == "log_artifact":
            self.artifacts.append(record.request.log_artifact.artifact)
        elif kind == "artifact":
            self.artifacts.append(record.artifact)
        elif kind == "alert":
            self.alerts.append(record.alert)

    def column(self, name: str) -> list[Any]:
        return [row[name] for row in self.history if name in row]

    def table(self, folder: Path, entry: dict[str, Any]) -> dict[str, Any]:
        (file,) = folder.glob(f"wandb/offline-run-*/files/{entry['path']}")
        found: dict[str, Any] = json.loads(file.read_text())
        return found


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(toy_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an uninterrupted run: no mode, no key and no netrc, so W&B records offline by itself."""
    folder = tmp_path_factory.mktemp("finished")
    run(write_config(folder, toy_folder), WANDB_MODE="", WANDB_API_KEY="")
    return folder / "run"


def test_the_run_has_name_group_tags_and_the_whole_config(finished: Path) -> None:
    recorded = Recorded(finished)
    run_, settings = recorded.runs[0], yaml.safe_load((finished / "config.yaml").read_text())
    assert (run_.display_name, run_.project, run_.run_group, sorted(run_.tags)) == (
        "run",
        "toys",
        "tests",
        ["medusa", "toy"],
    )
    assert run_.run_id == (finished / "wandb-id").read_text()
    assert {name: value for name, value in recorded.settings.items() if name != "_wandb"} == settings


def test_the_name_may_be_given(toy_folder: Path, tmp_path: Path) -> None:
    run(write_config(tmp_path, toy_folder), "tracking.name=first try", "loop.epochs=1")
    assert Recorded(tmp_path / "run").runs[0].display_name == "first try"


def test_every_scalar_of_metrics_jsonl_is_in_the_history_at_its_step(finished: Path) -> None:
    recorded = Recorded(finished)
    expected: dict[int, dict[str, Any]] = {}
    for line in lines(finished, "metrics"):
        expected.setdefault(line["step"], {}).update({k: v for k, v in line.items() if k != "step"})
    assert [row["_step"] for row in recorded.history] == sorted(expected)
    for row in recorded.history:
        scalars = {name: value for name, value in row.items() if isinstance(value, float | int) and name[0] != "_"}
        assert scalars == pytest.approx(expected[row["_step"]])


def test_acceptance_by_position_is_a_line_plot_of_what_was_measured(finished: Path) -> None:
    recorded = Recorded(finished)
    tables = [recorded.table(finished, entry) for entry in recorded.column("acceptance/by_position_table")]
    reports = lines(finished, "acceptance")
    assert [report["step"] for report in reports] == [10, 20, 24] and len(tables) == 3
    for table, report in zip(tables, reports, strict=True):
        drawn: dict[str, dict[int, float]] = {}
        for position, name, value in table["data"]:
            drawn.setdefault(name, {})[position] = value
        assert drawn == {
            "accepted given the one before": dict(enumerate(report["cond_accept"], start=1)),
            "accepted": dict(enumerate(report["uncond_accept"], start=1)),
        }
    plot = json.loads(recorded.plots["acceptance/by_position"])["panel_config"]
    assert plot["panelDefId"] == "wandb/lineseries/v0" and plot["stringSettings"]["xname"] == "draft position"


def test_decode_traces_are_a_table_and_lines_of_a_file(finished: Path) -> None:
    recorded = Recorded(finished)
    rows = [row for entry in recorded.column("traces") for row in recorded.table(finished, entry)["data"]]
    traces = lines(finished, "traces")
    assert {trace["prompt"] for trace in traces} == {0, 2}  # two of four, spread
    assert [row[:3] for row in rows] == [[trace["step"], trace["prompt"], trace["round"]] for trace in traces]
    for row, trace in zip(rows, traces, strict=True):
        assert row[4:] == ["|".join(trace["drafted"]), "|".join(trace["accepted"]), trace["next"], trace["kind"]]
        assert trace["drafted"][: len(trace["accepted"])] == trace["accepted"]
        assert (trace["kind"] == "bonus") == (trace["next"] != "" and len(trace["accepted"]) == len(trace["drafted"]))
    assert {trace["kind"] for trace in traces} >= {"correction"}


def test_evaluations_and_the_best_drafter_are_artifacts(finished: Path) -> None:
    recorded = Recorded(finished)
    evaluations = [artifact for artifact in recorded.artifacts if artifact.type == "evaluation"]
    (model,) = (artifact for artifact in recorded.artifacts if artifact.type == "model")
    assert [set(artifact.aliases) for artifact in evaluations] == [{"latest", f"step-{i}"} for i in (10, 20, 24)]
    for artifact, report in zip(evaluations, lines(finished, "acceptance"), strict=True):
        (entry,) = artifact.manifest.contents
        assert json.loads(Path(entry.local_path).read_text()) == report
    summary = json.loads((finished / "finished.json").read_text())
    assert set(model.aliases) == {"latest", "best", f"step-{summary['best_step']}"}
    assert {entry.path: entry.size for entry in model.manifest.contents} == {
        path.name: path.stat().st_size for path in (finished / "drafter").iterdir()
    }


def test_a_warning_is_an_alert_a_line_and_a_file(finished: Path, toy_folder: Path, tmp_path: Path) -> None:
    errors = run(write_config(tmp_path, toy_folder), "guard.loss_above_uniform=0.001")
    recorded = Recorded(tmp_path / "run")
    warned = lines(tmp_path / "run", "warnings")
    assert "above_uniform" in [one["name"] for one in warned]
    assert [(alert.title, alert.level) for alert in recorded.alerts] == [(one["title"], "WARN") for one in warned]
    assert [alert.text for alert in recorded.alerts] == [f"step {one['step']}: {one['text']}" for one in warned]
    for one in warned:
        assert errors.count(f"warning: step {one['step']}: {one['title']}: {one['text']}") == 1


def test_a_killed_run_goes_on_under_its_id_and_no_step_comes_twice(
    finished: Path, toy_folder: Path, tmp_path: Path, kill_at: Callable[..., None]
) -> None:
    config = write_config(tmp_path, toy_folder)
    process = start(config)
    marker = tmp_path / "run" / "checkpoints" / "step-00000015" / "progress.json"
    kill_at(process, marker)
    assert "continuing from step" in run(config)
    recorded = Recorded(tmp_path / "run")
    assert len(recorded.folders) == 2 and len({run_.run_id for run_ in recorded.runs}) == 1
    steps = [row["_step"] for row in recorded.history]
    assert steps == [row["_step"] for row in Recorded(finished).history]  # all of them, once, in order
    for name in ("loss", "acceptance/tau"):
        assert recorded.column(name) == [line[name] for line in lines(tmp_path / "run", "metrics") if name in line]
    measured = [set(artifact.aliases) for artifact in recorded.artifacts if artifact.type == "evaluation"]
    assert measured[-2:] == [
        {"latest", "step-20"},
        {"latest", "step-24"},
    ]  # whether 10 was written twice, a kill decides


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 0.8, 1.0])
def test_the_last_step_is_found_in_what_a_kill_left_of_a_run_file(share: float, finished: Path, tmp_path: Path) -> None:
    (file,) = finished.glob("wandb/offline-run-*/run-*.wandb")
    content = file.read_bytes()[: 7 + int(share * file.stat().st_size)]
    there = tmp_path / file.relative_to(finished)
    there.parent.mkdir(parents=True)
    there.write_bytes(content)
    recorded = Recorded(tmp_path)
    run_ = SimpleNamespace(id=(finished / "wandb-id").read_text(), starting_step=0)
    assert WandbRun(run_).last_step(tmp_path) == max((row["_step"] for row in recorded.history), default=-1)
    assert (share == 1.0) == (len(recorded.history) == 12)


def test_of_two_processes_one_talks_to_wandb(toy_folder: Path, tmp_path: Path) -> None:
    launcher = (str(Path(sys.executable).parent / "accelerate"), "launch", "--multi_gpu", "--num_processes", "2",
                "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0")  # fmt: skip
    run(
        write_config(tmp_path, toy_folder),
        "loop.epochs=2",
        "loop.batch_size=2",
        launcher=launcher,
        ACCELERATE_USE_CPU="true",
    )
    recorded = Recorded(tmp_path / "run")
    assert len(recorded.folders) == 1 and len({run_.run_id for run_ in recorded.runs}) == 1
    speeds = lines(tmp_path / "run", "metrics")[0]
    assert speeds["speed/tokens_per_second"] == pytest.approx(2 * speeds["speed/tokens_per_second_per_process"])


def test_no_file_of_the_run_holds_the_key(toy_folder: Path, tmp_path: Path) -> None:
    run(
        write_config(tmp_path, toy_folder),
        "loop.epochs=1",
        WANDB_API_KEY=SECRET,
        WANDB_MODE="offline",
        HF_TOKEN=f"hf_{SECRET}",
    )
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in files)
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]


def test_a_broken_installation_costs_a_warning(toy_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "broken" / "wandb").mkdir(parents=True)
    (tmp_path / "broken" / "wandb" / "__init__.py").write_text("raise RuntimeError('no protobuf')\n")
    path = f"{tmp_path / 'broken'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    errors = run(write_config(tmp_path, toy_folder), "loop.epochs=1", PYTHONPATH=path)
    assert errors.count("warning: wandb failed (no protobuf); training goes on without it") == 1
    assert lines(tmp_path / "run", "acceptance") and not (tmp_path / "run" / "wandb").exists()


def children(pid: int) -> list[int]:
    """Processes below one, as far as the kernel says."""
    found = [int(one) for file in Path(f"/proc/{pid}/task").glob("*/children") for one in file.read_text().split()]
    return found + [below for one in found for below in children(one)]


def test_a_service_that_dies_costs_a_warning(toy_folder: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, toy_folder)
    process = start(config, "loop.epochs=40")
    metrics, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 120
    while (not metrics.exists() or not metrics.read_text()) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    services = [pid for pid in children(process.pid) if "wandb" in Path(f"/proc/{pid}/cmdline").read_text()]
    assert services
    for pid in services:
        os.kill(pid, signal.SIGKILL)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert errors.count("training goes on without it") == 1, errors
    assert lines(tmp_path / "run", "metrics")[-1]["step"] == 240 and (tmp_path / "run" / "finished.json").exists()


@pytest.mark.parametrize("tracker", ["none", "tensorboard"])
def test_other_trackers_have_the_same_files(tracker: str, finished: Path, toy_folder: Path, tmp_path: Path) -> None:
    if tracker != "none":
        pytest.importorskip(tracker)
    run(write_config(tmp_path, toy_folder), f"tracking.tracker={tracker}")
    for name in ("acceptance", "traces"):
        assert lines(tmp_path / "run", name) == lines(finished, name)
    ours, theirs = (lines(folder, "metrics") for folder in (tmp_path / "run", finished))
    assert [line.keys() for line in ours] == [line.keys() for line in theirs]
