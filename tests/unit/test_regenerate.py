"""Regenerated answers: the same file whether the work was interrupted or not, and honest about what made it."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftsmith.inference.conversations import read_conversations
from draftsmith.inference.decode import generate
from draftsmith.inference.load_target import load
from draftsmith.inference.rendering import prompt_ids
from draftsmith.inference.sampling import Sampler
from draftsmith.inference.target import Target
from draftsmith.train import answers, invent, regenerate
from draftsmith.train.answers import Settings
from draftsmith.train.data import load_sequences
from draftsmith.train.reasoning import Spoken


@pytest.fixture(scope="module")
def target(toy_folder: Path) -> Target:
    found = load(toy_folder)
    found.eos_ids = (*found.eos_ids, *range(3, 320, 16))  # random weights hardly ever stop by themselves
    return found


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    records: list[dict[str, Any]] = [
        {"id": f"p{i}", "category": "even" if i % 2 == 0 else "odd", "messages": [{"role": "user", "content": "hi " * i + "?"}]}
        for i in range(1, 8)
    ]  # fmt: skip
    records.append({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "an old answer"}]})
    turns = [{"from": "human", "value": "b"}, {"from": "gpt", "value": "c"}, {"from": "human", "value": "d"}]
    records.append({"conversations": turns})
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four rows each at a batch size of 1, so that nine prompts are several."""
    monkeypatch.setattr("draftsmith.train.chunks.BATCHES_PER_CHUNK", 4)


def settings(**changes: Any) -> Settings:
    return Settings(**{"sampler": Sampler(), "max_new": 12, "batch_size": 1, **changes})


def run(
    target: Target, prompts: Path | None, out: Path, chosen: Settings, self_prompt: int = 0
) -> list[dict[str, Any]]:
    """What `draftsmith data` does with a target in its own process."""
    conversations, sources = (read_conversations(prompts), [str(prompts)]) if prompts else ([], [])
    if self_prompt:
        invented = invent.invent(target, self_prompt, out, chosen)
        conversations, sources = conversations + invented.conversations, [*sources, invented.account]
    return regenerate.regenerate(target, conversations, out, chosen, sources=sources)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def test_answers_are_the_targets_own_and_old_answers_are_dropped(target: Target, prompts: Path, tmp_path: Path) -> None:
    records = run(target, prompts, tmp_path / "out.jsonl", settings())
    assert lines(tmp_path / "out.jsonl") == records
    asked = read_conversations(prompts)
    assert [r["id"] for r in records] == [c.id for c in asked] == [*(f"p{i}" for i in range(1, 8)), "line-8", "line-9"]
    assert [r["category"] for r in records[:3]] == ["odd", "even", "odd"]
    assert [m["content"] for m in records[7]["messages"]][0] == "a" and len(records[7]["messages"]) == 2
    assert [m["role"] for m in records[8]["messages"]] == ["user", "assistant", "user", "assistant"]
    for record in records:  # one by one and with another budget of batch rows: the same text
        ids = prompt_ids(target.tokenizer, record["messages"][:-1])
        (alone,) = generate(target, [ids], max_new=12, sampler=Sampler())
        text = target.tokenizer.decode(alone.ids[:-1] if alone.finished else alone.ids, skip_special_tokens=True)  # type: ignore[union-attr]
        assert record["messages"][-1]["content"] == (text if alone.finished else text.rstrip("\ufffd"))
        assert record.get("truncated", False) == (not alone.finished)
    assert not [path for path in tmp_path.iterdir() if "partial" in path.name or "writing" in path.name]


