"""Sources: how they are written, what is read from files and data sets, and an account of the rows that adds up.

Expected values: listed by hand, the `json` module on the whole file, or the library that wrote the file.
"""

import gzip
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.inference.conversations import read_conversations
from draftsmith.inference.records import Conversation
from draftsmith.scripts.main import main
from draftsmith.train import json_rows
from draftsmith.train.json_rows import Cut, Row
from draftsmith.train.rows import Source, exists, parse_source, rows
from draftsmith.train.sources import Gathered, Settings, gather
from draftsmith.train.splits import fingerprint, is_held_out, split


def chat(*contents: str, **more: Any) -> dict[str, Any]:
    turns = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
    return {"messages": turns, **more}


def write(path: Path, *records: object) -> str:
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    return str(path)


def said(gathered: Gathered) -> list[tuple[str, str]]:
    return [(c.id, "/".join(message["content"] for message in c.messages)) for c in gathered.conversations]


# The string


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("data/chats.jsonl", Source(path="data/chats.jsonl")),
        ("a.jsonl?weight=0.5", Source(path="a.jsonl", weight=0.5)),
        ("a/b?split=train_sft&streaming=true&limit=10", Source(path="a/b", split="train_sft", streaming=True, limit=10)),
        ("a/b?name=x%26y&split=train[:10%25]", Source(path="a/b", name="x&y", split="train[:10%]")),
        ("a?columns=text:b,id&format=json", Source(path="a", columns=(("text", "b"), ("id", "id")), format="json")),
    ],
)  # fmt: skip
def test_a_source_is_a_path_and_settings(text: str, source: Source) -> None:
    assert parse_source(text) == source


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("?weight=2", "source '?weight=2' names nothing; give PATH_OR_HUB_ID?key=value, for example chats.jsonl?weight=2"),
        ("a?wieght=2", "has the setting 'wieght=2'; did you mean 'weight'? allowed: weight=..., split=..., name=..., streaming="),
        ("a?weight", "has the setting 'weight'; allowed: weight=..., "),
        ("a?", "has the setting ''; allowed: weight=..., "),
        ("a?limit=1&limit=2", "has the setting 'limit=2'; allowed: weight=..., "),
        ("a?weight=0", "weight is '0'; give a number above 0, at most 1000"),
        ("a?weight=nan", "weight is 'nan'; give a number above 0, at most 1000"),
        ("a?limit=0", "limit is '0'; give a whole number above 0"),
        ("a?streaming=yes", "streaming is 'yes'; give true or false"),
        ("a?columns=:b", "columns is ':b'; give KEY:COLUMN,KEY:COLUMN, for example prompt:question,completion:answer"),
        ("a?format=csv", "format is 'csv'; give jsonl, json or parquet"),
    ],
)  # fmt: skip
def test_a_mistyped_source_is_refused_by_what_is_wrong_in_it(text: str, error: str) -> None:
    with pytest.raises(ValueError, match=re.escape(error)):
        parse_source(text)


def test_only_a_hub_id_may_be_somewhere_else(tmp_path: Path) -> None:
    names = ["owner/name", "owner/name.jsonl", "/no/such", "no-such.jsonl", "no/such/folder", str(tmp_path)]
    assert [exists(parse_source(name)) for name in names] == [True, False, False, False, False, True]
    with pytest.raises(ValueError, match="^/no/such: No such file or directory; give a file, a folder or a hub id"):
        gather(["/no/such"])


@pytest.mark.parametrize(
    ("name", "setting"), [("a.jsonl", "split=train"), ("a.jsonl", "streaming=true"), (".", "format=json")]
)
def test_a_setting_that_has_no_effect_is_refused(tmp_path: Path, name: str, setting: str) -> None:
    write(tmp_path / "a.jsonl", chat("a"))
    with pytest.raises(ValueError, match=f"is a f.*, on which {setting.split('=')[0]}=.* has no effect; leave it out"):
        gather([f"{tmp_path / name}?{setting}"])


# JSON files

