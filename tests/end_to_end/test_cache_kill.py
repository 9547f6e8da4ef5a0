"""`draftsmith cache` in processes that get SIGKILL at random points: the store is the one of an uninterrupted run."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import yaml


def write_config(folder: Path, target: Path) -> Path:
    lines = []
    for i in range(100):
        messages = [
            {"role": "user", "content": f"hello {i}"},
            {"role": "assistant", "content": "the quick brown fox " * (1 + i % 11)},
        ]
        lines.append(json.dumps({"id": f"c{i}", "messages": messages}))
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")
    config = {
        "output": str(folder / "run"),
        "target": {"path": str(target), "dtype": "float32"},
        "drafter": {"kind": "eagle3", "layers": [1, 2, 3], "draft_vocab_size": 48},
        "data": {"train": [str(folder / "train.jsonl")]},
        "features": {"store": "disk", "folder": str(folder / "features"), "shard_mb": 1},
        "eval": {"prompts": str(folder / "train.jsonl")},
        "tracking": {"tracker": "none"},
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def test_a_store_is_byte_identical_after_kills_at_random_points(toy_folder: Path, tmp_path: Path) -> None:
    """Six kills here; docs/results has fifty on the real target."""
    config = write_config(tmp_path, toy_folder)
    command = [sys.executable, "-m", "draftsmith.scripts.kill_caching", str(config), "--kills", "6"]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    found = re.match(r"6 kills \((\d) with a store in the making\) over (\d+) stores of \d+ files", done.stdout)
    assert found is not None, done.stdout
    assert int(found[1]) >= 1  # the moments are random
