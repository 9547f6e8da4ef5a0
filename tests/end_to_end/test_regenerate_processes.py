"""`draftsmith data` as it is typed: in two processes under accelerate, and with what it refuses."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from draftsmith.scripts.main import main

LAUNCH = ("launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no",
          "--dynamo_backend", "no", "--main_process_port", "0", "-m", "draftsmith.scripts.main")  # fmt: skip


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    records = [
        {"id": f"p{i}", "messages": [{"role": "user", "content": "hello " * (i % 5 + 1) + str(i)}]} for i in range(24)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_two_processes_write_the_file_of_one(
    ending_folder: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["data", str(prompts), "--target", str(ending_folder), "--dtype", "float32", "--device", "cpu", "--batch-size", "2",
               "--max-new", "24", "--temperature", "0:1,0.8:2", "--self-prompt", "6", "--out"]  # fmt: skip
    main([*options, str(tmp_path / "one.jsonl")])
    accelerate = str(Path(sys.executable).parent / "accelerate")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    command = [accelerate, *LAUNCH, *options, str(tmp_path / "two.jsonl")]
    two = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert two.returncode == 0, two.stderr
    assert "process 1 of 2" in two.stderr and "process 2 of 2" in two.stderr
    assert two.stdout.count("conversations") == 1  # the main process speaks for all
    assert (tmp_path / "two.jsonl").read_bytes() == (tmp_path / "one.jsonl").read_bytes()
    assert (tmp_path / "two.jsonl.meta.json").read_bytes() == (tmp_path / "one.jsonl.meta.json").read_bytes()
    assert not list(tmp_path.glob("*.partial"))


def test_invented_prompts_get_free_ids_and_are_held_out_like_given_ones(
    ending_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Answers to invented prompts are a source of the next run, whose prompts are numbered from 0 again."""
    source, out, held = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl", tmp_path / "held.jsonl"
    ids = [f"self-{i:05d}" for i in range(18)]
    source.write_text("".join(json.dumps({"id": name, "prompt": f"hello {name}"}) + "\n" for name in ids))
    main(["data", str(source), "--target", str(ending_folder), "--dtype", "float32", "--device", "cpu", "--max-new", "24",
          "--self-prompt", "6", "--held-out", str(held), "--held-out-share", "0.5", "--out", str(out)])  # fmt: skip
    train, kept = ([json.loads(line) for line in path.read_text().splitlines()] for path in (out, held))
    names = [record["id"] for record in [*train, *kept]]
    assert len(names) == len({*names}) == 24 and {*ids} < {*names}
    assert all(any(record["id"].endswith("#2") for record in side) for side in (train, kept))
    assert not {r["messages"][0]["content"] for r in train} & {r["messages"][0]["content"] for r in kept}
    assert [len(record["messages"]) for record in kept] == [1] * len(kept)
    printed = capsys.readouterr()
    assert f"{held}: {len(kept)} conversations, held out" in printed.err
    assert printed.out == f"{out}: {len(train)} conversations\n"


@pytest.mark.parametrize(
    "options, message",
    [
        ([], "nobody to answer; give --target T"),
        (["--target", "t", "--endpoint", "http://x"], "both --target and --endpoint"),
        (["--endpoint", "http://x", "--batch-size", "4"], "--batch-size has no effect with --endpoint"),
        (["--endpoint", "http://x", "--self-prompt", "4"], "a server cannot invent prompts"),
        (["--target", "t", "--concurrency", "4"], "--concurrency has no effect with --target"),
        (["--target", "t", "--temperature", "0:0,1"], "temperature 0 has the weight 0"),
        (["--target", "t", "--temperature", "0,-1"], "temperature is -1.0"),
        (["--target", "t", "--max-bad-share", "2"], "max_bad_share is 2.0"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_loaded(
    options: list[str], message: str, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["data", str(prompts), "--out", str(tmp_path / "out.jsonl"), *options])
    assert caught.value.code == 2 and message in capsys.readouterr().err
