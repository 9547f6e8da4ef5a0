"""The checks for a GPU, as far as a CPU can say: all of it runs at toy sizes, and what is wrong is reported as that."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from draftsmith.scripts import check_cuda


def dry_run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "draftsmith.scripts.check_cuda", "--dry-run", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


def test_the_dry_run_passes_every_section_and_writes_what_it_found(tmp_path: Path) -> None:
    done = dry_run("--out", str(tmp_path / "found.md"))
    assert done.returncode == 0, done.stdout + done.stderr
    text = (tmp_path / "found.md").read_text()
    assert text.count(": passed (") == len(check_cuda.SECTIONS) and text.rstrip().endswith("All checks passed.")
    assert "killed and continued, largest deviation of a weight: 0 " in text
    assert text.count("| eagle3 |") == text.count("| medusa |") == 1


def test_a_section_that_fails_or_takes_too_long_costs_the_others_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(check_cuda.SECTIONS, "loss", ("cuda_loss", 0.01, "slow"))
    monkeypatch.setattr(sys, "argv", ["check_cuda", "--dry-run", "--only", "loss", "attention"])
    with pytest.raises(SystemExit) as stopped:
        check_cuda.main()
    printed = capsys.readouterr().out
    assert stopped.value.code == 1 and "Failed: loss." in printed
    assert "took longer than its 0.01 seconds" in printed and "in fp64: passed (" in printed


@pytest.mark.parametrize("value", [0.2, float("nan"), float("inf")])
def test_a_deviation_that_is_too_large_or_no_number_is_an_error(value: float) -> None:
    check_cuda.check("a sum", 0.1, 0.1)
    with pytest.raises(AssertionError, match="a sum is"):
        check_cuda.check("a sum", value, 0.1)


@pytest.mark.skipif(check_cuda.torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["check_cuda"])
    with pytest.raises(SystemExit, match="no CUDA GPU here; --dry-run"):
        check_cuda.main()
