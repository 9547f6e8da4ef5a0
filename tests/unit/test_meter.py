"""Throughput, FLOPs and memory of a window of steps, against a clock that is moved by hand and PyTorch's own count of FLOPs."""

import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from torch.utils.flop_counter import FlopCounterMode

from draftsmith import drafters
from draftsmith.drafters.base import Load
from draftsmith.train import clock as clocks
from draftsmith.train import meter as meters
from draftsmith.train.clock import Clock
from draftsmith.train.config import FeaturesConfig
from draftsmith.train.data import Sequence
from draftsmith.train.features import FeatureStore
from draftsmith.train.meter import Meter, batch_flops, known_peak, peak_tflops, target_matrices

METRICS = {name: torch.ones(2) for name in ("loss", "correct", "overlap", "supervised", "survived", "starts")}


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    time = SimpleNamespace(seconds=0.0)
    for module in (clocks, meters):
        monkeypatch.setattr(module, "perf_counter", lambda: time.seconds)
    return time


def test_the_figures_of_a_window_leave_evaluation_out(now: SimpleNamespace) -> None:
    clock = Clock(0.0, 0.0)
    meter = Meter(Accelerator(cpu=True), clock, lambda load: 1e12 * load.tokens, peak=1000.0)
    for _ in range(2):
        meter.step()
        for supervised in (30, 10):
            with meter.waiting():
                now.seconds += 0.5
            now.seconds += 0.75
            meter.add(METRICS, Load(tokens=100, supervised=supervised, texts=2))
    with clock.evaluation():
        now.seconds += 15.0
    values, supervised_per_step = meter.close()
    assert supervised_per_step == [40, 40]
    speed = {name.removeprefix("speed/"): value for name, value in values.items() if name.startswith("speed/")}
    assert speed == {
        "supervised_tokens_per_second": 80 / 5,
        "tokens_per_second": 400 / 5,
        "supervised_tokens_per_second_per_process": 80 / 5,
        "tokens_per_second_per_process": 400 / 5,
        "step_seconds": 2.5,
        "model_tflops_per_device": 400 / 5,
        "mfu": 400 / 5 / 1000,
        "data_wait_share": 2 / 5,
        "evaluation_share": 15 / 20,
    }
    assert values["loss"] == 1.0 and values["loss/1"] == 1.0

    meter.step()  # the next window begins anew
    now.seconds += 2.0
    meter.add(METRICS, Load(tokens=60, supervised=20, texts=1))
    values, supervised_per_step = meter.close()
    assert supervised_per_step == [20]
    assert values["speed/tokens_per_second"] == 30 and values["speed/data_wait_share"] == 0


def test_on_a_cpu_memory_is_that_of_the_process() -> None:
    meter = Meter(Accelerator(cpu=True), Clock(0.0, 0.0), lambda load: 0.0, None)
    meter.step()
    meter.add(METRICS, Load(1, 1, 1))
    values, _ = meter.close()
    peak = int(next(line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line).split()[1])
    assert values["memory/rss_peak_gb"] == pytest.approx(peak * 1024 / 1e9, rel=0.05)
    assert "speed/mfu" not in values


def sequences() -> list[Sequence]:
    draw = random.Random(0)
    return [Sequence([draw.randrange(3, 60) for _ in range(40)], [i >= 10 for i in range(40)]) for _ in range(4)]


@pytest.mark.parametrize("kind", drafters.kinds())
def test_a_kinds_training_flops_are_what_pytorch_counts(kind: str, toy: SimpleNamespace) -> None:
    target = toy.make_target(dtype=torch.float32)
    drafter = toy.make_drafter(kind, target).train()
    batch = FeatureStore(target, sequences(), drafter.feature_layers, FeaturesConfig()).batch([0, 1, 2, 3])
    with FlopCounterMode(display=False) as counter:
        parts = drafter(batch)
        parts.sum.backward()
    load = Load(tokens=160, supervised=int(parts.count), texts=4)
    assert load.supervised == 120
    # Attention is left out, and texts end: the deepest heads of Medusa have fewer starts than the formula gives them.
    assert drafter.training_flops()(load) == pytest.approx(counter.get_total_flops(), rel=0.16)


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_thinned_depths_cost_less(kind: str, toy: SimpleNamespace) -> None:
    target = toy.make_target(dtype=torch.float32)
    drafter = toy.make_drafter(kind, target, loss=dict(thin=0.5)).train()
    # Four times over: a CPU rounds the number of starts up, which with few texts is more than a quarter of the work.
    batch = FeatureStore(target, sequences(), drafter.feature_layers, FeaturesConfig()).batch([0, 1, 2, 3] * 4)
    with FlopCounterMode(display=False) as counter:
        drafter(batch).sum.backward()
    assert drafter.training_flops()(Load(640, 480, 16)) == pytest.approx(counter.get_total_flops(), rel=0.25)


@pytest.mark.parametrize("tied", [False, True])
def test_the_targets_forward_is_two_per_parameter_that_multiplies(tied: bool, toy: SimpleNamespace) -> None:
    target = toy.make_target(dtype=torch.float32, tie_word_embeddings=tied)
    ids_BT = torch.randint(3, 60, (2, 20))
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        target.model(ids_BT)
    attention = counter.get_flop_counts()["Global"].get(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, 0)
    norms = sum(p.numel() for p in target.model.parameters() if p.dim() == 1)
    assert 2 * 40 * (target_matrices(target) - norms) == counter.get_total_flops() - attention
    drafter = toy.make_drafter("medusa", target)
    load = Load(40, 30, 2)
    alone, with_target = (batch_flops(drafter, online)(load) for online in (None, target))
    assert with_target - alone == 2 * 40 * target_matrices(target)


@pytest.mark.parametrize(
    "name, peak",
    [
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", 835.0),
        ("NVIDIA H200", 989.0),
        ("NVIDIA GH200 480GB", 989.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA A10", 125.0),
        ("NVIDIA A10G", None),
        ("Tesla T4", None),
    ],
)
def test_the_peak_of_a_device_is_found_by_its_name(name: str, peak: float | None) -> None:
    assert known_peak(name) == peak


def test_a_given_peak_counts_on_any_device() -> None:
    assert peak_tflops(torch.device("cpu"), None) is None
    assert peak_tflops(torch.device("cpu"), 1.5) == 1.5
