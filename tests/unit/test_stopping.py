"""Where a sequence ends: whatever a round brings, the output is that of plain decoding, which judges token by token."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftsmith.drafters.tree import Fixed, chain
from draftsmith.inference import metrics
from draftsmith.inference.decode import generate
from draftsmith.inference.load_target import load
from draftsmith.inference.output import Output
from draftsmith.inference.sampling import Sampler
from draftsmith.inference.speculation import Speculation
from draftsmith.inference.stopping import Stopper, Stopping
from draftsmith.inference.target import Target

PROMPTS = [[5, 6, 7, 8], [40, 41], [90, 91, 92]]


@pytest.fixture(scope="module")
def target(toy_folder: Path) -> Target:
    return load(toy_folder, dtype=torch.float64)


@pytest.fixture(scope="module")
def plain(target: Target) -> list[Output]:
    return decode(target)


def decode(target: Target, **options: Any) -> list[Output]:
    options = {"max_new": 30, "sampler": Sampler(1.0), "stop_at_eos": False, "log_probs": True, **options}
    return generate(target, PROMPTS, **options)


def knowing(stubs: SimpleNamespace, plain: list[Output]) -> Any:
    """A drafter that is always right, so that whole blocks are accepted."""
    texts = [prompt + output.ids for prompt, output in zip(PROMPTS, plain, strict=True)]
    return stubs.Scripted(texts, lambda row, position, siblings: 0)


def same(a: list[Output], b: list[Output]) -> None:
    for x, y in zip(a, b, strict=True):
        assert (x.ids, x.reason, x.text) == (y.ids, y.reason, y.text)
        assert x.log_probs == pytest.approx(y.log_probs, abs=1e-9) and len(x.log_probs) == len(x.ids)


@pytest.mark.parametrize("plan", [chain(1), chain(4), Fixed((-1, -1, 0, 0, 1, 4, 5))], ids=str)
@pytest.mark.parametrize("begin, length", [(1, 1), (3, 1), (4, 2), (6, 3), (9, 5), (10, 2), (12, 4)])
def test_a_stop_string_ends_the_text_where_plain_decoding_does(
    target: Target, stubs: SimpleNamespace, plain: list[Output], plan: Fixed, begin: int, length: int
) -> None:
    """Strings that start and end at every place of a block, some across two blocks; two more never come, one overlaps it."""
    assert target.tokenizer is not None
    wanted = target.tokenizer.decode(plain[0].ids[begin : begin + length]).strip("\ufffd")  # no parts of characters
    if wanted not in target.tokenizer.decode(plain[0].ids[: begin + length]) or not wanted:
        pytest.skip("those bytes make up other characters where they stand")
    stopping = Stopping(strings=("never there", wanted, wanted + "x"))
    alone = decode(target, stopping=stopping)
    fast = decode(target, stopping=stopping, speculation=Speculation(knowing(stubs, plain), plan))
    same(alone, fast)
    assert alone[0].reason == "stop string" and len(alone[0].ids) <= begin + length
    assert alone[0].ids == plain[0].ids[: len(alone[0].ids)]
    assert wanted in target.tokenizer.decode(alone[0].ids) and wanted not in str(alone[0].text)
    for output in fast:
        assert 1 + sum(r.committed for r in output.rounds) == len(output.ids)


@pytest.mark.parametrize("place", range(8))
def test_an_end_token_at_every_place_of_a_block_ends_it_there(
    target: Target, stubs: SimpleNamespace, plain: list[Output], place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target, "eos_ids", (plain[0].ids[place], 99_999))
    alone = decode(target, stop_at_eos=True)
    fast = decode(target, stop_at_eos=True, speculation=Speculation(knowing(stubs, plain), chain(4)))
    same(alone, fast)
    assert alone[0].reason == "eos" and alone[0].finished
    assert alone[0].ids[-1] == plain[0].ids[place] and alone[0].ids.count(plain[0].ids[place]) == 1


def test_a_criterion_of_the_user_s_own_ends_it_inside_a_block(
    target: Target, stubs: SimpleNamespace, plain: list[Output]
) -> None:
    def after_seven(prompt: Any, ids: Any) -> bool:
        return len(prompt) + len(ids) >= 11

    stopping = Stopping(criteria=(after_seven,))
    alone = decode(target, stopping=stopping)
    fast = decode(target, stopping=stopping, speculation=Speculation(knowing(stubs, plain), chain(5)))
    same(alone, fast)
    assert [len(output.ids) for output in alone] == [7, 9, 8] and {output.reason for output in alone} == {"criterion"}


@pytest.mark.parametrize("budget", range(1, 9))
def test_the_budget_ends_it_exactly_and_each_prompt_may_have_its_own(
    target: Target, stubs: SimpleNamespace, plain: list[Output], budget: int
) -> None:
    budgets = [budget, 30, 1]
    fast = decode(target, max_new=budgets, speculation=Speculation(knowing(stubs, plain), chain(4)))
    same(decode(target, max_new=budgets), fast)
    assert [len(output.ids) for output in fast] == budgets and {output.reason for output in fast} == {"budget"}
    assert [output.ids for output in fast] == [o.ids[:n] for o, n in zip(plain, budgets, strict=True)]


def test_whichever_comes_first_wins(target: Target, plain: list[Output], monkeypatch: pytest.MonkeyPatch) -> None:
    assert target.tokenizer is not None
    token = plain[0].ids[4]
    string = target.tokenizer.decode([token])
    if string in target.tokenizer.decode(plain[0].ids[:4]):
        pytest.skip("the string comes earlier in this text")
    monkeypatch.setattr(target, "eos_ids", (token,))
    output = decode(target, stop_at_eos=True, max_new=5, stopping=Stopping(strings=(string,)))[0]
    assert (len(output.ids), output.reason) == (5, "eos")  # of three at once
    monkeypatch.setattr(target, "eos_ids", (plain[0].ids[6],))
    assert decode(target, stop_at_eos=True, stopping=Stopping(strings=(string,)))[0].reason == "stop string"


def test_the_time_budget_ends_everything_and_keeps_what_is_there(target: Target, plain: list[Output]) -> None:
    outputs = decode(target, max_new=200, stopping=Stopping(max_seconds=1e-6))
    for output, whole in zip(outputs, plain, strict=True):
        assert output.reason == "time" and 1 <= len(output.ids) < 5
        assert output.ids == whole.ids[: len(output.ids)]


def test_prompts_that_wait_when_the_time_is_over_stay_without_a_token(target: Target) -> None:
    outputs = decode(target, max_new=200, max_batch=1, stopping=Stopping(max_seconds=1e-6))
    assert [output.reason for output in outputs] == ["time"] * 3
    assert len(outputs[0].ids) >= 1 and outputs[1].ids == outputs[2].ids == []


def test_the_raw_length_counts_what_was_accepted_before_the_stop(
    target: Target, stubs: SimpleNamespace, plain: list[Output], monkeypatch: pytest.MonkeyPatch
) -> None:
    """K = 4, all accepted, the end in the second place of the second block: committed 5 and 2, accepted 4 and 4."""
    place = 7
    if plain[0].ids[place] in plain[0].ids[:place]:
        pytest.skip("that token comes earlier in this text")
    monkeypatch.setattr(target, "eos_ids", (plain[0].ids[place],))
    output = decode(target, stop_at_eos=True, speculation=Speculation(knowing(stubs, plain), chain(4)))[0]
    assert [(r.accepted, r.committed) for r in output.rounds] == [(4, 5), (4, 2)]
    numbers = metrics.acceptance([output])
    assert numbers["acceptance_length_raw"] == 5.0 and numbers["tokens_per_round"]["value"] == 3.5  # type: ignore[index]


def test_a_stop_string_of_characters_that_several_tokens_make_up(target: Target) -> None:
    """Byte-level tokens: an emoji is four of them, and the text before it may end in the middle of a character."""
    tokenizer = target.tokenizer
    assert tokenizer is not None
    ids = tokenizer.encode("ab🙂cd", add_special_tokens=False)
    stopper = Stopper(Stopping(strings=("🙂",)), (), tokenizer)
    kept, reason = stopper.cut([], [], ids, 100)
    assert reason == "stop string" and tokenizer.decode(ids[:kept]) == "ab🙂"
    one_by_one, seen = [], None
    for token in ids:
        _, seen = stopper.cut([], one_by_one, [token], 100)
        one_by_one.append(token)
        if seen:
            break
    assert one_by_one == ids[:kept] and stopper.text(one_by_one) == "ab"


def test_bad_stops_are_refused(toy: SimpleNamespace) -> None:
    with pytest.raises(ValueError, match="an empty stop string"):
        Stopping(strings=("a", ""))
    with pytest.raises(ValueError, match="max_seconds is 0"):
        Stopping(max_seconds=0)
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        generate(toy.make_target(), [[5]], max_new=2, sampler=Sampler(), stopping=Stopping(strings=("a",)))
