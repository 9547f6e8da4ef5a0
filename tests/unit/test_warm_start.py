"""Warm starts: the same drafter for another revision of the target, and what is refused."""

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from draftsmith import drafters
from draftsmith.drafters.base import TrainableDrafter
from draftsmith.drafters.vocabulary import vocabulary_hash
from draftsmith.inference import metrics
from draftsmith.inference.evaluate import draft_and_verify
from draftsmith.inference.target import Target
from draftsmith.train import warm_start
from draftsmith.train.config import RunConfig, read

KEPT = torch.arange(48)
"""Supervised tokens of the start's data; the draft vocabulary has 48 tokens."""


@pytest.fixture(scope="module")
def target(toy: SimpleNamespace) -> Target:
    found: Target = toy.make_target()
    return found


@pytest.fixture(scope="module")
def revision(toy: SimpleNamespace) -> Target:
    """The same sizes, other weights."""
    found: Target = toy.make_target(seed=1)
    return found


@pytest.fixture
def run(toy: SimpleNamespace, target: Target, tmp_path: Path) -> Callable[..., RunConfig]:
    """The config of a run that starts from a drafter of the old target: `run(kind, of=kind of the start, **settings)`."""

    def make(kind: str, *overrides: str, of: str | None = None, **changes: Any) -> RunConfig:
        start = initialised(toy, of or kind, target, KEPT, **changes)
        drafters.save(start.served(target.shape), tmp_path / "start")
        values = {
            "output": "runs/x", "start": str(tmp_path / "start"), "target": {"path": "t"},
            "drafter": {"kind": kind, **toy.KIND_SETTINGS.get(kind, {})}, "data": {"train": ["a"]}, "eval": {"prompts": "p"},
        }  # fmt: skip
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
        return read(tmp_path / "run.yaml", overrides)

    return make


def initialised(
    toy: SimpleNamespace, kind: str, target: Target, tokens: torch.Tensor, **changes: Any
) -> TrainableDrafter:
    torch.manual_seed(5)
    drafter = drafters.build(kind, {**toy.KIND_SETTINGS.get(kind, {}), **changes}, target.shape)
    drafter.initialise(target, counts(tokens))
    for parameter in drafter.parameters():  # of some kinds the first weights follow from the target
        parameter.data += 0.01 * torch.randn_like(parameter)
    return drafter


def counts(tokens: torch.Tensor) -> torch.Tensor:
    return torch.zeros(64, dtype=torch.int64).index_fill_(0, tokens, 3)


def begin(config: RunConfig, target: Target, counts_V: torch.Tensor) -> tuple[TrainableDrafter, str]:
    """As training does."""
    start = warm_start.read(config)
    assert start is not None
    torch.manual_seed(9)
    drafter = drafters.build(config.kind, config.drafter_settings, target.shape)
    drafter.initialise(target, warm_start.counts_for_the_map(config, start, counts_V))
    return drafter, warm_start.take_over(config, start, drafter, counts_V)


@pytest.mark.parametrize("kind", drafters.kinds())
def test_a_drafter_begins_as_its_start_for_another_revision_of_the_target(
    kind: str, run: Callable[..., RunConfig], toy: SimpleNamespace, target: Target, revision: Target
) -> None:
    of = "medusa" if kind == "medusa2" else kind  # what medusa2 leaves behind, too
    config = run(kind, of=of)
    assert config.start is not None
    drafter, line = begin(config, revision, counts(KEPT))
    served, start = drafter.served(revision.shape), drafters.load(config.start)
    assert served.state_dict().keys() == start.state_dict().keys()
    assert all(torch.equal(served.state_dict()[name], tensor) for name, tensor in start.state_dict().items())
    assert target.shape.fingerprint in line and "covers 100.0% of this run's answer tokens" in line
    served.to(revision.dtype).eval().check_target(revision.shape)


def test_a_warm_started_drafter_is_accepted_as_its_start_is_before_the_first_step(
    run: Callable[..., RunConfig], target: Target
) -> None:
    config = run("eagle3")
    assert config.start is not None
    drafter, _ = begin(config, target, counts(KEPT))
    prompts = [[5, 6, 7], [8, 9, 10, 11], [12, 13]]
    figures = [
        metrics.acceptance(
            draft_and_verify(
                target, one.to(target.dtype).eval(), prompts, depth=3, temperature=0.0, max_new=16, batch_size=2
            )
        )
        for one in (drafter.served(target.shape), drafters.load(config.start))
    ]
    assert figures[0] == figures[1]


