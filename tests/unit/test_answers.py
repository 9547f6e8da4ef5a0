"""What becomes of rows: which turns are asked, what is kept of an answer, accounts that add up, temperatures that are drawn."""

import collections
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from draftsmith.inference.decode import generate
from draftsmith.inference.load_target import load
from draftsmith.inference.records import Conversation
from draftsmith.inference.rendering import prompt_ids
from draftsmith.inference.sampling import Sampler
from draftsmith.inference.target import Target
from draftsmith.train.answers import Dialogue, Settings, plan
from draftsmith.train.processes import Processes
from draftsmith.train.reasoning import Spoken
from draftsmith.train.regenerate import regenerate


@pytest.fixture(scope="module")
def target(toy_folder: Path) -> Target:
    found = load(toy_folder)
    found.eos_ids = (*found.eos_ids, *range(3, 320, 16))  # random weights hardly ever stop by themselves
    return found


def settings(**changes: Any) -> Settings:
    return Settings(**{"sampler": Sampler(), "max_new": 12, "batch_size": 2, **changes})


def turns(*texts: str) -> tuple[dict[str, Any], ...]:
    """`u:` a user turn, `a:` an assistant turn, and so on."""
    roles = {"u": "user", "a": "assistant", "s": "system", "t": "tool"}
    return tuple({"role": roles[text[0]], "content": text[2:]} for text in texts)


def chat(name: str, *texts: str) -> Conversation:
    return Conversation(name, turns(*texts))


# ---- which turns are asked --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given, segments",
    [
        (("u:1",), [("u:1",)]),
        (("u:1", "a:old"), [("u:1",)]),
        (("s:0", "u:1", "a:old", "u:2", "u:3", "a:old"), [("s:0", "u:1"), ("u:2", "u:3")]),
        (("u:1", "a:old", "u:2"), [("u:1",), ("u:2",)]),
        (("u:1", "a:call", "t:result", "a:old", "u:2", "a:old"), [("u:1", "a:call", "t:result"), ("u:2",)]),
        (("u:1", "a:old", "s:0"), [("u:1",)]),
    ],
)  # fmt: skip
def test_all_answers_are_asked_anew_but_calls_whose_results_are_given(
    given: tuple[str, ...], segments: list[tuple[str, ...]], tmp_path: Path
) -> None:
    (row,), bad = plan([chat("x", *given)], tmp_path / "out", settings(all_turns=True))
    assert row.segments == tuple(turns(*texts) for texts in segments) and not bad


def test_every_answer_of_a_conversation_follows_the_new_ones_before_it(target: Target, tmp_path: Path) -> None:
    chats = [
        chat(f"c{i}", "u:hello " + "you " * i, "a:old", "u:and then?", "a:old", "u:at last?", "a:old")
        for i in range(12)
    ]
    records = regenerate(target, chats, tmp_path / "out.jsonl", settings(all_turns=True))
    lengths = collections.Counter(len(record["messages"]) for record in records)
    assert lengths[6] and (lengths[2] or lengths[4])  # some go to the end, some are cut before
    for record in records:
        messages = record["messages"]
        for place in range(1, len(messages), 2):  # naive: one by one, over what the record itself says was before
            ids = prompt_ids(target.tokenizer, messages[:place])
            (alone,) = generate(target, [ids], max_new=12, sampler=Sampler())
            text = target.tokenizer.decode(alone.ids[:-1] if alone.finished else alone.ids, skip_special_tokens=True)  # type: ignore[union-attr]
            text = text if alone.finished else text.rstrip("\ufffd")
            assert messages[place] == {"role": "assistant", "content": text}
            cut = place == len(messages) - 1 and record.get("truncated", False)
            assert alone.finished != cut  # an answer that was cut is the last
        assert len(messages) == 6 or record["truncated"]
    meta = json.loads((tmp_path / "out.jsonl.meta.json").read_text())
    assert meta["ended_early"] == lengths[2] + lengths[4] and meta["done"] == 12


def test_an_id_that_two_prompts_share_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="1 ids belong to several prompts, 'a' for one"):
        plan([chat("a", "u:1"), chat("b", "u:1"), chat("a", "u:2")], tmp_path / "out", settings())


