"""Building training conversations in processes that get SIGKILL: started again, they end with the same files."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path


def test_conversations_are_the_same_after_kills_at_random_points(ending_folder: Path, tmp_path: Path) -> None:
    prompts, report = tmp_path / "prompts.jsonl", tmp_path / "report.md"
    records = [{"id": f"p{i}", "messages": [{"role": "user", "content": "hello " * (i % 5 + 1)}]} for i in range(16)]
    prompts.write_text("".join(json.dumps(record) + "\n" for record in records))
    command = [
        sys.executable,
        "-m",
        "draftsmith.scripts.kill_regeneration",
        "--target",
        str(ending_folder),
        "--prompts",
        str(prompts),
    ]
    command += ["--num-prompts", "16", "--max-new", "20", "--kills", "3", "--seed", "5", "--out", str(report)]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"\| (float32|bfloat16) \| 3 \| (\d) \| (\d) \| (\d) \|", report.read_text())
    assert [row[:2] for row in rows] == [("float32", "3"), ("bfloat16", "3")]
    assert sum(int(row[3]) for row in rows) > 0  # some came while answers were made