def test_another_map_is_refused_with_both_hashes_and_what_the_old_one_covers(
    run: Callable[..., RunConfig], target: Target
) -> None:
    others = torch.arange(12, 60)
    with pytest.raises(ValueError) as caught:
        begin(run("eagle3"), target, counts(others))
    message = str(caught.value)
    assert f"its map's hash is {vocabulary_hash(KEPT)}, theirs is {vocabulary_hash(others)}" in message
    assert "its map covers 75.0% of this run's answer tokens" in message  # 36 of 48
    assert "To keep it, set data.vocabulary: start" in message


@pytest.mark.parametrize("kind", ["eagle3", "eagle", "draft_lm", "medusa"])
def test_the_map_of_the_start_is_kept_by_request(kind: str, run: Callable[..., RunConfig], target: Target) -> None:
    """Of a kind that borrows the target's head too, the right rows of it."""
    drafter, line = begin(run(kind, "data.vocabulary=start"), target, counts(torch.arange(12, 60)))
    assert drafter.token_ids_W is not None and drafter.token_ids_W.tolist() == KEPT.tolist()
    assert "covers 75.0% of this run's answer tokens" in line
    if drafter.shares_head:
        assert torch.equal(drafter.shared_head_WD, target.head_weight()[KEPT])


@pytest.mark.parametrize(
    "kind, changes, message",
    [
        ("eagle3", {"draft_vocab_size": 32}, "draft_vocab_size: 48 here, 32 there; in all"),
        ("eagle3", {"layers": [1, 2, 4]}, "layers of the target: [1, 2, 3] here, [1, 2, 4] there"),
        ("eagle3", {"fc_norm": True}, "fc_norm: False here, True there"),
        ("medusa", {"num_heads": 3}, "num_heads: 5 here, 3 there"),
        ("draft_lm", {"layers": [1, 2]}, "layers: (1,) here, (1, 2) there"),
        ("dflash", {"num_layers": 1}, "num_layers: 2 here, 1 there"),
    ],
)
def test_other_sizes_are_refused_by_the_setting_that_makes_them(
    kind: str, changes: dict[str, Any], message: str, run: Callable[..., RunConfig], target: Target
) -> None:
    with pytest.raises(ValueError, match=f"has other parameters than this run's drafter .*{re.escape(message)}"):
        begin(run(kind, **changes), target, counts(KEPT))


def test_settings_that_shape_no_parameter_may_differ(run: Callable[..., RunConfig], target: Target) -> None:
    drafter, _ = begin(run("eagle3", steps=2, loss={"divergence": "jsd"}), target, counts(KEPT))
    assert drafter.config.steps != 2


def test_another_kind_is_refused(run: Callable[..., RunConfig]) -> None:
    with pytest.raises(
        ValueError, match="is a drafter of kind medusa, and this run trains eagle3; give a start of that"
    ):
        warm_start.read(run("eagle3", of="medusa"))


def test_a_start_for_a_target_of_other_sizes_is_refused(run: Callable[..., RunConfig], toy: SimpleNamespace) -> None:
    narrow = toy.make_target(intermediate_size=32)
    with pytest.raises(ValueError, match="was made for a target of other sizes .intermediate_size: 32 here, 64 there"):
        begin(run("eagle3"), narrow, counts(KEPT))


def test_a_start_that_is_no_drafter_is_refused(run: Callable[..., RunConfig], tmp_path: Path) -> None:
    config = run("eagle3")
    with pytest.raises(ValueError, match="/no/such is no drafter"):
        warm_start.read(dataclasses.replace(config, start="/no/such"))
    assert warm_start.read(dataclasses.replace(config, start=None)) is None
    record = json.loads((tmp_path / "start" / "config.json").read_text())
    assert record["vocabulary_hash"] == vocabulary_hash(KEPT)


def test_the_doctor_finds_a_map_that_does_not_fit_before_training_does(
    healthy: SimpleNamespace, toy: SimpleNamespace, tmp_path: Path
) -> None:
    from draftsmith.train import checks_drafter, doctor

    settings = {"layers": [1, 2, 3], "draft_vocab_size": 64, "steps": 2}
    start = drafters.build("eagle3", settings, healthy.target.shape)
    counts_V = torch.zeros(320, dtype=torch.int64).index_fill_(0, torch.arange(100, 200), 1)
    start.initialise(healthy.target, counts_V)
    drafters.save(start, tmp_path / "start")
    checks = (checks_drafter.draft_vocabulary,)
    refused = doctor.examine(healthy.subject(f"start={tmp_path / 'start'}"), checks)[0]
    assert refused.verdict == "fail" and "has another draft vocabulary than this run's data choose" in refused.found
    kept = doctor.examine(healthy.subject(f"start={tmp_path / 'start'}", "data.vocabulary=start"), checks)[0]
    assert "has another draft vocabulary" not in kept.found