def test_what_reaches_the_budget_is_marked_truncated_and_taught_without_an_end(
    target: Target, prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    records = run(target, prompts, out, settings())
    flags = [record.get("truncated") for record in records]
    assert True in flags and None in flags
    assert [conversation.truncated for conversation in read_conversations(out)] == [bool(flag) for flag in flags]
    tokenizer = target.tokenizer
    assert tokenizer is not None
    sequences = load_sequences([str(out)], tokenizer, max_length=256, max_answer_tokens=None, seed=0)
    ends = [[t for t, m in zip(s.ids, s.loss_mask, strict=True) if m][-1] == tokenizer.eos_token_id for s in sequences]
    with_text = [bool(r["messages"][-1]["content"]) or not r.get("truncated") for r in records]
    assert ends == [not flag for flag, kept in zip(flags, with_text, strict=True) if kept]


def test_provenance_lies_beside_the_file(target: Target, prompts: Path, tmp_path: Path) -> None:
    run(target, prompts, tmp_path / "out.jsonl", settings(seed=4))
    meta = json.loads((tmp_path / "out.jsonl.meta.json").read_text())
    assert meta["fingerprint"] == target.shape.fingerprint and meta["sources"] == [str(prompts)] and meta["done"] == 9
    assert meta["settings"]["seed"] == 4 and meta["settings"]["sampler"]["temperature"] == 0.0
    assert meta["versions"]["torch"] == torch.__version__


def interrupt_after(calls: int, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Makes decoding fail after some chunks; returns how many were decoded."""
    plain, seen = generate, 0

    def failing(*arguments: Any, **options: Any) -> Any:
        nonlocal seen
        if seen == calls:
            raise KeyboardInterrupt
        seen += 1
        return plain(*arguments, **options)

    for module in (regenerate, invent):
        monkeypatch.setattr(module, "generate", failing)
    return lambda: seen


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sampler": Sampler(1.0), "seed": 3},
        {"samples": 2, "temperatures": ((0.0, 1.0), (1.0, 2.0))},
        {"self_prompt": 6},
    ],
    ids=["greedy", "sampled", "samples", "self-prompt"],
)
@pytest.mark.parametrize("calls", [0, 2])
def test_an_interrupted_run_ends_with_the_same_file(
    changes: dict[str, Any], calls: int, target: Target, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight, broken = tmp_path / "straight.jsonl", tmp_path / "broken.jsonl"
    changes = dict(changes)
    self_prompt = changes.pop("self_prompt", 0)
    with monkeypatch.context() as patch:
        decoded = interrupt_after(10**6, patch)
        run(target, prompts, straight, settings(**changes), self_prompt)
        chunks = decoded()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt_after(calls, patch)
        run(target, prompts, broken, settings(**changes), self_prompt)
    assert not broken.exists()
    with monkeypatch.context() as patch:
        decoded = interrupt_after(10**6, patch)
        run(target, prompts, broken, settings(**changes), self_prompt)
        assert decoded() == chunks - calls  # what was done is not done again
    assert broken.read_bytes() == straight.read_bytes()


@pytest.mark.parametrize("cut_at", [-1, -7, -60])
def test_a_last_line_cut_off_by_a_kill_is_done_again(
    cut_at: int, target: Target, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.jsonl"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt_after(2, patch)
        run(target, prompts, out, settings())
    partial = tmp_path / "out.jsonl.answers.0.partial"
    partial.write_bytes(partial.read_bytes()[:cut_at])
    records = run(target, prompts, out, settings())
    assert records == run(target, prompts, tmp_path / "straight.jsonl", settings())


@pytest.mark.parametrize(
    "answer", ["wide — é 日本 😀", "line\u2028separator", "next\x85line", "form\x0cfeed", "a\r\nb"]
)
@pytest.mark.parametrize("cut_in_a_character", [False, True])
def test_answers_of_any_characters_survive_an_interruption(
    answer: str,
    cut_in_a_character: bool,
    target: Target,
    prompts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(regenerate, "spoken", lambda tokenizer, prompt, ids: Spoken(answer))
    out = tmp_path / "out.jsonl"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt_after(2, patch)
        run(target, prompts, out, settings())
    if cut_in_a_character:
        partial = tmp_path / "out.jsonl.answers.0.partial"
        with partial.open("ab") as file:
            file.write('{"rows": [{"id": "é'.encode()[:-1])
    records = run(target, prompts, out, settings())
    assert [record["messages"][-1]["content"] for record in records] == [answer] * 9
    assert [c.messages[-1]["content"] for c in read_conversations(out)] == [answer] * 9


@pytest.mark.parametrize(
    "changes", [{"max_new": 11}, {"seed": 1}, {"sampler": Sampler(0.5)}, {"batch_size": 3}, {"samples": 2}], ids=str
)
def test_continuing_with_other_settings_is_refused(
    changes: dict[str, Any], target: Target, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.jsonl"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt_after(2, patch)
        run(target, prompts, out, settings())
    before = (tmp_path / "out.jsonl.answers.0.partial").read_bytes()
    with pytest.raises(ValueError, match="was begun with other settings or another target") as caught:
        run(target, prompts, out, settings(**changes))
    assert f"(settings.{next(iter(changes))}" in str(caught.value) and "\n" not in str(caught.value)
    assert (tmp_path / "out.jsonl.answers.0.partial").read_bytes() == before


def test_continuing_with_another_target_is_refused(
    target: Target, prompts: Path, tmp_path: Path, toy: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.jsonl"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt_after(2, patch)
        run(target, prompts, out, settings())
    other = Target(toy.make_model("llama", seed=5, vocab_size=320), target.tokenizer, target.name)
    with pytest.raises(ValueError, match="another target \\(fingerprint was .* and is "):
        run(other, prompts, out, settings())


def test_continuing_with_changed_rows_takes_over_the_unchanged_ones_only(
    target: Target, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """speculators#716, #743: rows that moved, changed or came later must not get each other's answers."""
    out = tmp_path / "out.jsonl"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt_after(2, patch)
        run(target, prompts, out, settings())
    first, second, *rest = prompts.read_text().splitlines(keepends=True)
    changed = second.replace("hi hi ?", "ho?").replace("p2", "p1")  # another prompt under an id that is done
    new = '{"id": "new", "messages": [{"role": "user", "content": "new"}]}\n'
    prompts.write_text(new + "".join(reversed(rest)) + changed + first.replace("p1", "p2"))
    asked: list[int] = []

    def counting(target: Target, prompts: Any, **options: Any) -> Any:
        asked.append(len(prompts))
        return generate(target, prompts, **options)

    with monkeypatch.context() as patch:
        patch.setattr(regenerate, "generate", counting)
        records = run(target, prompts, out, settings())
    assert sum(asked) == 5  # the new one, two that changed, and two without an id, known by their lines
    assert records == run(target, prompts, tmp_path / "straight.jsonl", settings())


def test_samples_are_different_answers_to_the_same_prompt(target: Target, prompts: Path, tmp_path: Path) -> None:
    records = run(target, prompts, tmp_path / "out.jsonl", settings(samples=3, sampler=Sampler(1.0)))
    assert [record["id"] for record in records[:4]] == ["p1/0", "p1/1", "p1/2", "p2/0"]
    assert len({json.dumps(record["messages"][:-1]) for record in records[:3]}) == 1
    assert len({record["messages"][-1]["content"] for record in records[:3]}) > 1
    assert len(read_conversations(tmp_path / "out.jsonl")) == 27


def test_a_rows_answer_depends_on_its_own_id_only(target: Target, prompts: Path, tmp_path: Path) -> None:
    sampled = settings(sampler=Sampler(1.0))
    everything = {r["id"]: r for r in run(target, prompts, tmp_path / "all.jsonl", sampled)}
    few = tmp_path / "few.jsonl"
    few.write_text("".join(line + "\n" for line in prompts.read_text().splitlines()[2:5][::-1]))
    records = run(target, few, tmp_path / "out.jsonl", settings(sampler=Sampler(1.0), batch_size=3))
    assert [record["id"] for record in records] == ["p5", "p4", "p3"]
    assert all(record == everything[record["id"]] for record in records)
    other_seed = run(target, few, tmp_path / "other.jsonl", settings(sampler=Sampler(1.0), seed=1))
    assert [r["messages"] for r in other_seed] != [r["messages"] for r in records]


def test_a_chat_target_invents_its_own_prompts(target: Target, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    records = run(target, None, out, settings(max_new=30, batch_size=4), 12)
    assert 0 < len(records) <= 12
    assert re.fullmatch(
        r"\d+ prompts invented = .*", json.loads((tmp_path / "out.jsonl.meta.json").read_text())["sources"][0]
    )
    for record in records:
        assert re.fullmatch(r"self-\d{5}", record["id"]) and record["category"] == "self-prompt"
        user, answer = record["messages"]
        assert (user["role"], answer["role"]) == ("user", "assistant") and user["content"]
    texts = [record["messages"][0]["content"] for record in records]
    assert len(set(texts)) == len(texts)
    assert records == run(target, None, tmp_path / "again.jsonl", settings(max_new=30, batch_size=4), 12)
    header = target.tokenizer("<|im_start|>user\n", add_special_tokens=False)["input_ids"]  # type: ignore[misc]
    seed = answers.row_seed(settings(), "prompts", records[0]["id"])
    (expected,) = generate(target, [header], max_new=30, sampler=Sampler(1.0), seeds=[seed])
    assert texts[0] == target.tokenizer.decode(expected.ids[:-1], skip_special_tokens=True)  # type: ignore[union-attr]


def test_invented_prompts_come_behind_given_ones(target: Target, prompts: Path, tmp_path: Path) -> None:
    records = run(target, prompts, tmp_path / "out.jsonl", settings(max_new=30, batch_size=4), 12)
    kinds = [record["id"].startswith("self-") for record in records]
    assert kinds[:9] == [False] * 9 and all(kinds[9:]) and len(kinds) > 9


@pytest.mark.parametrize(
    "content, message",
    [
        ("", "no conversation in it"),
        ('{"messages": []}\n', ":1: 'messages' is"),
        ('{"messages": [{"role": "user", "content": "a"}]}\n{\n', ":2: broken JSON"),
        ('{"messages": [{"role": "system", "content": "a"}]}\n', "nothing to answer"),
    ],
)
def test_broken_prompts_are_refused_before_anything_is_decoded(
    content: str, message: str, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = interrupt_after(0, monkeypatch)
    (tmp_path / "prompts.jsonl").write_text(content)
    with pytest.raises(ValueError, match=message):
        run(target, tmp_path / "prompts.jsonl", tmp_path / "out.jsonl", settings())
    assert decoded() == 0 and not (tmp_path / "out.jsonl").exists()


def test_nothing_to_ask_and_nowhere_to_write_are_refused(target: Target, prompts: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no prompts: give a file of prompts, or --self-prompt N"):
        run(target, None, tmp_path / "out.jsonl", settings())
    with pytest.raises(ValueError, match="the folder .* of the output file does not exist; create it first"):
        run(target, prompts, tmp_path / "no" / "out.jsonl", settings())


def test_a_target_without_a_chat_template_cannot_invent_prompts(
    target: Target, tmp_path: Path, toy: SimpleNamespace
) -> None:
    tokenizer = toy.make_tokenizer()
    tokenizer.chat_template = None
    plain = Target(target.model, tokenizer, "plain")
    with pytest.raises(ValueError, match="plain has no chat template, so it cannot invent user turns"):
        run(plain, None, tmp_path / "out.jsonl", settings(), 2)
