"""What a W&B run shows beside scalars: acceptance by draft position as a line plot, decode traces as a table, each evaluation as an
artifact, the best drafter as a model, and warnings as alerts. The main process alone talks to it."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from draftsmith.train.evaluation import Evaluation
from draftsmith.train.guard import Warned

COLUMNS = ["step", "prompt", "round", "before", "drafted", "accepted", "target", "kind"]
"""Of the table of decode traces."""
SEPARATOR = "|"
"""Between the tokens of a cell."""
BLOCK, HEADER, FULL, LAST = 32768, 7, 1, 4
"""Of W&B's run files: bytes of a block and of a header, and the kinds of a record's part that end it."""


class WandbRun:
    """Wraps the object that `wandb.init` gives."""

    def __init__(self, run: Any) -> None:
        self.run = run

    def last_step(self, folder: Path) -> int:
        """The newest step that W&B has of this run, on its server or in the files of earlier starts in that folder that recorded
        offline; -1 if there is none. A kill takes what W&B had not written yet, so the run's own files may have more."""
        recorded = [-1, self.run.starting_step - 1]
        for file in folder.glob(f"wandb/offline-run-*-{self.run.id}/run-{self.run.id}.wandb"):
            recorded += _steps(file.read_bytes())
        return max(recorded)

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        """Line plot, table and artifact of one evaluation."""
        import wandb

        report = evaluation.report
        panels: dict[str, Any] = {}
        if report["cond_accept"]:
            panels["acceptance/by_position"] = wandb.plot.line_series(
                xs=list(range(1, len(report["cond_accept"]) + 1)),
                ys=[report["cond_accept"], report["uncond_accept"]],
                keys=["accepted given the one before", "accepted"],
                title="acceptance by draft position",
                xname="draft position",
            )
        if evaluation.traces:
            panels["traces"] = wandb.Table(columns=COLUMNS, data=rows(step, evaluation))
        self.run.log(panels, step=step)
        artifact = wandb.Artifact(
            f"evaluation-{self.run.id}", type="evaluation", metadata={"step": step, **evaluation.values}
        )
        with artifact.new_file("acceptance.json", encoding="utf-8") as file:
            json.dump({"step": step, **report}, file, indent=1)
        self.run.log_artifact(artifact, aliases=[f"step-{step}"])

    def warned(self, step: int, warned: Warned) -> None:
        """An alert."""
        self.run.alert(title=warned.title, text=f"step {step}: {warned.text}", level="WARN")

    def finished(self, drafter: Path, step: int, tau: float) -> None:
        """The best drafter, from its folder; it is not copied, and must stay there until it is uploaded."""
        import wandb

        artifact = wandb.Artifact(
            f"drafter-{self.run.id}", type="model", metadata={"step": step, "acceptance/tau": tau}
        )
        artifact.add_dir(str(drafter), policy="immutable")
        self.run.log_artifact(artifact, aliases=["best", f"step-{step}"])


def rows(step: int, evaluation: Evaluation) -> list[list[Any]]:
    """The table's rows: a round each."""
    return [
        [
            step,
            prompt,
            trace["round"],
            trace["before"],
            SEPARATOR.join(trace["drafted"]),
            SEPARATOR.join(trace["accepted"]),
            trace["next"],
            trace["kind"],
        ]
        for prompt, traces in evaluation.traces.items()
        for trace in traces
    ]


def _steps(content: bytes) -> Iterator[int]:
    """The steps of a W&B run file's history."""
    from wandb.proto.wandb_internal_pb2 import Record

    for record in _records(content):
        for item in Record.FromString(record).history.item:
            if "_step" in (item.key, *item.nested_key):
                yield int(json.loads(item.value_json))


def _records(content: bytes) -> Iterator[bytes]:
    """The complete records of a run file: behind a header of seven bytes, LevelDB's log format, whose records may be in parts, each
    with checksum, length and kind in front (github.com/google/leveldb/blob/main/doc/log_format.md)."""
    position, record = HEADER, b""
    while position + HEADER <= len(content):
        left = -position % BLOCK
        if left < HEADER and left:  # no part begins so close to the end of a block
            position += left
            continue
        length, kind = struct.unpack("<HB", content[position + 4 : position + HEADER])
        if position + HEADER + length > len(content):
            return  # cut off by a kill
        record += content[position + HEADER : position + HEADER + length]
        position += HEADER + length
        if kind in (FULL, LAST):
            yield record
            record = b""
