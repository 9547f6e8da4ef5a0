"""Several runs in one `draftsmith train`: which runs a command line means, what is refused, and the table."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from draftsmith import drafters
from draftsmith.drafters.tree import Dynamic, chain
from draftsmith.scripts import sweep
from draftsmith.scripts.main import main
from draftsmith.scripts.sweep import plans_for, read_runs

KINDS = ("eagle3", "medusa")


@pytest.fixture
def folder(toy: SimpleNamespace, toy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a config per kind, of three training steps, and two prompt files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep, "MEASURED", dataclasses.replace(sweep.MEASURED, speed_prompts=1, speed_max_new=6))
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")  # `--device cpu` would set it for good
    answer = {"role": "assistant", "content": "the fox jumps over the lazy dog"}
    records = [{"id": f"{i}", "messages": [{"role": "user", "content": f"hello {i}"}, answer]} for i in range(12)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    for name in ("held", "other"):
        prompts = [{"messages": [{"role": "user", "content": f"{name} {i}"}]} for i in range(3)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in prompts))
    for kind in KINDS:
        config: dict[str, Any] = {
            "output": f"runs/{kind}",
            "target": {"path": str(toy_folder), "dtype": "float32"},
            "drafter": {"kind": kind, **toy.KIND_SETTINGS[kind]},
            "data": {"train": ["train.jsonl"]},
            "loop": {"batch_size": 4, "precision": "float32"},
            "eval": {"prompts": "held.jsonl", "num_prompts": 1, "max_new": 4},
            "tracking": {"tracker": "none"},
        }
        (tmp_path / f"{kind}.yaml").write_text(yaml.safe_dump(config))
    return tmp_path


def test_a_grid_makes_every_combination_with_a_folder_of_its_own(folder: Path) -> None:
    grid = ["optim.learning_rate=1e-4,0.003", "data.train=[train.jsonl],[train.jsonl, other.jsonl]"]
    configs = read_runs(["eagle3.yaml", "medusa.yaml"], ["loop.epochs=2"], grid)
    expected = [
        (f"runs/{kind}-learning_rate-{rate}-train-{files}", kind, float(rate), count, 2.0)
        for kind in KINDS
        for rate in ("1e-4", "0.003")
        for count, files in ((1, "train.jsonl"), (2, "train.jsonl_other.jsonl"))
    ]
    found = [(c.output, c.kind, c.optim.learning_rate, len(c.data.train), c.loop.epochs) for c in configs]
    assert found == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("eagle3.yaml --grid optim.learning_rate", "--grid optim.learning_rate is not of the form key=value,value"),
        ("eagle3.yaml --grid seed=", "--grid seed= is not of the form key=value,value"),
        ("eagle3.yaml --grid drafter.layers=[1,2", "is not of the form key=value,value"),
        ("eagle3.yaml --grid optim.learning_rat=1,2", "unknown key 'learning_rat'; did you mean 'learning_rate'?"),
        ("eagle3.yaml --grid optim.learning_rate=1e-3,fast", "expected a number, got 'fast'"),
        ("eagle3.yaml --grid output=a,b", "--grid output is not possible"),
        ("eagle3.yaml --grid seed=1 --grid seed=2", "seed is given twice; give all its values in one --grid"),
        ("eagle3.yaml seed=1 --grid seed=1,2", "seed is given twice; give all its values in one --grid"),
        ("eagle3.yaml --grid seed=1,1", "have the same folder runs/eagle3-seed-1; give them different output"),
        ("eagle3.yaml medusa.yaml output=runs/x", "eagle3.yaml and medusa.yaml have the same folder runs/x"),
        ("eagle3.yaml ./eagle3.yaml", "eagle3.yaml and ./eagle3.yaml have the same folder runs/eagle3"),
        ("eagle3.yaml nowhere.yaml", "nowhere.yaml cannot be read"),
        ("eagle3.yaml --grid target.dtype=float32,float64", "have different target; give one table for each target"),
        ("eagle3.yaml --grid eval.prompts=held.jsonl,other.jsonl", "different eval.prompts; give --eval-prompts"),
        ("eagle3.yaml --table no/such/table.md", "the folder of no/such/table.md does not exist; create it first"),
        ("eagle3.yaml --table table.txt", "--table is table.txt; give a name that ends in .md"),
        ("eagle3.yaml --eval-prompts nowhere.jsonl", "nowhere.jsonl"),
        ("eagle3.yaml --beside runs/eagle3", "runs/eagle3 is to be measured twice; leave it out of --beside"),
        ("eagle3.yaml --eval-num-prompts 0", "--eval-num-prompts is 0; give 1 or more"),
    ],
)
def test_a_sweep_that_cannot_be_is_refused_in_one_line_before_any_training(
    words: str, message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        main(["train", *words.split()])
    assert error.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("draftsmith train: ") and message in line
    assert not (folder / "runs").exists()


def test_a_drafter_is_measured_as_deep_as_it_goes_and_with_a_tree_if_it_grows_any() -> None:
    def plans(max_depth: int | None, grows_trees: bool) -> Any:
        return plans_for(SimpleNamespace(max_depth=max_depth, grows_trees=grows_trees))  # type: ignore[arg-type]

    assert plans(None, True) == (chain(5), Dynamic(16, 5, 8))
    assert plans(3, True) == (chain(3), Dynamic(16, 3, 8))
    assert plans(1, True) == (chain(1), Dynamic(8, 1, 8))
    assert plans(None, False) == (chain(5),)


def cells(table: str) -> list[dict[str, str]]:
    """The rows of a Markdown table by the names of their columns."""
    header, _, *rows = [
        [cell.strip() for cell in line.strip("| ").split(" | ")] for line in table.splitlines() if line.startswith("|")
    ]
    return [dict(zip(header, row, strict=True)) for row in rows]


def test_a_sweep_trains_what_is_not_finished_and_tabulates_all(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "eagle3.yaml", "medusa.yaml", "--grid", "optim.learning_rate=1e-3", "--eval-max-new", "6"]
    words += ["--table", "table.md", "seed=7", "--device", "cpu", "--beside", "ngram"]
    names = [f"runs/{kind}-learning_rate-1e-3" for kind in KINDS]
    plain = sweep.train

    def killed(config: Any) -> Path:
        if config.output == names[1]:
            raise KeyboardInterrupt
        return plain(config)

    monkeypatch.setattr(sweep, "train", killed)
    with pytest.raises(SystemExit):
        main(words)
    monkeypatch.setattr(sweep, "train", plain)
    before = (folder / names[0] / "finished.json").stat().st_mtime_ns
    assert not (folder / "table.md").exists()
    capsys.readouterr()
    main(words)
    assert (folder / names[0] / "finished.json").stat().st_mtime_ns == before

    printed, written = capsys.readouterr().out, (folder / "table.md").read_text()
    *rows, untrained = cells(written)
    assert cells(printed) == [*rows, untrained]
    assert untrained["run"] == untrained["kind"] == "ngram" and untrained["training tokens"] == "-"
    assert [(row["run"], row["drafts"]) for row in rows] == [
        (name, plan) for name in names for plan in ("K = 5", "dynamic:16,5,8")
    ]
    reports = json.loads((folder / "table.json").read_text())
    assert list(reports) == [*names, "ngram"]
    for row in rows:
        report, drafter = reports[row["run"]], drafters.load(row["run"])
        assert row["kind"] == report["record"]["drafter"] == row["run"][5:11]
        assert row["parameters"] == f"{sum(p.numel() for p in drafter.parameters()) / 1e6:.1f} M"
        finished = json.loads((folder / row["run"] / "finished.json").read_text())
        assert row["training tokens"] == f"{finished['trained_tokens']:,}"
        assert row["seconds"] == f"{finished['seconds'] - finished['evaluation_seconds']:.0f}"
        greedy, sampled = (r for r in report["results"] if r["plan"] == row["drafts"].removeprefix("K = "))
        assert (greedy["temperature"], sampled["temperature"]) == (0, 1)
        for column, interval in (
            ("tau greedy", greedy["tokens_per_round"]),
            ("tau at T = 1", sampled["tokens_per_round"]),
            ("speed-up", greedy["speedup"]),
        ):
            assert row[column] == f"{interval['value']:.2f} [{interval['low']:.2f}, {interval['high']:.2f}]"
        assert row["draft time"] == f"{greedy['round_cost']['draft']:.2f}"
        assert len(row["accepted given the one before"].split()) == len(greedy["cond_accept"])
        assert greedy["agreement"]["identical"] == sampled["agreement"]["identical"] == 3
    target = reports[names[0]]["record"]["target"]
    for part in ("draftsmith train eagle3.yaml medusa.yaml --grid", "seed=7", "Trained on train.jsonl", f"Target {target} ",
                 "3 prompts of held.jsonl", "torch ", "6 tokens per answer", "float32"):  # fmt: skip
        assert part in written, part
    assert written.startswith("# ") and written.splitlines()[0][-10:].count("-") == 2  # the date


def test_one_config_alone_is_trained_and_its_folder_printed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["train", "medusa.yaml", "--device", "cpu"])
    assert capsys.readouterr().out == "runs/medusa\n"
    assert {path.name for path in folder.iterdir() if path.name != "runs"} == {
        "eagle3.yaml", "medusa.yaml", "train.jsonl", "held.jsonl", "other.jsonl",
    }  # fmt: skip
    main(["train", "medusa.yaml", "--device", "cpu", "--eval-prompts", "other.jsonl", "--eval-max-new", "4"])
    (chain_row, _) = cells(capsys.readouterr().out)
    assert chain_row["run"] == "runs/medusa"


def test_a_target_that_training_adapted_is_the_one_its_row_is_measured_with(
    folder: Path, toy: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("peft")
    config = yaml.safe_load((folder / "medusa.yaml").read_text())
    config |= {"output": "runs/medusa2", "drafter": {"kind": "medusa2", **toy.KIND_SETTINGS["medusa2"]}}
    (folder / "medusa2.yaml").write_text(yaml.safe_dump(config))
    main(["train", "medusa2.yaml", "medusa.yaml", "--device", "cpu", "--eval-max-new", "4"])
    printed = capsys.readouterr()
    assert [row["run"] for row in cells(printed.out)] == ["runs/medusa2"] * 2 + ["runs/medusa"] * 2
    (file,) = (folder / "runs").glob("*-sweep.md")
    assert f"written to runs/{file.name}" in printed.err and cells(file.read_text()) == cells(printed.out)
    reports = json.loads(file.with_suffix(".json").read_text())
    targets = {name: report["record"]["target"] for name, report in reports.items()}
    assert targets["runs/medusa2"] == "runs/medusa2/target" != targets["runs/medusa"]
    note = f"runs/medusa2: target adapted from {targets['runs/medusa']}: lossless towards the adapted target"
    assert note in printed.out and f"Target {targets['runs/medusa']} " in printed.out
