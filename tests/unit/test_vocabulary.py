"""The draft vocabulary: what chooses it, what it covers, and the hash by which a drafter refuses another one."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from draftsmith import drafters
from draftsmith.drafters.vocabulary import (
    check_fill,
    choose_draft_vocabulary,
    coverage,
    filled_up,
    offsets,
    vocabulary_hash,
)
from draftsmith.inference.conversations import read_conversations
from draftsmith.train import run
from draftsmith.train.config import read
from draftsmith.train.coverage import held_out_answers, measure
from draftsmith.train.data import Sequence, count_answer_tokens


def row(*supervised: int) -> Sequence:
    """A row with the prompt tokens 9 9, and these behind it."""
    return Sequence([9, 9, *supervised], [False, False, *(True for _ in supervised)])


def test_only_supervised_tokens_are_counted_and_unseen_ones_fill_up_from_the_lowest_id() -> None:
    counts_V = count_answer_tokens([row(7, 7, 3), row(5)], 10)
    assert counts_V.tolist() == [0, 0, 0, 1, 0, 1, 0, 2, 0, 0]  # 9 is in prompts only
    assert choose_draft_vocabulary(counts_V, 2).tolist() == [3, 7]
    kept_W = choose_draft_vocabulary(counts_V, 5)
    assert kept_W.tolist() == [0, 1, 3, 5, 7] and filled_up(counts_V, kept_W) == 2
    assert offsets(kept_W).tolist() == [0, 0, 1, 2, 3]  # a zero means the same id
    assert coverage(counts_V, torch.tensor([3, 7])) == 3 / 4


def test_filling_up_is_refused_where_it_is_not_wanted() -> None:
    counts_V = count_answer_tokens([row(7, 7, 3)], 10)
    check_fill(counts_V, 2, "none")
    check_fill(counts_V, 3, "rank")
    check_fill(counts_V, None, "none")
    check_fill(counts_V, 10, "none")  # the whole vocabulary leaves nothing out
    with pytest.raises(ValueError, match="draft_vocab_size is 3, but only 2 different tokens .* give at most 2"):
        check_fill(counts_V, 3, "none")


def test_coverage_is_measured_on_answers_in_the_prompt_file_else_on_a_tenth_else_not() -> None:
    kept_W = torch.tensor([3, 7])
    found = measure(kept_W, 10, [row(7, 7, 3), row(5)], [row(3, 5, 5, 5)])
    assert (found.training, found.held_out, found.filled) == (3 / 4, 1 / 4, 0)
    assert str(found).endswith("covers 75.0% of the answer tokens, 25.0% of others (the answers in eval.prompts)")
    few = measure(torch.tensor([0, 3]), 10, [row(3)], [])
    assert few.held_out is None and "not measured on others" in str(few)
    assert "; 1 of its ids never occur there and are filled up by rank" in str(few)


def test_the_tenth_that_is_held_out_does_not_choose_the_vocabulary_and_goes_by_content() -> None:
    """Each row has a token of its own behind a common one, so a map of the others covers exactly half of each held-out row."""
    rows = [row(1, 100 + i) for i in range(200)]
    kept_W = choose_draft_vocabulary(count_answer_tokens(rows, 400), 201)
    found = measure(kept_W, 400, rows, [])
    assert (found.training, found.held_out) == (1.0, 0.5)
    assert measure(kept_W, 400, rows[::-1], []) == found


def test_the_hash_names_the_ids_and_their_order() -> None:
    assert vocabulary_hash(None) == "full"
    names = {vocabulary_hash(torch.tensor(ids)) for ids in ([1, 2, 3], [1, 2, 4], [1, 2], [3, 2, 1])}
    assert len(names) == 4 and vocabulary_hash(torch.tensor([1, 2, 3], dtype=torch.int32)) in names


@pytest.mark.parametrize("kind", drafters.kinds())
def test_every_kind_saves_its_map_with_the_hash_and_loads_only_with_it(
    kind: str, toy: SimpleNamespace, tmp_path: Path
) -> None:
    target = toy.make_target()
    drafter = toy.make_drafter(kind, target).served(target.shape)
    drafters.save(drafter, tmp_path / "drafter")
    file = tmp_path / "drafter" / "config.json"
    record = json.loads(file.read_text())
    assert record["vocabulary_hash"] == vocabulary_hash(torch.arange(48))
    assert vocabulary_hash(drafters.load(tmp_path / "drafter").token_ids_W) == record["vocabulary_hash"]
    file.write_text(json.dumps(record | {"vocabulary_hash": "full"}))
    with pytest.raises(ValueError, match="another draft vocabulary .* put the model.safetensors and the config.json"):
        drafters.load(tmp_path / "drafter")
    del record["vocabulary_hash"]  # saved before there was one
    file.write_text(json.dumps(record))
    drafters.load(tmp_path / "drafter")


def test_a_run_says_what_its_vocabulary_covers(
    healthy: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    overrides = [
        f"output={tmp_path / 'run'}",
        f"eval.prompts={healthy.folder / 'train.jsonl'}",
        "eval.num_prompts=1",
        "eval.max_new=2",
        "features={store: online}",
        "drafter={kind: medusa, num_heads: 1, draft_vocab_size: 300}",
        "loop={batch_size: 24, precision: float32}",
    ]
    answers = held_out_answers(healthy.target.tokenizer, read_conversations(healthy.folder / "train.jsonl"))
    assert len(answers) == 24
    with pytest.raises(ValueError, match="draft_vocab_size is 300, but only .* data.vocabulary_fill=rank"):
        run.train(read(healthy.config, [*overrides, "data.vocabulary_fill=none"]))
    run.train(read(healthy.config, overrides))
    said = capsys.readouterr().err
    assert (
        "draft vocabulary of 300 of 320 tokens covers 100.0% of the answer tokens, 100.0% of others (the answers in"
        in said
    )
    assert "of its ids never occur there and are filled up by rank" in said
