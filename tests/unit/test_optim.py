"""The course of the learning rate against closed forms, and the averaged weights against a loop."""

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from draftsmith import drafters
from draftsmith.train.average import Average
from draftsmith.train.config import OptimConfig, RunConfig, read
from draftsmith.train.optim import make_optimizers, schedule

STEPS, FINAL = 200, 0.25
# Warm-up over the first 20 of 200 steps; wsd falls over the last 50.
SCHEDULES: dict[str, Callable[[float], float]] = {
    "cosine": lambda t: FINAL + (1 - FINAL) * (1 + math.cos(math.pi * (t - 20) / 180)) / 2,
    "linear": lambda t: 1 - (1 - FINAL) * (t - 20) / 180,
    "constant": lambda t: 1.0,
    "wsd": lambda t: 1.0 if t <= 150 else 1 - (1 - FINAL) * (t - 150) / 50,
}


def make(name: str, warmup: float = 0.1) -> OptimConfig:
    share = 0.25 if name == "wsd" else None
    return OptimConfig(schedule=name, warmup=warmup, final=FINAL, decay_share=share)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_is_its_closed_form_behind_a_linear_warm_up(name: str) -> None:
    shares = [schedule(step, STEPS, make(name)) for step in range(STEPS)]
    assert shares[:20] == pytest.approx([(step + 1) / 21 for step in range(20)])
    assert shares[20:] == pytest.approx([SCHEDULES[name](step) for step in range(20, STEPS)])
    assert schedule(99.5, STEPS, make(name)) == pytest.approx(SCHEDULES[name](99.5))  # between steps, for time budgets


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("warmup", [0.0, 0.1, 0.75])
def test_a_schedule_starts_above_nothing_reaches_its_peak_and_ends_where_it_should(name: str, warmup: float) -> None:
    config = make(name, warmup)
    shares = [schedule(step, STEPS, config) for step in range(STEPS)]
    assert 0 < shares[0] <= 1 and max(shares) == 1 and shares[round(warmup * STEPS)] == 1
    end = 1 if name == "constant" else FINAL
    assert schedule(STEPS, STEPS, config) == pytest.approx(end)
    assert schedule(1.3 * STEPS, STEPS, config) == pytest.approx(end)  # a step that outlasts the time budget


def run_config(folder: Path, kind: str, toy: SimpleNamespace) -> RunConfig:
    file = folder / "run.yaml"
    file.write_text("output: o\ntarget: {path: t}\ndata: {train: [a]}\neval: {prompts: p}\n")
    return read(file, [f"drafter={ {'kind': kind, **toy.KIND_SETTINGS.get(kind, {})} }"])


def test_muon_takes_the_inner_matrices_and_adamw_the_rest_and_only_matrices_decay(toy: SimpleNamespace) -> None:
    """Of a kind that has everything: matrices, norms, a bias, vectors, embeddings, head rows and a head of a single row."""
    settings = {"confidence_weight": 0.5, "markov_rank": 4, "own_head": True}
    drafter = toy.make_drafter("dflash", toy.make_target(dtype=torch.float32), **settings)
    config = OptimConfig(name="muon", learning_rate=1e-3, muon_learning_rate=1e-2, weight_decay=0.1)
    names = {id(parameter): name for name, parameter in drafter.named_parameters()}
    found = {
        names[id(parameter)]: (type(optimizer).__name__, group["weight_decay"], group["peak"])
        for optimizer in make_optimizers(drafter, config)
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    assert found.keys() == set(names.values())
    for name, parameter in drafter.named_parameters():
        inner = name == "fc.weight" or (name.startswith("layers.") and parameter.dim() == 2)
        if inner:
            assert found[name] == ("Muon", 0.1, 1e-2), name
        else:
            assert found[name] == ("AdamW", 0.1 if parameter.dim() == 2 else 0.0, 1e-3), name


def test_muon_s_steps_are_as_large_as_adamw_s_are_taken_to_be(toy: SimpleNamespace) -> None:
    """Each matrix moves by 0.2 times the rate (root mean square; Liu et al. 2025), whatever its shape and the gradient's size."""
    drafter = toy.make_drafter("eagle3", toy.make_target(dtype=torch.float32))
    _, muon = make_optimizers(drafter, OptimConfig(name="muon", muon_learning_rate=1e-2))
    parameters = muon.param_groups[0]["params"]
    before = [parameter.detach().clone() for parameter in parameters]
    generator = torch.Generator().manual_seed(0)
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.randn(parameter.shape, generator=generator) * 10.0 ** (number - 3)
    muon.step()
    assert len({tuple(parameter.shape) for parameter in parameters}) >= 3
    for parameter, old in zip(parameters, before, strict=True):
        assert float((parameter.detach() - old).square().mean().sqrt()) == pytest.approx(0.2e-2, rel=0.2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("kind", [k for k in drafters.kinds() if not drafters.kind_module(k).Model.adapts_target])
def test_the_average_is_that_of_a_loop_and_comes_back_bit_for_bit(
    kind: str, dtype: torch.dtype, toy: SimpleNamespace, tmp_path: Path
) -> None:
    weights = toy.make_drafter(kind, toy.make_target(dtype=torch.float32)).to(dtype)
    average = Average(0.8, weights)
    expected = {name: parameter.detach().double() for name, parameter in weights.named_parameters()}
    for step in range(1, 41):
        with torch.no_grad():
            for parameter in weights.parameters():
                parameter.add_(torch.randn_like(parameter))
        average.update(weights, step)
        decay = min(0.8, (1 + step) / (10 + step))  # 2/11, 3/12, … and 0.8 from step 35 on
        for name, parameter in weights.named_parameters():
            expected[name] = decay * expected[name] + (1 - decay) * parameter.detach().double()
    for name, parameter in average.drafter.named_parameters():
        assert parameter.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert not parameter.requires_grad
        torch.testing.assert_close(parameter.double(), expected[name], rtol=1e-5, atol=1e-5)
    buffers = dict(weights.named_buffers())
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in average.drafter.named_buffers())

    average.save(tmp_path)
    again = Average(0.8, weights)
    again.load(tmp_path)
    saved = average.drafter.state_dict()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in again.drafter.state_dict().items())