def test_raw_text_and_token_ids_ask_nothing(tmp_path: Path) -> None:
    for all_turns in (False, True):
        given = [Conversation("t", (), text="once"), Conversation("g", (), given=((1, 2), (False, True)))]
        rows, bad = plan(given, tmp_path / "out", settings(all_turns=all_turns))
        assert not rows and [(one.kind, one.reason) for one in bad] == [("skipped", "nothing to answer")] * 2
        assert [one.detail for one in bad] == [
            "the record is raw text, without turns; allowed: messages",
            "the record came tokenised, without turns; allowed: messages",
        ]


def test_a_character_that_the_budget_cut_is_left_out(tmp_path: Path) -> None:
    """Decoded, its first bytes are a U+FFFD, whose tokens the target never wrote."""
    (row,), _ = plan([chat("x", "u:1")], tmp_path / "out", settings())
    for finished, expected in ((False, "\ufffd yes"), (True, "\ufffd yes\ufffd")):
        dialogue = Dialogue(row)
        dialogue.take(Spoken("\ufffd yes\ufffd"), settings(), tokens=9, finished=finished)
        assert dialogue.answers == [{"role": "assistant", "content": expected}]


# ---- accounts ---------------------------------------------------------------------------------------------------------


def test_rows_that_cannot_be_answered_are_counted_and_written_aside(target: Target, tmp_path: Path) -> None:
    chats = [chat(f"c{i}", f"u:hello {i}") for i in range(17)]
    chats[3] = chat("long", "u:" + "hello " * 300)
    chats[5] = chat("mute", "s:be nice")
    out = tmp_path / "out.jsonl"
    records = regenerate(target, chats, out, settings(max_bad_share=0.12))
    assert [record["id"] for record in records] == [f"c{i}" for i in range(17) if i not in (3, 5)]
    meta = json.loads(Path(f"{out}.meta.json").read_text())
    assert [meta[name] for name in ("inputs", "done", "failed", "skipped")] == [17, 15, 0, 2]
    assert meta["reasons"] == {"skipped: nothing to answer": 1, "skipped: too long": 1}
    rejected = [json.loads(line) for line in Path(f"{out}.unanswered.jsonl").read_text().splitlines()]
    assert [(one["id"], one["reason"]) for one in rejected] == [("long", "too long"), ("mute", "nothing to answer")]
    with pytest.raises(ValueError, match="2 of 17 rows have no answer .*more than the share of 0.1 that max_bad_share"):
        regenerate(target, chats, tmp_path / "other.jsonl", settings())
    regenerate(target, [chat("fine", "u:hi")], out, settings())
    assert not Path(f"{out}.unanswered.jsonl").exists()


def test_a_template_that_refuses_a_row_does_not_end_the_run(toy_folder: Path, tmp_path: Path) -> None:
    target = load(toy_folder)
    assert target.tokenizer is not None
    refusing = "{% if messages[0]['content'] == 'bad' %}{{ raise_exception('not that') }}{% endif %}"
    target.tokenizer.chat_template = refusing + target.tokenizer.chat_template
    regenerate(target, [chat("a", "u:bad"), chat("b", "u:good")], tmp_path / "out.jsonl", settings(max_bad_share=0.5))
    (line,) = Path(tmp_path / "out.jsonl.unanswered.jsonl").read_text().splitlines()
    assert json.loads(line)["reason"] == "refused by the template" and "not that" in line


# ---- reasoning --------------------------------------------------------------------------------------------------------


def test_reasoning_is_kept_as_a_field_or_dropped_with_a_mark(tmp_path: Path) -> None:
    (row,), _ = plan([chat("x", "u:1", "a:old", "u:2", "a:old")], tmp_path / "out", settings(all_turns=True))
    for way, more in (("keep", {"reasoning_content": "why"}), ("drop", {"supervised": False})):
        dialogue = Dialogue(row)
        dialogue.take(Spoken("yes", "why"), settings(reasoning=way), tokens=9, finished=True)
        first = {"role": "assistant", "content": "yes", **more}
        assert dialogue.messages == (*turns("u:1"), first, *turns("u:2"))
        dialogue.take(Spoken("no"), settings(reasoning=way), tokens=9, finished=False)
        assert dialogue.over
        assert dialogue.result()["answers"] == [first, {"role": "assistant", "content": "no"}]


