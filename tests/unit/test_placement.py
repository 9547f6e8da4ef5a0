"""Targets sharded over two processes (gloo): the same bits as the replicated one, half the layers in each, and no process waits
for passes that another one does not make."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftsmith.inference.load_target import load
from draftsmith.train.config import FeaturesConfig
from draftsmith.train.features import FeatureStore

WORKER = Path(__file__).parents[1] / "sharded_target.py"


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def two_processes(*arguments: object, out: Path) -> list[dict[str, Any]]:
    """What both wrote; a hang is an error after two minutes."""
    common = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "WORLD_SIZE": "2",
              "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}  # fmt: skip
    words = [sys.executable, str(WORKER), *map(str, arguments[:3]), str(out), *map(str, arguments[3:])]
    started = [
        subprocess.Popen(
            words, env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=120)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], "\n".join(errors)
    return [json.loads(Path(f"{out}.{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def complete_store(toy_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A disk store of the worker's sequences, filled by one process with the replicated target."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("sharded_target", WORKER)
    assert spec is not None and spec.loader is not None
    worker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(worker)
    folder = tmp_path_factory.mktemp("store") / "features"
    config = FeaturesConfig(store="disk", folder=str(folder))
    FeatureStore(load(toy_folder), worker.sequences(), worker.LAYERS, config).fill()
    return folder


@pytest.fixture(scope="module", params=["fsdp", "zero3"])
def found(
    request: pytest.FixtureRequest, toy_folder: Path, complete_store: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    if request.param == "zero3":
        pytest.importorskip("deepspeed", exc_type=ImportError)
    out = tmp_path_factory.mktemp(request.param) / "found"
    return two_processes(toy_folder, request.param, complete_store, out=out)


def test_a_sharded_target_gives_the_bits_of_the_replicated_one(found: list[dict[str, Any]]) -> None:
    for process in found:
        assert process["same states"] and process["same answers"] and process["same head"]
        assert process["fingerprints"][0] == process["fingerprints"][1]


def test_each_process_holds_its_part_of_the_layers_only_and_lets_the_rest_go_after_every_pass(
    found: list[dict[str, Any]],
) -> None:
    (whole, _), (whole_layers, _) = found[0]["bytes"], found[0]["bytes of the layers"]
    parts = [process["bytes of the layers"][1] for process in found]
    assert whole_layers <= sum(parts) <= 1.1 * whole_layers and max(parts) < 0.6 * whole_layers
    for process, part in zip(found, parts, strict=True):
        assert process["bytes"][1] == whole - whole_layers + part  # embedding, norm and head are whole
        assert process["after use"] == part


def test_a_sharded_target_gets_no_gradients(found: list[dict[str, Any]]) -> None:
    assert [process["trained"] for process in found] == [[], []]


def test_processes_with_unequal_numbers_of_sequences_finish_with_the_right_features(
    found: list[dict[str, Any]],
) -> None:
    for process in found:
        checks = [value for name, value in process.items() if name.startswith("uneven")]
        assert len(checks) == 4 and all(checks) and process["memory"]


def test_a_complete_store_can_be_read_beside_a_sharded_target_and_no_other_can(found: list[dict[str, Any]]) -> None:
    for process in found:
        assert process["a store that is complete"] is True
        assert "is not complete, but a sharded target cannot fill it: each process" in process["a store that is not"]
        assert "draftsmith cache CONFIG target.placement=device_map" in process["a store that is not"]


def test_kinds_that_copy_the_targets_layers_refuse_a_sharded_one(found: list[dict[str, Any]]) -> None:
    for process in found:
        for kind in ("draft_lm", "medusa2"):
            assert "is sharded over the processes (give target.placement: replicated)" in process[kind]
        assert "which spreads it over all devices of one process, and there are 2 processes" in process["device_map"]


@pytest.mark.parametrize("sharding", ["fsdp", "zero3"])
def test_one_process_cannot_shard(sharding: Any, toy_folder: Path) -> None:
    with pytest.raises(ValueError, match=rf"cannot be sharded \({sharding}\) over one process; start several"):
        load(toy_folder, placement=sharding)


@pytest.mark.parametrize("sharding", ["fsdp", "zero3"])
def test_an_adapter_is_sharded_with_its_layers(
    sharding: str, toy_folder: Path, make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    if sharding == "zero3":
        pytest.importorskip("deepspeed", exc_type=ImportError)
    adapter = make_adapter(toy_folder, tmp_path / "adapter")
    for process in two_processes(toy_folder, sharding, "-", adapter, out=tmp_path / "found"):
        assert process["same states"] and process["same answers"] and process["trained"] == []
        assert process["fingerprints"][0] == process["fingerprints"][1] != load(toy_folder).shape.fingerprint
        (whole, part) = process["bytes of the layers"]
        assert part < 0.6 * whole