NASTY = st.text(st.sampled_from('ab"\\[]{},:\n é😀\u2028'), max_size=6)
RECORDS = st.lists(st.dictionaries(NASTY, NASTY | st.lists(NASTY, max_size=2), max_size=3), min_size=1, max_size=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("json")


def contents(found: list[Row | Cut]) -> list[Any]:
    return [json.loads(row.content) for row in found if isinstance(row, Row) and isinstance(row.content, bytes)]


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    records=RECORDS, indent=st.sampled_from([None, 1]), chunk=st.integers(1, 40), ascii=st.booleans(), data=st.data()
)
def test_a_json_list_is_read_as_json_reads_it_and_a_cut_at_any_byte_is_found(
    folder: Path, records: list[dict[str, Any]], indent: int | None, chunk: int, ascii: bool, data: st.DataObject
) -> None:
    pieces = [json.dumps(record, indent=indent, ensure_ascii=ascii).encode() for record in records]
    text = b"\n [\n" + b" ,\n".join(pieces) + b"\n]\n"
    stop = data.draw(st.integers(4, len(text) - 3), label="cut")
    path, cut = folder / "a.json", folder / "b.json"
    path.write_bytes(text)
    cut.write_bytes(text[:stop])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_rows, "CHUNK", chunk)
        whole = list(json_rows.json_rows(path, lines=False))
        *kept, end = json_rows.json_rows(cut, lines=False)
    assert contents(whole) == json.loads(text) == records
    starts = [4 + sum(len(piece) + 3 for piece in pieces[:i]) for i in range(len(pieces))]
    assert [row.at for row in whole if isinstance(row, Row)] == [
        f"{path}:{text[:start].count(10) + 1}: record {i}" for i, start in enumerate(starts, start=1)
    ]
    complete = sum(start + len(piece) <= stop for start, piece in zip(starts, pieces, strict=True))
    column = len(text[:stop].split(b"\n")[-1].decode(errors="ignore")) + 1
    assert isinstance(end, Cut) and end.complete == complete
    assert end.message.startswith(f"{cut}: cut off at line {text[:stop].count(10) + 1}, column {column}, byte {stop}, ")
    assert contents(kept) == records[:complete]


def test_a_cut_names_the_place_where_the_file_ends_and_where_the_broken_record_begins(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes('[\n{"prompt": "é"},\n\n  {"prompt": "😀'.encode())
    error = "cut off at line 4, column 16, byte 39, inside record 2, which begins at line 4, column 3, byte 23"
    advice = "; 1 complete records come before. Get the complete file, or keep these: --salvage, in a config data.salvage: true"
    with pytest.raises(ValueError, match=f"^{re.escape(f'{path}: {error}{advice}')}$"):
        gather([str(path)])
    gathered = gather([str(path)], Settings(salvage=True))
    assert said(gathered) == [("record-1", "é")]
    assert str(gathered.report) == (
        f"read 1 rows: 1 used, 0 duplicates; {path}: {error}: the 1 complete records before it are kept, the rest is lost"
    )
    path.write_bytes(b'[{"prompt": "a"},\n')
    with pytest.raises(ValueError, match="cut off at line 2, column 1, byte 18, after record 1;"):
        gather([str(path)])


@pytest.mark.parametrize(
    "end",
    [
        '{"pro',
        '{"prompt": "b',
        '{"prompt": "\\',
        '{"prompt": "b"',
        '{"messages": [{',
        '{"prompt": "\u00e9'[:-1] + "\udcc3",
    ],
)
def test_a_last_line_that_is_cut_is_told_from_one_that_is_wrong(tmp_path: Path, end: str) -> None:
    path = tmp_path / "a.jsonl"
    tail = end.encode("utf-8", "surrogateescape")
    path.write_bytes(b'{"prompt": "a"}\n' + tail)
    column = len(tail.decode(errors="ignore")) + 1
    with pytest.raises(
        ValueError, match=f"cut off at line 2, column {column}, byte {16 + len(tail)}, inside the record that"
    ):
        gather([str(path)])
    gathered = gather([str(path)], Settings(salvage=True, max_bad_share=0))
    assert said(gathered) == [("line-1", "a")] and gathered.report.read == 1
    path.write_bytes(b'{"prompt": "a"}\n' + tail + b"\n")  # the line is complete, so it is its writer's fault
    assert gather([str(path)], Settings(max_bad_share=0.5)).report.rejected.total() == 1


def test_json_lines_in_a_json_file_and_packed_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n{"prompt": "b\xe2\x80\xa8"}')
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "c"}\n'))
    (tmp_path / "c.json.gz").write_bytes(gzip.compress(b'\xef\xbb\xbf [{"prompt": "d"}, {"prompt": "e"}]'))
    write(tmp_path / "d", {"prompt": "f"})
    contents = [[text for _, text in said(gather([str(path)]))] for path in sorted(tmp_path.iterdir())]
    assert contents == [["a", "b\u2028"], ["c"], ["d", "e"], ["f"]]


