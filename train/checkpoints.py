"""Resumable checkpoints: whole folders that appear under their final name only when they are complete.

accelerate writes and reads the state (safetensors for weights; optimizer state is read with `weights_only`), on every strategy.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from draftsmith.drafters.checkpoint import replace_folder
from draftsmith.train.average import Average


def save(accelerator: Accelerator, folder: Path, progress: dict[str, Any], average: Average | None, keep: int) -> None:
    """Writes `folder`/step-N with the accelerator's state, the average and `progress`, then deletes all but the newest `keep`."""
    final = folder / f"step-{progress['step']:08d}"
    temporary = final.with_name(final.name + ".writing")
    if accelerator.is_main_process:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(temporary), safe_serialization=True)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        if average is not None:
            average.save(temporary)
        (temporary / "progress.json").write_text(json.dumps(progress))
        replace_folder(temporary, final)
        for old in complete(folder)[:-keep]:
            shutil.rmtree(old)
    accelerator.wait_for_everyone()


def load_latest(accelerator: Accelerator, folder: Path, average: Average | None) -> dict[str, Any] | None:
    """Restores the newest complete checkpoint and returns its progress; None if there is none."""
    found = complete(folder)
    if not found:
        return None
    accelerator.load_state(str(found[-1]))
    if average is not None:
        average.load(found[-1])
    progress: dict[str, Any] = json.loads((found[-1] / "progress.json").read_text())
    return progress


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints, oldest first."""
    return sorted(path.parent for path in folder.glob("step-????????/progress.json"))
