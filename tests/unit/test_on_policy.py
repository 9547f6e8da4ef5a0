"""Answers that the drafter writes itself: its own samples behind kept prompts, the same whenever the same step is reached."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftsmith.drafters.base import TrainableDrafter
from draftsmith.inference.decode import generate
from draftsmith.inference.sampling import Sampler
from draftsmith.inference.target import Target
from draftsmith.train import on_policy
from draftsmith.train.data import Sequence
from draftsmith.train.features import FeatureStore

SEQUENCES = [
    Sequence([5, 9, 3, 14, 8, 33, 20], [False, False, True, True, True, True, False]),
    Sequence([5, 9, 40, 12, 7, 21, 30, 11, 19, 6], [False, False, True, True, False, False, False, True, True, True]),
    Sequence([4, 3, 60, 17], [True] * 4),
]
SPANS = [(2, 6), (7, 10), (2, 4)]
KEY = (0, 17, 1)


@pytest.fixture
def target(toy: SimpleNamespace) -> Target:
    target: Target = toy.make_target()
    target.eos_ids = ()
    return target


@pytest.fixture
def drafter(toy: SimpleNamespace, target: Target) -> TrainableDrafter:
    made: TrainableDrafter = toy.make_drafter("draft_lm", target, draft_vocab_size=None)
    return made


def ids(sequences: list[Sequence]) -> list[list[int]]:
    return [sequence.ids for sequence in sequences]


def test_the_last_answer_is_the_last_supervised_run() -> None:
    assert [on_policy.last_answer(sequence) for sequence in SEQUENCES] == SPANS


def test_what_is_written_is_what_the_draft_samples_alone(
    drafter: TrainableDrafter, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain decoding of the draft as a model of its own, with the same noise, gives the same tokens."""
    seeds: list[int] = []
    make_pick = on_policy.make_pick

    def noting(way: str, sampler: Sampler, seeds_B: torch.Tensor, *rest: Any) -> Any:
        seeds.extend(seeds_B.tolist())
        return make_pick(way, sampler, seeds_B, *rest)

    monkeypatch.setattr(on_policy, "make_pick", noting)
    written = on_policy.write(drafter, target, SEQUENCES, KEY)
    alone = Target(copy.deepcopy(drafter.lm), None, "the draft alone")
    outputs = generate(
        alone,
        [s.ids[:begin] for s, (begin, _) in zip(SEQUENCES, SPANS, strict=True)],
        max_new=[end - begin for begin, end in SPANS],
        sampler=Sampler(1.0),
        seeds=seeds,
        stop_at_eos=False,
    )
    for sequence, ours, output, (begin, end) in zip(SEQUENCES, written, outputs, SPANS, strict=True):
        assert ours.ids == sequence.ids[:begin] + output.ids
        assert ours.loss_mask == sequence.loss_mask[:begin] + [True] * (end - begin)
    assert ids(written) != [s.ids[:end] for s, (_, end) in zip(SEQUENCES, SPANS, strict=True)]


def test_an_answer_ends_with_its_first_end_of_sequence_token(drafter: TrainableDrafter, target: Target) -> None:
    whole = on_policy.write(drafter, target, SEQUENCES, KEY)
    target.eos_ids = (whole[0].ids[3],)  # the second token of the first answer
    cut = on_policy.write(drafter, target, SEQUENCES, KEY)[0]
    first = whole[0].ids.index(whole[0].ids[3], 2)
    assert cut.ids == whole[0].ids[: first + 1] and cut.loss_mask == [False, False] + [True] * (first - 1)


def test_a_reduced_head_writes_only_tokens_that_it_has(toy: SimpleNamespace, target: Target) -> None:
    drafter = toy.make_drafter("draft_lm", target, draft_vocab_size=7)
    written = on_policy.write(drafter, target, SEQUENCES, KEY)
    tokens = {t for s, (begin, _) in zip(written, SPANS, strict=True) for t in s.ids[begin:]}
    assert tokens <= set(drafter.token_ids_W.tolist()) and len(tokens) > 1


def test_key_and_weights_decide_what_is_written(drafter: TrainableDrafter, target: Target) -> None:
    first = on_policy.write(drafter, target, SEQUENCES, KEY)
    torch.manual_seed(99)  # global randomness has no say
    assert on_policy.write(drafter, target, SEQUENCES, KEY) == first
    assert on_policy.write(drafter, target, SEQUENCES, (0, 18, 1)) != first
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.mul_(0.5)
    assert on_policy.write(drafter, target, SEQUENCES, KEY) != first
    assert all(parameter.requires_grad for parameter in drafter.parameters())  # it goes on being trained


def test_the_share_of_written_batches_is_the_one_asked_for() -> None:
    """Exactly none and all at the ends; between them within five standard deviations (fixed keys: no false alarm by chance)."""
    keys = [(0, step, number) for step in range(1000) for number in range(2)]
    assert not any(on_policy.chosen(0.0, key) for key in keys)
    assert all(on_policy.chosen(1.0, key) for key in keys)
    assert abs(sum(on_policy.chosen(0.3, key) for key in keys) - 600) < 5 * (2000 * 0.3 * 0.7) ** 0.5


def test_the_target_judges_written_text_as_it_does_stored_text(target: Target) -> None:
    ours, stored = on_policy.batch(target, SEQUENCES, 3), FeatureStore(target, SEQUENCES, ()).batch([0, 1, 2], 3)
    for name in ("ids_BT", "loss_mask_BT", "last_BTD", "log_normaliser_BT", "argmax_BT"):
        assert torch.equal(getattr(ours, name), getattr(stored, name)), name
    assert ours.epoch == stored.epoch and ours.features_BTF.shape == (1, 21, 0)