def test_a_packed_file_that_is_cut_or_damaged_is_named(tmp_path: Path) -> None:
    path, generator = tmp_path / "a.jsonl.gz", random.Random(0)
    packed = gzip.compress("".join(f'{{"prompt": "{generator.random()}"}}\n' for _ in range(2_000)).encode())
    path.write_bytes(packed[:-2_000])
    with pytest.raises(
        ValueError, match=f"^{re.escape(str(path))}: the packed file is cut off; [0-9,]* complete records"
    ):
        gather([str(path)])
    assert 100 < gather([str(path)], Settings(salvage=True)).report.used < 2_000
    for content in (b"not packed", packed[:100] + b"\0" * 100 + packed[200:]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"^{re.escape(str(path))}: .*; give a file that can be read"):
            gather([str(path)])


def test_text_behind_a_list_is_refused_and_a_broken_element_does_not_spoil_the_next(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b'[{"prompt": "a"}, {"prompt" "b"}, {"prompt": "c"} {"prompt": "d"}, 5,\n {"prompt": "e"}, ]\n')
    gathered = gather([str(path)], Settings(max_bad_share=0.6))
    assert said(gathered) == [("record-1", "a"), ("record-5", "e")]
    assert gathered.report.rejected == {"broken JSON": 2, "no known shape": 1}
    path.write_bytes(path.read_bytes() + b"\n [1]")
    with pytest.raises(
        ValueError, match="text behind the end of the list, at line 4, column 2, byte 92; allowed: one list"
    ):
        gather([str(path)], Settings(max_bad_share=1))


def test_a_huge_line_and_a_huge_element_are_read(tmp_path: Path) -> None:
    text = '\\"é[' * 1_000_000
    for name in ("a.jsonl", "a.json"):
        path = tmp_path / name
        path.write_text(json.dumps([{"prompt": text}] if name == "a.json" else {"prompt": text}))
        ((_, content),) = said(gather([str(path)]))
        assert content == text


# Several sources


def test_the_account_adds_up_and_says_what_became_of_every_row(tmp_path: Path) -> None:
    first = write(
        tmp_path / "a.jsonl", chat("a", "b"), chat("a", "b", id=5), chat("c"), {"x": 1}, chat("d", ""), {"text": ""}
    )
    second = write(tmp_path / "b.jsonl", chat("c"), *(chat(str(i)) for i in range(4)), {"y": 1})
    aside = tmp_path / "out.rejected.jsonl"
    gathered = gather([f"{first}?weight=2", f"{second}?weight=0.5"], Settings(max_bad_share=0.5, rejected=aside))
    report = gathered.report
    assert (report.read, report.used, report.copies, report.duplicates, report.left_out) == (12, 5, 3, 2, 2)
    assert report.rejected == {"no known shape": 2, "malformed record": 1}
    assert report.read == report.used + report.duplicates + report.left_out + report.rejected.total()
    assert str(report) == (
        "read 12 rows: 5 used, 3 copies of these (weight), 2 duplicates, 2 left out (weight), "
        "3 rejected (no known shape 2, malformed record 1)"
    )
    names = [name for name, _ in said(gathered)]
    assert names[:6] == ["line-1", "line-3", "line-5", "line-1#2", "line-3#2", "line-5#2"]
    assert len(names) == len(set(names)) == 8 == report.used + report.copies
    assert gathered.places[:2] == [f"{first}:1", f"{first}:3"] and gathered.places[6].startswith(f"{second}:")
    entries = [json.loads(line) for line in aside.read_text(encoding="utf-8").splitlines()]
    assert [(entry["source"], entry["place"], entry["reason"], entry["row"].strip()) for entry in entries] == [
        (f"{first}?weight=2", f"{first}:4", "no known shape", '{"x": 1}'),
        (f"{first}?weight=2", f"{first}:6", "malformed record", '{"text": ""}'),
        (f"{second}?weight=0.5", f"{second}:6", "no known shape", '{"y": 1}'),
    ]
    assert entries[1]["message"].startswith(f"{first}:6: 'text' is \"\"; allowed: ")
    gather([f"{first}?limit=3"], Settings(rejected=aside))
    assert not aside.exists()


