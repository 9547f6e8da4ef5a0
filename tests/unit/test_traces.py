"""Decode traces: what the loop records of its drafts, and how a round reads."""

from types import SimpleNamespace
from typing import Any

import pytest

from draftsmith.drafters.tree import chain
from draftsmith.inference.decode import generate
from draftsmith.inference.evaluate import draft_and_verify
from draftsmith.inference.output import Output, Round
from draftsmith.inference.sampling import Sampler
from draftsmith.inference.speculation import Speculation
from draftsmith.inference.traces import trace

PROMPTS = [[5, 6, 7, 8, 5, 6], [9], [21, 22, 23]]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_recorded_drafts_begin_with_the_accepted_tokens_and_then_differ(
    temperature: float, toy: SimpleNamespace
) -> None:
    target = toy.make_target()
    drafter = toy.make_drafter("eagle3", target)
    outputs = draft_and_verify(
        target, drafter, PROMPTS, depth=3, temperature=temperature, max_new=30, batch_size=2, drafts=True
    )
    rejected = 0
    for output in outputs:
        place = 1
        assert len(output.drafts) == len(output.rounds)
        for round_, drafted in zip(output.rounds, output.drafts, strict=True):
            assert len(drafted) == round_.proposed == 3
            committed = output.ids[place : place + round_.committed]
            agreeing = min(round_.accepted, round_.committed)
            assert drafted[:agreeing] == committed[:agreeing]
            if round_.accepted < round_.proposed and round_.committed == round_.accepted + 1:
                assert drafted[round_.accepted] != committed[-1]  # the target's correction
                rejected += 1
            place += round_.committed
        assert place == len(output.ids)
    assert rejected > 10


def test_nothing_is_recorded_unless_it_is_asked_for(toy: SimpleNamespace) -> None:
    target = toy.make_target()
    speculation = Speculation(toy.make_drafter("medusa", target), chain(3))
    options: dict[str, Any] = {"max_new": 12, "sampler": Sampler(0.0), "speculation": speculation}
    plain, recorded = generate(target, PROMPTS, **options), generate(target, PROMPTS, drafts=True, **options)
    assert all(not output.drafts for output in plain) and all(output.drafts for output in recorded)
    assert [output.ids for output in plain] == [output.ids for output in recorded]
    assert [output.rounds for output in plain] == [output.rounds for output in recorded]


def test_a_trace_names_correction_bonus_and_end(toy: SimpleNamespace) -> None:
    tokenizer = toy.make_tokenizer()

    def ids(text: str) -> list[int]:
        found: list[int] = tokenizer(text)["input_ids"]
        return found

    prompt, the, fox, dog, jumps = ids("hello there"), *(ids(word) for word in (" the", " fox", " dog", " jumps"))
    assert all(len(word) == 1 for word in (the, fox, dog, jumps)), "one token each"
    output = Output(
        ids=[*the, *fox, *jumps, *the, *dog, *fox, *jumps],  # the first is the prefill's
        rounds=[Round(2, 1, 2, 2), Round(2, 2, 3, 2), Round(2, 2, 1, 2)],
        drafts=[[*fox, *dog], [*the, *dog], [*jumps, *the]],
    )
    first, second, third = trace(tokenizer, prompt, output)
    assert first == {
        "round": 1,
        "before": "hello there the",
        "drafted": [" fox", " dog"],
        "accepted": [" fox"],
        "next": " jumps",
        "kind": "correction",
    }
    assert (second["accepted"], second["next"], second["kind"]) == ([" the", " dog"], " fox", "bonus")
    assert (third["accepted"], third["next"], third["kind"]) == ([" jumps"], "", "end")
    assert second["before"] == "hello there the fox jumps"
