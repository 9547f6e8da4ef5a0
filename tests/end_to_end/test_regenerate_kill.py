"""Building training conversations in a process that gets SIGKILL: started again, it ends with the same file."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

PROGRAM = """
import sys
from draftsmith.inference.sampling import Sampler
from draftsmith.inference.target import load
from draftsmith.train.regenerate import Settings, regenerate
settings = Settings(sampler=Sampler(0.8), max_new=48, batch_size=2, seed=5, self_prompt=4)
regenerate(load(sys.argv[1]), sys.argv[2], sys.argv[3], settings)
"""


def start(target: Path, prompts: Path, out: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM, str(target), str(prompts), str(out)]
    return subprocess.Popen(
        command, cwd=out.parent, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, text=True
    )


def test_conversations_are_the_same_after_a_kill_in_the_middle(toy_folder: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    records = [{"id": f"p{i}", "messages": [{"role": "user", "content": "hello " * (i % 5 + 1)}]} for i in range(40)]
    prompts.write_text("".join(json.dumps(record) + "\n" for record in records))
    straight, killed = tmp_path / "straight.jsonl", tmp_path / "killed.jsonl"
    done = start(toy_folder, prompts, straight)
    _, errors = done.communicate(timeout=120)
    assert done.returncode == 0, errors

    partial = tmp_path / "killed.jsonl.answers.partial"
    process = start(toy_folder, prompts, killed)
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if partial.exists() and partial.read_bytes().count(b"\n") >= 4:  # the header and three batches
            break
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    _, errors = process.communicate()
    assert process.returncode == -signal.SIGKILL, errors
    assert partial.exists() and not killed.exists()

    again = start(toy_folder, prompts, killed)
    _, errors = again.communicate(timeout=120)
    assert again.returncode == 0, errors
    assert "are there from an earlier run" in errors
    assert killed.read_bytes() == straight.read_bytes()
    meta = [json.loads(Path(f"{path}.meta.json").read_text()) for path in (killed, straight)]
    assert meta[0] == meta[1]
    assert not list(tmp_path.glob("*.partial"))