def test_an_id_that_is_taken_gets_a_number(tmp_path: Path) -> None:
    records = [chat("a", id="x"), chat("b", id="x#2"), chat("c", id="x"), chat("d", id="x")]
    assert said(gather([write(tmp_path / "a.jsonl", *records)])) == [
        ("x", "a"),
        ("x#2", "b"),
        ("x#3", "c"),
        ("x#4", "d"),
    ]


def test_a_weight_takes_a_random_part_that_depends_on_the_seed_and_not_on_the_order(tmp_path: Path) -> None:
    records = [chat(str(i)) for i in range(40)]
    one, other = write(tmp_path / "a.jsonl", *records), write(tmp_path / "b.jsonl", *reversed(records))

    def taken(path: str, weight: float, seed: int = 0) -> list[str]:
        return sorted(text for _, text in said(gather([f"{path}?weight={weight}"], Settings(seed=seed))))

    assert len(taken(one, 0.3)) == 12 and len(taken(one, 2.3)) == 92
    assert taken(one, 0.3) == taken(other, 0.3) != taken(one, 0.3, seed=1)
    assert set(taken(one, 0.3)) < set(taken(one, 0.6))
    assert taken(one, 1.3) == sorted(taken(one, 1) + taken(one, 0.3))


def test_too_many_bad_rows_stop_with_the_counts_and_the_first_example_of_each_kind(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *[chat(str(i)) for i in range(17)], {"x": 1}, {"text": 5}, {"x": 2})
    aside = tmp_path / "rejected.jsonl"
    with pytest.raises(ValueError) as caught:
        gather([path], Settings(max_bad_share=0.1, rejected=aside))
    assert str(caught.value).startswith(
        "3 of 20 rows cannot be used (no known shape 2, malformed record 1), more than the share 0.1 that max_bad_share allows. "
        f'The first of each kind: {path}:18: no turns in {{"x": 1}}; '
    )
    assert f"; {path}:19: 'text' is 5; allowed: " in str(caught.value) and f"{path}:20" not in str(caught.value)
    assert len(aside.read_text().splitlines()) == 3
    assert gather([path], Settings(max_bad_share=0.15)).report.used == 17


def test_nothing_at_all_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("")
    (tmp_path / "b.json").write_text(" [ ] ")
    for name in ("a.json", "b.json"):
        with pytest.raises(ValueError, match="no conversation in it; allowed: {"):
            gather([str(tmp_path / name)])
    with pytest.raises(ValueError, match="no file of data in the folder; allowed: .jsonl, .ndjson, .json, .parquet"):
        (tmp_path / "empty").mkdir()
        gather([str(tmp_path / "empty")])


def test_columns_may_have_names_of_their_own(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl",
        {"question": "a", "answer": "b", "text": "in the way", "uid": "q"},
        {"question": "c"},
        ["d"],
    )
    gathered = gather([f"{path}?columns=prompt:question,completion:answer,id:uid"], Settings(max_bad_share=0.4))
    assert said(gathered) == [("q", "a/b"), ("line-2", "c")]


