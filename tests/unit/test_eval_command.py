"""`draftsmith eval` as a user types it, on a toy target."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from draftsmith import drafters
from draftsmith.inference.target import load
from draftsmith.scripts.main import main


@pytest.fixture(scope="module")
def folder(toy: SimpleNamespace, toy_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two drafters and a prompt file."""
    folder = tmp_path_factory.mktemp("eval")
    target = load(toy_folder)
    for kind in ("medusa", "eagle3"):
        drafters.save(toy.make_drafter(kind, target, draft_vocab_size=100), folder / kind)
    (folder / "prompts.jsonl").write_text('{"messages": [{"role": "user", "content": "hello"}]}\n')
    return folder


def arguments(folder: Path, toy_folder: Path, *names: str) -> list[str]:
    where = ["--target", str(toy_folder), "--prompts", str(folder / "prompts.jsonl"), "--dtype", "float32"]
    small = ["--k", "2", "--max-new", "5", "--speed-prompts", "1", "--device", "cpu"]
    return ["eval", *(str(folder / name) for name in names), *where, *small]


def test_each_drafter_gets_its_own_report_and_table(
    folder: Path, toy_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / "first.json", tmp_path / "second.json"]
    main([*arguments(folder, toy_folder, "medusa", "eagle3"), "--json", str(files[0]), "--json", str(files[1])])
    for file, kind in zip(files, ("medusa", "eagle3"), strict=True):
        report = json.loads(file.read_text())
        assert report["record"]["drafter"] == kind and report["record"]["name"] == str(folder / kind)
        assert [r["agreement"]["identical"] for r in report["results"]] == [1]
    printed = capsys.readouterr().out
    assert printed.index(f"{folder / 'medusa'}: medusa") < printed.index(f"{folder / 'eagle3'}: eagle3")


def test_options_may_come_before_the_drafter(folder: Path, toy_folder: Path, tmp_path: Path) -> None:
    command, drafter, *rest = arguments(folder, toy_folder, "medusa")
    main([command, "--json", str(tmp_path / "report.json"), drafter, *rest])
    assert json.loads((tmp_path / "report.json").read_text())["results"]


@pytest.mark.parametrize(
    ("names", "files", "message"),
    [
        (("medusa", "eagle3"), ("a.json",), "1 times --json for 2 drafters; give one for each"),
        (("medusa", "eagle3"), ("a.json", "./a.json"), "given twice"),
        (("medusa", "medusa"), ("a.json", "b.json"), "given twice"),
        (("medusa",), ("nowhere/a.json",), "does not exist; create it first"),
    ],
)
def test_a_mistake_is_noticed_before_anything_is_measured(
    folder: Path,
    toy_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    names: tuple[str, ...],
    files: tuple[str, ...],
    message: str,
) -> None:
    places = [word for file in files for word in ("--json", f"{tmp_path}/{file}")]
    with pytest.raises(SystemExit) as error:
        main([*arguments(folder, toy_folder, *names), *places])
    assert error.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("draftsmith eval: ") and message in line
