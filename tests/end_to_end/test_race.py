"""Our side of the race against speculators, its memory account and its table; the peer itself is not installed here."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from draftsmith import drafters
from draftsmith.scripts import race_speculators
from draftsmith.scripts.benchmark_training import TEXT
from draftsmith.scripts.race_speculators import OURS, PEER, Runner
from draftsmith.scripts.resident import Memory


def test_memory_is_what_was_touched_at_the_peak_and_given_back_at_rest() -> None:
    memory = Memory()
    before = memory.rest()
    torch.ones(64 << 18)  # 64 MiB of fp32, dropped at once
    peak = memory.peak()
    assert 60 < peak - before < 80
    assert memory.rest() - before < 8 and memory.peak() - before < 8


def test_speeds_are_medians_over_rounds_of_the_same_packs_without_the_first() -> None:
    def answers(*seconds: float) -> list[dict[str, float]]:
        return [{"seconds": s, "rest": 100.0, "peak": 150.0 + s} for s in seconds]

    both = {PEER: answers(9, 2, 4, 3), OURS: answers(9, 1, 1, 2)}
    *_, theirs, ours = race_speculators._speeds("t", [(both, [5, 100, 200, 300], [5, 50, 60, 90])])
    assert theirs == f"| {PEER} | 50 [50, 100] | 25 [15, 30] | 1.00 [1.00, 1.00] | 154 | 54 |"
    assert ours == f"| {OURS} | 150 [100, 200] | 50 [45, 60] | 2.00 [1.50, 4.00] | 152 | 52 |"


@pytest.mark.model
def test_our_contestant_trains_what_it_is_told_to_and_saves_a_drafter(smollm2: Path, tmp_path: Path) -> None:
    options = argparse.Namespace(
        target=str(smollm2), tokens=256, steps=2, learning_rate=1e-3, draft_vocab_size=512, round=1, prompts=2
    )
    race_speculators.prepare(tmp_path / "race", options, 0)
    plan = json.loads((tmp_path / "race" / "race.json").read_text())
    runner = Runner("race_ours", str(tmp_path / "race"), str(tmp_path / "race" / "start"), "--freeze-head")
    for number, pack in enumerate(plan["packs"]):
        answer = runner.ask({"packs": [pack], "first": number, "all_supervised": number == 1})
        assert answer["seconds"] > 0 and answer["peak"] > answer["rest"] > 0 and len(answer["said"]) == 1
    runner.ask({"save": str(tmp_path / "after")})
    runner.close()
    before, after = (drafters.load(path).state_dict() for path in (tmp_path / "race" / "start", tmp_path / "after"))
    assert {name for name in before if torch.equal(before[name], after[name])} == {"lm_head.weight", "d2t", "t2d"}
    theirs = sorted((tmp_path / "race" / "theirs" / "hidden_states").glob("hs_*.safetensors"))
    assert len(theirs) == sum(map(len, plan["packs"]))


def test_the_benchmark_of_training_measures_both_ways_of_a_kind(tmp_path: Path) -> None:
    arguments = ["--kinds", "mtp", "--tokens", str(TEXT), "--steps", "1", "--out", str(tmp_path / "out.md")]
    command = [sys.executable, "-m", "draftsmith.scripts.benchmark_training", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "out.md").read_text()
    assert text.count("| mtp | kept |") == text.count("| mtp | recomputed |") == 1