# Splits


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    records=st.lists(st.tuples(st.sampled_from("abcdefgh"), NASTY, st.lists(NASTY, max_size=3)), max_size=20),
    share=st.floats(0.1, 0.9),
    order=st.randoms(use_true_random=False),
)
def test_no_question_is_on_both_sides_whatever_the_answers_and_the_order(
    records: list[tuple[str, str, list[str]]], share: float, order: random.Random
) -> None:
    conversations = []
    for i, (question, system, rest) in enumerate(records):
        spelled = question.upper() if i % 2 else f" {question}\n"
        messages = chat(spelled, *rest)["messages"]
        conversations.append(Conversation(str(i), ({"role": "system", "content": system}, *messages)))
    sides = {c.id: is_held_out(c, share) for c in conversations}
    for held_out in (True, False):
        questions = {records[int(name)][0] for name, side in sides.items() if side == held_out}
        others = {records[int(name)][0] for name, side in sides.items() if side != held_out}
        assert not questions & others
    order.shuffle(conversations)
    if len(set(sides.values())) == 2:
        train, held = split(conversations, share)
        assert {c.id for c in held} == {name for name, side in sides.items() if side}
        assert [c for c in conversations if c in train] == train and len(train) + len(held) == len(conversations)
    else:
        with pytest.raises(ValueError, match="holds out . of|holds out .. of"):
            split(conversations, share)


def test_a_share_is_kept_and_a_larger_one_holds_the_smaller() -> None:
    conversations = [Conversation(str(i), tuple(chat(f"question {i}")["messages"])) for i in range(2_000)]
    held = [{c.id for c in split(conversations, share)[1]} for share in (0.02, 0.1, 0.5)]
    assert held[0] < held[1] < held[2]
    for names, share in zip(
        held, (0.02, 0.1, 0.5), strict=True
    ):  # five standard deviations: false alarm below one in a million
        assert abs(len(names) - 2_000 * share) < 5 * (2_000 * share * (1 - share)) ** 0.5


def test_token_ids_are_split_by_what_comes_before_the_answer_and_raw_text_by_itself() -> None:
    for share in (0.2, 0.5, 0.8):
        sides = {is_held_out(Conversation("x", (), given=((1, 2, n), (False, False, True))), share) for n in range(20)}
        assert len(sides) == 1
    texts = [is_held_out(Conversation("x", (), text=f"text {n}"), 0.5) for n in range(40)]
    ids = [is_held_out(Conversation("x", (), given=((n, 2), (True, True))), 0.5) for n in range(40)]
    assert {*texts} == {*ids} == {True, False}


def test_a_fingerprint_is_of_everything_that_is_learned_and_of_nothing_else() -> None:
    messages = tuple(chat("a", "b")["messages"])
    same = [Conversation("x", messages), Conversation("y", messages, "other", True)]
    more = [
        Conversation("x", messages, tools=({"name": "f"},)),
        Conversation("x", tuple(chat("a", "b ")["messages"])),
        Conversation("x", ({**messages[0]}, {**messages[1], "reasoning_content": "c"})),
        Conversation("x", (), text="a"),
        Conversation("x", (), given=((1, 2), (False, True))),
        Conversation("x", (), given=((1, 2), (True, True))),
    ]
    assert fingerprint(same[0]) == fingerprint(same[1])
    assert len({fingerprint(conversation) for conversation in [same[0], *more]}) == 7


# Folders, Parquet and data sets

TABLE: list[dict[str, Any]] = [
    {"id": "a", "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}], "tools": "[]"},
    {
        "id": "b",
        "messages": [{"role": "user", "content": "é😀\u2028"}, {"role": "assistant", "content": "", "reasoning": "hm"}],
    },
    {"id": "c", "messages": [{"role": "user", "content": "hi", "name": "Ann"}], "note": 5},
    {
        "id": "d",
        "messages": [
            {"role": "user", "content": "yo"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"name": "f", "arguments": {"city": "é"}}, {"name": "g", "arguments": {"day": 3}}],
            },
        ],
    },
]
CONVERSATIONS = [
    Conversation("a", ({"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"})),
    Conversation("b", ({"role": "user", "content": "é😀\u2028"}, {"role": "assistant", "content": "", "reasoning_content": "hm"})),
    Conversation("c", ({"role": "user", "content": "hi"},)),
    Conversation("d", ({"role": "user", "content": "yo"}, {"role": "assistant", "content": "", "tool_calls": [
        {"type": "function", "function": {"name": "f", "arguments": {"city": "é"}}},
        {"type": "function", "function": {"name": "g", "arguments": {"day": 3}}}]})),
]  # fmt: skip


