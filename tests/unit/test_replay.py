"""Prompt lookup replayed on finished answers, against the decode loop with the real drafter."""

from types import SimpleNamespace

import pytest

from draftsmith.drafters.ngram import NGram
from draftsmith.inference.evaluate import draft_and_verify
from draftsmith.inference.metrics import tokens_per_round
from draftsmith.inference.replay import ngram_rounds

PROMPTS = [[5, 6, 7, 8, 5, 6], [9], [10, 11, 12, 13, 10, 15, 16, 10, 11, 19, 20], [21, 22], [30, 30, 30]]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("depth", [1, 4])
def test_the_replay_commits_what_the_decode_loop_commits_in_every_round(
    temperature: float, depth: int, toy: SimpleNamespace
) -> None:
    target = toy.make_target()
    outputs = draft_and_verify(target, NGram(), PROMPTS, depth=depth, temperature=temperature, max_new=24, batch_size=2)
    replayed = [ngram_rounds(prompt, output.ids, depth) for prompt, output in zip(PROMPTS, outputs, strict=True)]
    for rounds, output in zip(replayed, outputs, strict=True):
        assert [r.committed for r in rounds] == [r.committed for r in output.rounds]
        assert rounds[:-1] == output.rounds[:-1]  # behind the end of an answer the target's tokens are not known
    assert tokens_per_round(replayed) == tokens_per_round([output.rounds for output in outputs]) > 1


def test_the_answer_of_another_drafter_gives_the_same(toy: SimpleNamespace) -> None:
    target = toy.make_target()
    options = {"depth": 3, "temperature": 0.7, "max_new": 20, "batch_size": 5}
    medusa = draft_and_verify(target, toy.make_drafter("medusa", target), PROMPTS, **options)
    ngram = draft_and_verify(target, NGram(), PROMPTS, **options)
    for prompt, ours, theirs in zip(PROMPTS, medusa, ngram, strict=True):
        assert [r.committed for r in ngram_rounds(prompt, ours.ids, 3)] == [r.committed for r in theirs.rounds]


def test_a_worked_example() -> None:
    #  prompt 1 2 3 9, then 1 (prefill): drafts what followed "1" before, 2 3 9; 2 and 3 are right, the target says 4
    rounds = ngram_rounds([1, 2, 3, 9], [1, 2, 3, 4, 4, 4], 3)
    assert [(r.accepted, r.committed) for r in rounds] == [(2, 3), (2, 2)]  # "4" is drafted to repeat; two are left
    assert ngram_rounds([1, 2], [3], 3) == []
