"""From conversation files to batches: what is kept, what is cut, and which sequences make which batch."""

import collections
import json
import random
import time
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors

from draftsmith.train.data import Sequence, count_answer_tokens, data_hash, load_sequences, plan_epoch


def conversations(path: Path, answers: list[str], **changes: Any) -> str:
    records = [
        {"id": f"c{i}", "messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": answer}], **changes}
        for i, answer in enumerate(answers)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def load(file: str | list[str], toy: SimpleNamespace, **changes: Any) -> list[Sequence]:
    options = {"max_length": 256, "max_answer_tokens": None, "seed": 0, **changes}
    return load_sequences([file] if isinstance(file, str) else file, toy.make_tokenizer(), **options)


@pytest.fixture
def words() -> list[str]:
    return ["the quick brown fox " * n + "x" * n for n in range(1, 13)]


def test_a_sequence_is_the_rendered_conversation_with_its_answer_supervised(
    toy: SimpleNamespace, tmp_path: Path
) -> None:
    (sequence,) = load(conversations(tmp_path / "a", ["hi"]), toy)
    tokenizer = toy.make_tokenizer()
    text = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nhi<|im_end|>\n"
    assert sequence.ids == tokenizer(text, add_special_tokens=False)["input_ids"]
    supervised = [token for token, mask in zip(sequence.ids, sequence.loss_mask, strict=True) if mask]
    assert tokenizer.decode(supervised) == "hi<|im_end|>"
    assert sequence.num_answer_tokens == len(supervised)


def test_files_follow_one_another_in_the_given_order(toy: SimpleNamespace, tmp_path: Path) -> None:
    first, second = conversations(tmp_path / "a", ["one"]), conversations(tmp_path / "b", ["two", "three"])
    both = load([first, second], toy)
    assert both == load(first, toy) + load(second, toy) and len(both) == 3


def test_long_conversations_are_cut_and_those_without_an_answer_left_are_dropped(
    toy: SimpleNamespace, tmp_path: Path, words: list[str]
) -> None:
    file = conversations(tmp_path / "a", words)
    whole, cut = load(file, toy), load(file, toy, max_length=30)
    assert [(s.ids, s.loss_mask) for s in cut] == [(s.ids[:30], s.loss_mask[:30]) for s in whole]
    first_answer_token = whole[0].loss_mask.index(True)
    assert len(load(file, toy, max_length=first_answer_token + 1)) == len(words)
    with pytest.raises(
        ValueError, match=f"no supervised token within {first_answer_token} tokens; raise data.max_length"
    ):
        load(file, toy, max_length=first_answer_token)


def test_a_truncated_answer_is_not_taught_to_end(toy: SimpleNamespace, tmp_path: Path) -> None:
    (whole,) = load(conversations(tmp_path / "a", ["hi there"]), toy)
    (cut,) = load(conversations(tmp_path / "b", ["hi there"], truncated=True), toy)
    end = toy.make_tokenizer().convert_tokens_to_ids("<|im_end|>")
    assert [t for t, m in zip(whole.ids, whole.loss_mask, strict=True) if m][-1] == end
    assert [t for t, m in zip(cut.ids, cut.loss_mask, strict=True) if m][-1] != end


def test_a_token_limit_keeps_a_random_choice_that_just_reaches_it(
    toy: SimpleNamespace, tmp_path: Path, words: list[str]
) -> None:
    file = conversations(tmp_path / "a", words)
    whole = load(file, toy)
    for limit in (1, 40, 100):
        kept = load(file, toy, max_answer_tokens=limit)
        totals = [s.num_answer_tokens for s in kept]
        assert sum(totals) >= limit > sum(totals[:-1])  # without the last one it would be too little
        assert all(s in whole for s in kept)
        assert kept == load(file, toy, max_answer_tokens=limit)
    assert load(file, toy, max_answer_tokens=100, seed=1) != load(file, toy, max_answer_tokens=100, seed=0)
    everything = load(file, toy, max_answer_tokens=10**9)
    assert sorted(s.ids for s in everything) == sorted(s.ids for s in whole)


def test_a_broken_conversation_is_named_with_its_file_and_line(toy: SimpleNamespace, tmp_path: Path) -> None:
    path = tmp_path / "a"
    file = conversations(path, ["fine"])
    path.write_text(path.read_text() + "{broken\n")
    with pytest.raises(ValueError, match=f"{path}:2: broken JSON"):
        load(file, toy)
    prompts = tmp_path / "b"
    prompts.write_text(json.dumps({"id": "p", "messages": [{"role": "user", "content": "hello"}]}) + "\n")
    with pytest.raises(ValueError, match=f"{prompts}:1: conversation p: no assistant turn"):
        load(str(prompts), toy)