def as_parquet(folder: Path, data_set: Any) -> str:
    data_set.to_parquet(folder / "a.parquet")
    return f"{folder / 'a.parquet'}"


def saved(folder: Path, data_set: Any) -> str:
    data_set.save_to_disk(folder / "saved")
    return f"{folder / 'saved'}"


def saved_splits(folder: Path, data_set: Any) -> str:
    from datasets import DatasetDict

    DatasetDict({"train": data_set.select([0]), "all": data_set}).save_to_disk(folder / "saved")
    return f"{folder / 'saved'}?split=all"


def hub_folder_streamed(folder: Path, data_set: Any) -> str:
    return f"{hub_folder(folder, data_set)}&streaming=true"


def hub_folder(folder: Path, data_set: Any) -> str:
    (folder / "data").mkdir()
    data_set.to_parquet(folder / "data" / "test-00000-of-00001.parquet")
    data_set.select([0]).to_parquet(folder / "data" / "train-00000-of-00001.parquet")
    return f"{folder}?split=test"


@pytest.mark.parametrize(
    "make", [as_parquet, saved, saved_splits, hub_folder, hub_folder_streamed], ids=lambda make: make.__name__
)
def test_a_table_gives_the_conversations_that_were_put_in(
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[Path, Any], str],
) -> None:
    from datasets import Dataset

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))

    source = make(tmp_path, Dataset.from_list(TABLE))  # Arrow fills in nulls: every turn gets name and reasoning
    gathered = gather([source])
    assert gathered.conversations == CONVERSATIONS
    assert gathered.places[2].endswith(": row 3")
    more = "&" if "?" in source else "?"
    assert gather([f"{source}{more}limit=2"]).conversations == CONVERSATIONS[:2]


