"""`draftsmith eval` as a user types it, on a toy target."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from draftsmith import drafters
from draftsmith.inference.load_target import load
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


def test_what_is_measured_anyway_is_not_tried_for_speed_alone(
    folder: Path, toy_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`wide:1,1` is the chain of --k 2 in other words."""
    with pytest.raises(SystemExit) as error:
        main([*arguments(folder, toy_folder, "medusa"), "--speed-tree", "wide:1,1"])
    assert error.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("draftsmith eval: ") and "--speed-tree repeats what --k or --tree has" in line


def test_trees_a_language_model_and_prompt_lookup_are_measured_too(
    folder: Path, toy_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A drafter with two trees beside the chain; the target's own folder as draft model, and n-grams, with chains."""
    command, drafter, *rest = arguments(folder, toy_folder, "eagle3")
    main([command, drafter, *rest, "--tree", "dynamic:5,3,2", "--tree", "wide:2,1", "--json", str(tmp_path / "a.json")])
    results = json.loads((tmp_path / "a.json").read_text())["results"]
    assert [(r["plan"], r["nodes"]) for r in results] == [("2", 2), ("dynamic:5,3,2", 5), ("tree:-1,-1,0,1", 4)]
    assert all(r["agreement"]["identical"] == 1 for r in results)
    assert "draft_acceptance_rate" in results[0] and "node_utilisation" in results[1]
    assert "dynamic:5,3,2" in capsys.readouterr().out

    files = [word for name in "bc" for word in ("--json", str(tmp_path / f"{name}.json"))]
    main([command, str(toy_folder), "ngram", *rest, *files])
    itself, ngram = (json.loads((tmp_path / f"{name}.json").read_text()) for name in "bc")
    assert itself["record"]["drafter"] == "language_model" and itself["record"]["drafter_parameters"] > 0
    assert itself["results"][0]["draft_acceptance_rate"] > 0.5  # the target drafts for itself
    assert ngram["record"]["drafter"] == "ngram" and ngram["record"]["drafter_parameters"] == 0


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("eagle3", ("--tree", "dynamic:99,2,2"), "has 6 nodes at most, not 99"),
        ("eagle3", ("--tree", "bushy"), "'bushy' is no plan; give K, dynamic:NODES"),
        ("eagle3", ("--tree", "tree:-1,5"), "parents[1] = 5"),
        ("eagle3", ("--tree", "wide:3", "--rule", "ratio"), "cannot verify a sampled tree; use"),
        ("eagle3", ("--tree", "dynamic:4,2,2", "--rule", "rrsw"), "biases sampled drafts"),
        ("eagle3", ("--rule", "block", "--draft", "coupled"), "the rule 'block' cannot verify a coupled chain"),
        ("ngram", ("--tree", "wide:2"), "proposes chains only"),
        ("nowhere", (), "is no drafter"),
    ],
)
def test_a_plan_that_cannot_be_is_one_clear_line(
    folder: Path,
    toy_folder: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    options: tuple[str, ...],
    message: str,
) -> None:
    command, drafter, *rest = arguments(folder, toy_folder, name)
    with pytest.raises(SystemExit) as error:
        main([command, name if name == "ngram" else drafter, *rest, "--temperature", "1", *options])
    assert error.value.code == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("draftsmith eval: ") and message in line