def test_few_rows_that_cannot_be_read_or_rendered_are_counted_and_many_stop(
    toy: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a"
    file = conversations(path, ["one", "two", "three"])
    prompt = json.dumps({"messages": [{"role": "user", "content": "hello"}]})
    path.write_text(path.read_text() + f"{{broken\n{prompt}\n{path.read_text().splitlines()[0]}\n")
    assert len(load(file, toy, max_bad_share=0.4)) == 3
    error = capsys.readouterr().err
    assert "data: read 6 rows: 3 used, 1 duplicates, 2 rejected (broken JSON 1, no answer 1)\n" in error
    with pytest.raises(
        ValueError,
        match=f"2 of 6 rows cannot be used .*: {path}:4: broken JSON .*; {path}:5: conversation line-5: no assistant",
    ):
        load(file, toy, max_bad_share=0.3)


def test_a_row_that_cannot_be_rendered_is_one_row_whatever_its_weight(
    toy: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = conversations(tmp_path / "a", ["one", "two", "three"])
    with open(file, "a") as more:
        more.write('{"prompt": "nobody answered this"}\n')
    assert len(load(f"{file}?weight=3", toy, max_bad_share=0.25)) == 9
    assert (
        "read 4 rows: 3 used, 6 copies of these (weight), 0 duplicates, 1 rejected (no answer 1)\n"
        in capsys.readouterr().err
    )


def test_what_is_cut_and_what_is_dropped_is_said(
    toy: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a"
    rows = [([1, 2, 3, 4, 5, 6, 7, 8], 0b11110000), ([1, 2, 3, 4, 5, 6], 0b001100), ([1, 2, 3, 4, 5, 6, 7], 0b1100000)]
    records = [{"input_ids": ids, "loss_mask": [bits >> i & 1 for i in range(len(ids))]} for ids, bits in rows]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert load(str(path), toy, max_length=5) == [
        Sequence([1, 2, 3, 4, 5], [False] * 4 + [True]),
        Sequence([1, 2, 3, 4, 5], [False, False, True, True, False]),
    ]
    assert capsys.readouterr().err.splitlines()[-1] == (
        "data: 2 sequences of 10 tokens, 30.0% of them supervised; 3 cut at 5 tokens, which loses 5 supervised tokens; "
        "1 dropped with none left"
    )


def test_token_ids_stay_as_they_are_and_must_be_the_tokenizers_own(toy: SimpleNamespace, tmp_path: Path) -> None:
    path, size = tmp_path / "a", len(toy.make_tokenizer())
    path.write_text(json.dumps({"input_ids": [5, 6, size - 1], "labels": [-100, 6, size - 1]}))
    assert load(str(path), toy) == [Sequence([5, 6, size - 1], [False, True, True])]
    path.write_text(json.dumps({"input_ids": [5, 6, size], "labels": [-100, 6, size]}))
    with pytest.raises(
        ValueError,
        match=f"{path}:1: conversation line-1: token id {size}, but the target's tokenizer has {size}; give ids of",
    ):
        load(str(path), toy)


def test_raw_text_is_supervised_whole_but_for_what_the_tokenizer_adds(toy: SimpleNamespace, tmp_path: Path) -> None:
    path, tokenizer = tmp_path / "a", toy.make_tokenizer()
    path.write_text(json.dumps({"text": "the quick brown fox"}))
    ids = tokenizer("the quick brown fox", add_special_tokens=False)["input_ids"]
    assert load(str(path), toy) == [Sequence(ids, [True] * len(ids))]
    bos = tokenizer.eos_token
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.eos_token_id)]
    )
    (sequence,) = load_sequences([str(path)], tokenizer, max_length=64, max_answer_tokens=None, seed=0)
    assert sequence == Sequence([tokenizer.eos_token_id, *ids], [False] + [True] * len(ids))