def test_a_data_set_that_cannot_be_had_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from datasets import Dataset, DatasetDict

    for name in ("datasets.config.HF_HUB_OFFLINE", "huggingface_hub.constants.HF_HUB_OFFLINE"):
        monkeypatch.setattr(name, True)

    DatasetDict({"train": Dataset.from_list(TABLE)}).save_to_disk(tmp_path / "saved")
    with pytest.raises(ValueError, match="saved: it has no split 'test', but 'train'; give a data set that"):
        gather([f"{tmp_path / 'saved'}?split=test"])
    (tmp_path / "a.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(ValueError, match="a.parquet: .*; give a data set that the `datasets` library reads"):
        gather([str(tmp_path / "a.parquet")])
    with pytest.raises(ValueError, match="^no-such-owner/no-such-data: .*; give a data set that"):
        gather(["no-such-owner/no-such-data?split=train"])


def test_code_that_a_data_set_brings_along_is_not_run(tmp_path: Path) -> None:
    folder = tmp_path / "trap"
    folder.mkdir()
    (folder / "trap.py").write_text(f"open({str(tmp_path / 'sprung')!r}, 'w')\n")
    with pytest.raises(ValueError, match="trap: .*"):
        gather([f"{folder}?split=train"])
    assert not (tmp_path / "sprung").exists()


def test_a_folder_is_all_its_files_in_order_of_their_names(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    write(tmp_path / "b.jsonl", chat("1"), {"x": 1})
    (tmp_path / "a.json").write_text(json.dumps([chat("2"), chat("3")]))
    write(tmp_path / "sub" / "c.ndjson", chat("4"))
    for name in ("b.jsonl.rejected.jsonl", "notes.txt", ".hidden.jsonl", "out.jsonl.meta.json"):
        write(tmp_path / name, chat("no"))
    gathered = gather([str(tmp_path)], Settings(max_bad_share=0.2))
    assert said(gathered) == [("record-1", "2"), ("record-2", "3"), ("line-1", "1"), ("line-1#2", "4")]


# The command


def test_the_command_writes_what_it_read_and_holds_questions_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [chat(f"question {i}", "\u2028 é\n😀", category="x", id=f"c{i}") for i in range(60)]
    records.append(
        {**chat("question 3", "another answer", "and", "so on"), "tools": [{"name": "f"}], "truncated": True}
    )
    source, out, held = (
        write(tmp_path / "a.jsonl", *records, records[0], {"x": 1}),
        tmp_path / "out.jsonl",
        tmp_path / "held.jsonl",
    )
    for old in (".meta.json", ".unanswered.jsonl"):
        Path(f"{out}{old}").write_text("of an earlier file under this name, which a target answered")
    main(["data", source, "--keep-answers", "--out", str(out), "--held-out", str(held), "--held-out-share", "0.2"])
    train, kept = read_conversations(out), read_conversations(held)
    assert len(train) + len(kept) == 61 and 3 < len(kept) < 25
    assert sorted([*train, *kept], key=lambda c: c.id) == sorted(gather([source]).conversations, key=lambda c: c.id)
    assert not {c.messages[0]["content"] for c in train} & {c.messages[0]["content"] for c in kept}
    assert capsys.readouterr().out.splitlines() == [
        "read 63 rows: 61 used, 1 duplicates, 1 rejected (no known shape 1)",
        f"{out}.rejected.jsonl: 1 rows that cannot be used, and why",
        f"{held}: {len(kept)} conversations, held out",
        f"{out}: {len(train)} conversations",
    ]
    main(["data", str(out), str(held), "--keep-answers", "--out", str(tmp_path / "again.jsonl")])
    assert gather([str(tmp_path / "again.jsonl")]).conversations == [*train, *kept]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "a.jsonl", "again.jsonl", "held.jsonl", "out.jsonl", "out.jsonl.rejected.jsonl",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("a.jsonl --out o.jsonl", "nobody to answer; give --target T to decode here, --endpoint URL of a server"),
        ("--keep-answers --out o.jsonl", "no sources: give files, folders or hub ids of conversations"),
        ("a.jsonl --keep-answers --target t --out o.jsonl", "--keep-answers asks no target: leave out --target,"),
        ("a.jsonl?weight=2 --keep-answers --out o.jsonl", "copies in a file are read as duplicates; give a weight above"),
        ("a.jsonl --keep-answers --out no/o.jsonl", "the folder no of the output file does not exist; create it first"),
        ("a.jsonl --keep-answers --out o --held-out ./o", "o is to be both the output and what is held out; give two files"),
        ("a.jsonl --keep-answers --out a.jsonl", "a.jsonl is to be written, but 'a.jsonl' is read from there; give another file"),
        ("a.jsonl?limit=1 --target t --out o --held-out a.jsonl", "a.jsonl is to be written, but 'a.jsonl?limit=1' is read from"),
        (". --target t --out sub/o.jsonl", "sub/o.jsonl is to be written, but '.' is read from there; give another file"),
        ("a.jsonl --target t --out o --held-out ./o", "o is to be both the output and what is held out; give two files"),
        ("a.jsonl --target t --out no/o --held-out h", "the folder no of the output file does not exist; create it first"),
        ("a.jsonl --keep-answers --out o --held-out h --held-out-share 0", "a share of 0.0 holds out 0 of 2 conversations; give"),
        ("a.jsonl --keep-answers --out o --max-bad-share 7", "max_bad_share is 7.0; give a number from 0 to 1"),
        ("b.json --keep-answers --out o", "b.json: cut off at line 1, column 18, byte 17, after record 1;"),
    ],
)  # fmt: skip
def test_the_command_says_what_to_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str, error: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.jsonl", chat("a"), chat("b"))
    (tmp_path / "b.json").write_text('[{"prompt": "a"},')
    (tmp_path / "sub").mkdir()
    with pytest.raises(SystemExit) as stopped:
        main(["data", *words.split()])
    assert stopped.value.code == 2 and error in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "b.json", "sub"]
    assert not list((tmp_path / "sub").iterdir())


def test_rows_of_a_source_are_read_one_by_one(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("[" + ",\n".join(json.dumps(chat(str(i), "x" * 1_000)) for i in range(5_000)) + "\n, {broken")
    found = rows(parse_source(str(path)))  # 5 MB; what lies behind the rows that are asked for is not looked at
    assert [row.at for row in (next(found), next(found)) if isinstance(row, Row)] == [
        f"{path}:{i}: record {i}" for i in (1, 2)
    ]
