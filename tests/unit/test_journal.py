"""The file of finished rows: nothing is lost but what a kill cut off, and nothing foreign is taken over."""

import json
from pathlib import Path

import pytest

from draftsmith.train.journal import Journal, content_hash, journals

IDENTITY = {"target": "t", "settings": {"seed": 0, "sampler": {"temperature": 0.0}}}
A, B, C = ({"id": name, "hash": f"#{name}", "text": "é\u2028\x85"} for name in "abc")


def test_rows_are_read_back_by_id_and_hash(tmp_path: Path) -> None:
    with Journal(tmp_path / "out", "answers", IDENTITY) as journal:
        journal.write([A, B])
        journal.write([C])
    changed = {**A, "hash": "#other"}
    with Journal(tmp_path / "out", "answers", IDENTITY) as journal:
        assert journal.read() == {("a", "#a"): A, ("b", "#b"): B, ("c", "#c"): C}
        journal.write([changed])
        assert journal.read()["a", "#other"] == changed and journal.read()["a", "#a"] == A


def test_a_cut_at_any_byte_loses_the_last_entry_and_no_other(tmp_path: Path) -> None:
    with Journal(tmp_path / "out", "answers", IDENTITY) as journal:
        journal.write([A])
        whole_before = journal.path.stat().st_size
        journal.write([B, C])
        whole = journal.path.read_bytes()
    for size in range(len(whole)):
        journal.path.write_bytes(whole[:size])
        with Journal(tmp_path / "out", "answers", IDENTITY) as again:
            assert [*again.read()] == ([("a", "#a")] if size >= whole_before else [])
            again.write([C])
            assert ("c", "#c") in again.read()
    assert len(whole) > whole_before


def test_every_process_reads_the_journals_of_all_whatever_their_number_was(tmp_path: Path) -> None:
    out = tmp_path / "out[1]*.jsonl"  # characters that a pattern would take for its own
    for process, row in enumerate((A, B, C)):
        with Journal(out, "answers", IDENTITY, process) as journal:
            journal.write([row])
    with Journal(out, "prompts", {}) as other, Journal(out, "answers", IDENTITY) as journal:
        assert len(journal.read()) == 3 and other.read() == {}
    assert len(journals(out)) == 4 and len(journals(out, "answers")) == 3


def test_a_journal_that_another_run_writes_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    with Journal(tmp_path / "out", "answers", IDENTITY) as journal:
        journal.write([A])
        with journal.path.open("ab") as file:
            file.write(b"half a line of the run that is under way")
        before = journal.path.read_bytes()
        with pytest.raises(ValueError, match="out.answers.0.partial is being written by another run; wait for its end"):
            Journal(tmp_path / "out", "answers", IDENTITY)
        assert journal.path.read_bytes() == before
    with Journal(tmp_path / "out", "answers", IDENTITY) as again:
        assert [*again.read()] == [("a", "#a")] and again.path.read_bytes().endswith(b"\n")


def test_another_identity_is_refused_with_what_differs(tmp_path: Path) -> None:
    with Journal(tmp_path / "out", "answers", IDENTITY, 1) as journal:
        journal.write([A])
    other = {"target": "t", "settings": {"seed": 1, "sampler": {"temperature": 0.5}}}
    with pytest.raises(
        ValueError, match=r"settings.seed was 0 and is 1; settings.sampler.temperature was 0.0 and is 0.5\)"
    ):
        Journal(tmp_path / "out", "answers", other)
    assert len(journals(tmp_path / "out")) == 1


def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path) -> None:
    with Journal(tmp_path / "out", "answers", IDENTITY) as journal:
        journal.write([A])
        journal.write([B])
    lines = journal.path.read_bytes().split(b"\n")
    journal.path.write_bytes(b"\n".join([lines[0], lines[1][:-3], *lines[2:]]))
    with pytest.raises(ValueError, match=r"out.answers.0.partial:2 is damaged"):
        Journal(tmp_path / "out", "answers", IDENTITY)


def test_the_hash_is_of_the_content_and_not_of_how_it_is_written() -> None:
    turns = [{"role": "user", "content": "a"}]
    assert content_hash([turns, ()]) == content_hash([tuple(json.loads('[{"content": "a", "role": "user"}]')), []])
    assert content_hash([turns, ()]) != content_hash([turns, [{"name": "f"}]])
