"""The doctor: nothing wrong gives all pass, what breaks a check stops no other, and the command says it in every form.

That each check finds what it is for is in `test_faults`.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from draftsmith.inference.output import Output, Round
from draftsmith.scripts.main import main
from draftsmith.train import checks_costs, checks_data, checks_drafter
from draftsmith.train.checks import Finding, Subject, judge
from draftsmith.train.doctor import CHECKS, Check, examine, failed
from draftsmith.train.features import FeatureStore
from draftsmith.train.run import load_training_sequences


@pytest.fixture(scope="module")
def report(healthy: SimpleNamespace) -> list[Check]:
    return examine(healthy.subject())


def test_a_healthy_run_passes_every_check(report: list[Check]) -> None:
    assert [(check.name, check.verdict, check.found) for check in report if check.verdict != "pass"] == []
    assert len(report) == len(CHECKS) and not failed(report)
    assert all(check.found and not check.mend for check in report)


# ---- the runner and the command -------------------------------------------------------------------------------------


def test_a_check_that_breaks_is_a_fail_and_the_others_go_on(healthy: SimpleNamespace) -> None:
    def breaks(subject: Subject) -> Finding:
        raise ZeroDivisionError("division by\nzero")

    def fine(subject: Subject) -> Finding:
        return judge("well", "unused")

    first, second = examine(healthy.subject(), (breaks, fine))
    assert (first.name, first.verdict, first.found) == ("breaks", "fail", "ZeroDivisionError: division by zero")
    assert (second.verdict, second.mend) == ("pass", "") and failed([first, second]) and not failed([second])


def test_the_command_prints_a_table_writes_json_and_its_status_says_it_all(
    healthy: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    quick = (checks_data.mask_coverage, checks_data.supervised_text, checks_data.duplicates)
    monkeypatch.setattr("draftsmith.train.doctor.examine.__defaults__", (quick,))
    main(["doctor", str(healthy.config), "--json", str(tmp_path / "d.json"), "--device", "cpu"])
    printed = capsys.readouterr().out
    assert "3 pass, 0 warn, 0 fail" in printed and "[[the " in printed and "jumps over<|im_end|>]]" in printed
    record = json.loads((tmp_path / "d.json").read_text())
    assert [check["name"] for check in record["checks"]] == ["mask coverage", "supervised text", "duplicates"]
    assert record["failed"] is False and record["checks"][0]["figures"]["supervised"] > 100

    with pytest.raises(SystemExit) as stopped:
        main(["doctor", str(healthy.config), f"eval.prompts={healthy.folder / 'train.jsonl'}", "--device", "cpu"])
    assert stopped.value.code == 1 and "-> hold out other prompts" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        main(["doctor", str(healthy.config), f"target.path={tmp_path / 'nothing'}", "--device", "cpu"])
    assert stopped.value.code == 2


def test_acceptance_is_counted_as_far_as_decoding_follows_the_memorised_answer() -> None:
    """The first token is the prefill's. Rounds that commit 2, 3 and 2 tokens; the text leaves the memorised one at its seventh."""
    rounds = [Round(2, 1, 2, 2), Round(2, 2, 3, 2), Round(2, 1, 2, 2)]
    memorised, output = Output(ids=[5, 6, 7, 8, 9, 1, 2, 3]), Output(ids=[5, 6, 7, 8, 9, 1, 4, 4], rounds=rounds)
    assert checks_drafter.accepted_while_following([output], [memorised]) == (4, 3, 5)
    assert checks_drafter.accepted_while_following([output], [Output(ids=output.ids)]) == (6, 4, 7)
    assert checks_drafter.accepted_while_following([output], [Output(ids=[9])]) == (0, 0, 0)


# ---- what it must not say -------------------------------------------------------------------------------------------


def test_a_store_of_several_sources_that_share_rows_is_known_again(healthy: SimpleNamespace, tmp_path: Path) -> None:
    for name, records in (("a", healthy.records[:14]), ("b", healthy.records[10:])):
        (tmp_path / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    sources = f'data.train=["{tmp_path / "a"}", "{tmp_path / "b"}?weight=2"]'
    subject = healthy.subject(sources, f"features.folder={tmp_path / 'store'}", "features.store=hybrid")
    sequences = load_training_sequences(subject.config, subject.target)
    FeatureStore(subject.target, sequences, subject.layers, subject.config.features).fill()
    assert checks_costs.feature_folder(subject).verdict == "pass"
    other = healthy.subject(f"features.folder={tmp_path / 'store'}", "features.store=hybrid")
    assert "of other sequences" in checks_costs.feature_folder(other).found


def test_the_estimates_are_of_the_rows_that_training_takes(healthy: SimpleNamespace, tmp_path: Path) -> None:
    def need(*overrides: str, **options: Any) -> int:
        subject = healthy.subject(f"features.folder={tmp_path}", *overrides, **options)
        return int(checks_costs.disk(subject).figures["need"])

    subject = healthy.subject()
    sequences = load_training_sequences(subject.config, subject.target)
    per_token = FeatureStore(subject.target, sequences, subject.layers, subject.config.features).bytes_per_token()
    assert need() == per_token * sum(len(sequence.ids) for sequence in sequences)
    answers = sum(sequence.num_answer_tokens for sequence in sequences)
    assert need(f"data.max_answer_tokens={answers // 4}") == pytest.approx(need() / 4, rel=0.2)
    (tmp_path / "layer7-target-00000.bin").write_bytes(b"0" * 100_000)  # of another kind
    assert need() == per_token * sum(len(sequence.ids) for sequence in sequences)
    (tmp_path / "last-target-00000.bin").write_bytes(b"0" * 1000)
    assert need() == per_token * sum(len(sequence.ids) for sequence in sequences) - 1000


def test_different_texts_are_no_repeated_prompts(sick: Any) -> None:
    subject = sick([{"text": f"the fox number {i} jumps over the lazy dog"} for i in range(24)])
    assert checks_data.duplicates(subject).figures["repeated"] == 0