def test_data_in_which_nothing_is_supervised_is_an_error(toy: SimpleNamespace, tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text(json.dumps({"input_ids": [5, 6, 7], "loss_mask": [0, 0, 0]}))
    with pytest.raises(ValueError, match="no supervised token within 256 tokens"):
        load(str(path), toy)


def test_a_source_has_settings_and_a_cut_file_can_be_salvaged(toy: SimpleNamespace, tmp_path: Path) -> None:
    path = tmp_path / "a"
    whole = load(conversations(path, ["one", "two", "three"]), toy)
    assert load(f"{path}?limit=2&weight=2", toy) == whole[:2] * 2
    path.write_text(path.read_text()[:-5])
    with pytest.raises(ValueError, match=f"{path}: cut off at line 3, "):
        load(str(path), toy)
    assert load(str(path), toy, salvage=True) == whole[:2]


def test_answer_tokens_are_counted_by_hand() -> None:
    sequences = [Sequence([4, 5, 5, 6], [False, True, True, True]), Sequence([5, 7], [True, False])]
    assert count_answer_tokens(sequences, 9).tolist() == [0, 0, 0, 0, 0, 3, 1, 0, 0]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=150),
    batch_size=st.integers(1, 9),
    multiple=st.integers(1, 12),
    epoch=st.integers(0, 5),
)
def test_an_epoch_holds_every_sequence_once_and_repeats_whole_batches_only_to_fill_up(
    lengths: list[int], batch_size: int, multiple: int, epoch: int
) -> None:
    batches = plan_epoch(lengths, batch_size, multiple, 3, epoch)
    needed = len(plan_epoch(lengths, batch_size, 1, 3, epoch))
    assert len(batches) % multiple == 0 and len(batches) - needed < multiple
    once = [index for batch in batches[:needed] for index in batch]
    assert sorted(once) == list(range(len(lengths)))
    assert all(batch in batches[:needed] for batch in batches[needed:])
    assert max(collections.Counter(map(tuple, batches)).values()) <= -(-multiple // needed) + 1
    assert all(1 <= len(batch) <= batch_size for batch in batches)
    assert batches == plan_epoch(lengths, batch_size, multiple, 3, epoch)
    assert len(batches) == len(
        plan_epoch(lengths, batch_size, multiple, 3, epoch + 1)
    )  # all epochs have equally many steps


def test_epochs_and_seeds_order_the_batches_differently() -> None:
    lengths = list(range(1, 61))
    plans = [plan_epoch(lengths, 4, 1, seed, epoch) for seed in (0, 1) for epoch in (0, 1, 2)]
    assert all(a != b for i, a in enumerate(plans) for b in plans[:i])
    compositions = [
        sorted(map(tuple, map(sorted, plan))) for plan in [plan_epoch([1] * 60, 4, 1, 0, e) for e in (0, 1)]
    ]
    assert compositions[0] != compositions[1]  # not only the order of the batches, also who shares one


def test_batches_hold_sequences_of_similar_length() -> None:
    generator = random.Random(0)
    lengths = [generator.randint(10, 1000) for _ in range(512)]
    batches = plan_epoch(lengths, 8, 1, 0, 0)
    padded = sum(len(batch) * max(lengths[i] for i in batch) for batch in batches)
    at_random = sum(8 * max(lengths[i : i + 8]) for i in range(0, 512, 8))
    assert padded < 1.1 * sum(lengths) < 1.5 * sum(lengths) < at_random


def test_the_hash_of_the_data_tells_rows_apart_and_needs_memory_for_one_row_only() -> None:
    one, two = Sequence([5, 6, 7], [False, False, True]), Sequence([5], [True])
    others = [[one], [two], [one, two], [two, one], [Sequence([5, 6, 7, 5], [False, False, True, True])]]
    assert len({data_hash(rows) for rows in others}) == len(others)
    rows = [Sequence([12345] * 100, [True] * 100)] * 5000
    tracemalloc.start()
    data_hash(rows)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100_000


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=150),
    budget=st.integers(1, 400),
    multiple=st.integers(1, 12),
    epoch=st.integers(0, 5),
)
def test_packed_batches_keep_to_their_budget_and_hold_every_sequence_once(
    lengths: list[int], budget: int, multiple: int, epoch: int
) -> None:
    batches = plan_epoch(lengths, None, multiple, 3, epoch, budget)
    needed = len(plan_epoch(lengths, None, 1, 3, epoch, budget))
    assert len(batches) % multiple == 0 and len(batches) - needed < multiple
    assert sorted(index for batch in batches[:needed] for index in batch) == list(range(len(lengths)))
    assert all(batch in batches[:needed] for batch in batches[needed:])
    assert all(len(batch) == 1 or sum(lengths[index] for index in batch) <= budget for batch in batches)
    assert batches == plan_epoch(lengths, None, multiple, 3, epoch, budget)
    assert len(batches) == len(plan_epoch(lengths, None, multiple, 3, epoch + 1, budget))  # equally many steps


def lengths_of_chats(count: int) -> list[int]:
    """Log-normal, cut at 2,048, as chats are."""
    generator = random.Random(0)
    return [max(8, min(2048, int(generator.lognormvariate(6.0, 0.9)))) for _ in range(count)]


@pytest.mark.parametrize("budget", [2048, 4096, 16_384])
def test_hardly_more_batches_are_packed_than_the_tokens_need(budget: int) -> None:
    lengths = lengths_of_chats(4000)
    assert len(plan_epoch(lengths, None, 1, 0, 0, budget)) <= 1.04 * sum(lengths) / budget + 1


def test_packed_sequences_have_other_company_in_every_epoch_and_seed() -> None:
    lengths = lengths_of_chats(2000)
    plans = [plan_epoch(lengths, None, 1, seed, epoch, 4096) for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    pairs = [
        {(a, b) for batch in plan for a in batch for b in batch if a < b} for plan in plans
    ]  # of sequences that share a batch
    for other in pairs[1:]:
        assert len(pairs[0] & other) < 0.1 * len(pairs[0])
    early = [lengths[index] for batch in plans[0][: len(plans[0]) // 4] for index in batch]
    assert abs(sum(early) / len(early) / (sum(lengths) / len(lengths)) - 1) < 0.15  # not the long ones first


def test_planning_takes_time_that_grows_with_the_number_of_rows() -> None:
    def seconds(count: int) -> float:
        lengths = lengths_of_chats(count)
        best = float("inf")
        for _ in range(3):
            begin = time.process_time()
            plan_epoch(lengths, None, 1, 0, 0, 4096)
            best = min(best, time.process_time() - begin)
        return best

    assert seconds(64_000) < 4 * 3 * seconds(16_000)  # a quadratic plan takes 16 times as long