def test_reasoning_without_an_end_is_no_answer(tmp_path: Path) -> None:
    (row,), _ = plan([chat("x", "u:1", "a:old", "u:2", "a:old")], tmp_path / "out", settings(all_turns=True))
    dialogue = Dialogue(row)
    dialogue.take(Spoken("", "why", ended=False), settings(), tokens=9, finished=False)
    assert dialogue.over and dialogue.rejected().reason == "reasoning without an end"
    later = Dialogue(row)
    later.take(Spoken("yes", "why"), settings(), tokens=9, finished=True)
    later.take(Spoken("", "why", ended=False), settings(), tokens=9, finished=False)
    assert later.over and later.failure is None and len(later.result()["answers"]) == 1 and not later.truncated


# ---- temperatures -----------------------------------------------------------------------------------------------------


def test_temperatures_are_drawn_by_weight_from_the_id_alone(tmp_path: Path) -> None:
    mixed = settings(temperatures=((0.0, 1.0), (0.7, 3.0)))
    chats = [chat(f"c{i}", "u:hi") for i in range(2000)]
    rows, _ = plan(chats, tmp_path / "out", mixed)
    drawn = {row.id: row.sampler.temperature for row in rows}
    assert set(drawn.values()) == {0.0, 0.7}
    assert abs(sum(t == 0.7 for t in drawn.values()) - 1500) < 100  # five standard deviations: 1 in 2 million
    fewer, _ = plan(chats[::-7], tmp_path / "out", mixed)
    assert all(row.sampler.temperature == drawn[row.id] for row in fewer)


def test_each_row_is_answered_at_its_own_temperature_and_says_so(target: Target, tmp_path: Path) -> None:
    chats = [chat(f"c{i}", f"u:hello {i}") for i in range(10)]
    mixed = regenerate(target, chats, tmp_path / "out.jsonl", settings(temperatures=((0.0, 1.0), (1.0, 1.0))))
    pure = {t: regenerate(target, chats, tmp_path / f"{t}.jsonl", settings(sampler=Sampler(t))) for t in (0.0, 1.0)}
    assert {record["temperature"] for record in mixed} == {0.0, 1.0}
    for place, record in enumerate(mixed):
        assert record["messages"] == pure[record["temperature"]][place]["messages"]


# ---- processes --------------------------------------------------------------------------------------------------------


Shared = dict[int, tuple[list[dict[str, Any]], int]]
"""Of each process: what it returned, and how many rows it decoded."""


def share(folder: Path, chats: list[Conversation], out: Path, rows: int | None = None) -> Shared:
    """Two processes, here threads with a target each; each is interrupted after some rows if a number is given."""
    barrier, results = threading.Barrier(2, timeout=60), {}
    targets = [
        load(folder) for _ in range(2)
    ]  # not in the threads: transformers changes classes for the time of a load

    def work(index: int) -> None:
        own, seen = targets[index], 0
        own.eos_ids = (*own.eos_ids, *range(3, 320, 16))
        plain = own.new_cache

        def new_cache(batch: int, capacity: int) -> Any:
            nonlocal seen
            if seen == rows:
                barrier.abort()
                raise KeyboardInterrupt
            seen += batch
            return plain(batch, capacity)

        def wait() -> None:
            barrier.wait()

        own.new_cache = new_cache  # type: ignore[method-assign]
        try:
            found = regenerate(own, chats, out, settings(batch_size=1), processes=Processes(index, 2, wait))
            results[index] = found, seen
        except (KeyboardInterrupt, threading.BrokenBarrierError):
            assert rows

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_processes_share_the_chunks_and_write_the_same_file(
    target: Target, toy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRANSFORMERS_SDPA_FORCE_GQA", "1")  # `grouped_attention` sets it, and threads share it
    chats = [chat(f"c{i}", f"u:hello {i}") for i in range(20)]
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    regenerate(target, chats, one, settings(batch_size=1))
    shared = share(toy_folder, chats, two)
    assert two.read_bytes() == one.read_bytes()
    assert [(len(records), seen) for records, seen in (shared[0], shared[1])] == [
        (20, 12),
        (0, 8),
    ]  # chunks of eight, eight and four
    assert Path(f"{two}.meta.json").read_bytes() == Path(f"{one}.meta.json").read_bytes()

    broken = tmp_path / "broken.jsonl"
    assert not share(toy_folder, chats, broken, rows=10)  # eight rows to a chunk: the second one is not finished
    assert len(list(tmp_path.glob("broken.jsonl.answers.*.partial"))) == 2 and not broken.exists()
    regenerate(target, chats, broken, settings(batch_size=1))  # a single process takes over from both
    assert broken.read_bytes() == one.read_bytes()
    assert not list(tmp_path.glob("*.partial"))
