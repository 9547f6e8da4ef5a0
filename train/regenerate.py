"""Training conversations from the frozen target itself: it answers given prompts, in this process or in several.

A drafter learns the target's own law, so its data are the target's own answers (every method's first lever). Long work resumes
(`journal`), and a run that was killed and started again, or shared by several processes, gives the same bytes as one that was not
(`chunks`). A row that cannot be answered is counted, not fatal (`answers`). A target behind a server is asked by `endpoint`.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

from draftsmith.inference.decode import generate
from draftsmith.inference.output import Output
from draftsmith.inference.records import Conversation
from draftsmith.inference.rendering import prompt_ids
from draftsmith.inference.target import Target
from draftsmith.train import answers
from draftsmith.train.answers import Dialogue, Record, Row, Settings, check_share
from draftsmith.train.chunks import work_off
from draftsmith.train.journal import Journal
from draftsmith.train.processes import Processes
from draftsmith.train.reasoning import Spoken, spoken

ALONE = Processes()


def regenerate(
    target: Target,
    conversations: Sequence[Conversation],
    out: str | Path,
    settings: Settings,
    *,
    sources: Sequence[str] = (),
    processes: Processes = ALONE,
) -> list[Record]:
    """Writes the conversations to `out` (JSONL, with provenance and accounts in `out`.meta.json) and returns them.

    Args:
        target: a chat model with its tokenizer.
        conversations: prompts; a final assistant turn is dropped and answered anew.
        out: the file to write; it is complete or absent. What has no answer goes to `out`.unanswered.jsonl.
        settings: see there.
        sources: where the prompts come from, for the meta file.
        processes: this one among those that share the work. The main one writes and returns the records, others return none.

    Raises:
        ValueError: no prompts, too many without an answer, or a journal that other settings began.
    """
    out = Path(out)
    rows, bad = answers.plan(conversations, out, settings)
    inputs, lengths = len(rows) + len(bad), []
    asked = []
    for row in rows:
        ids = _ask(target, dialogue := Dialogue(row), settings)
        if ids is None:
            bad.append(dialogue.rejected())
        else:
            asked.append(row)
            lengths.append(len(ids))
    check_share(bad, inputs, settings)
    seen = list(bad)

    def work(chunk: list[Row]) -> tuple[list[Record], int]:
        dialogues = [Dialogue(row) for row in chunk]
        _answer(target, dialogues, settings)
        seen.extend(dialogue.rejected() for dialogue in dialogues if dialogue.failure)
        check_share(seen, inputs, settings)
        return [dialogue.result() for dialogue in dialogues], sum(dialogue.tokens for dialogue in dialogues)

    made = provenance(target) | {"settings": settings.identity()}
    with Journal(out, "answers", made, processes.index) as journal:
        done = work_off(journal, asked, lengths, settings.batch_size, work, processes, "answers")
    processes.wait()  # all have read
    if not processes.main:
        return []
    records = answers.conclude(out, inputs, rows, done, bad, made | {"sources": list(sources)}, settings)
    answers.clear(out)
    return records


def provenance(target: Target) -> Record:
    """What made the data, settings aside."""
    return {
        "target": target.name,
        "fingerprint": target.shape.fingerprint,
        "dtype": str(target.dtype).removeprefix("torch."),
        **({"form": str(target.form)} if str(target.form) else {}),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }


def _answer(target: Target, dialogues: Sequence[Dialogue], settings: Settings) -> None:
    """Answers a chunk: the first turn of all, the second of those that have one, …"""
    while waiting := [dialogue for dialogue in dialogues if not dialogue.over]:
        prompts = [(dialogue, ids) for dialogue in waiting if (ids := _ask(target, dialogue, settings)) is not None]
        if not prompts:
            break
        outputs = generate(
            target,
            [ids for _, ids in prompts],
            max_new=settings.max_new,
            sampler=[dialogue.row.sampler for dialogue, _ in prompts],
            seeds=[answers.row_seed(settings, "answers", dialogue.row.id) for dialogue, _ in prompts],
            max_batch=settings.batch_size,
        )
        for (dialogue, ids), output in zip(prompts, outputs, strict=True):
            said = _said(target, ids, output)
            dialogue.take(said, settings, tokens=len(output.ids), finished=output.finished)


def _ask(target: Target, dialogue: Dialogue, settings: Settings) -> list[int] | None:
    """The ids of a dialogue's next prompt; None if there can be none, and the dialogue has stopped."""
    assert target.tokenizer is not None
    try:
        ids = prompt_ids(target.tokenizer, dialogue.messages, dialogue.row.conversation.tools)
    except ValueError as error:
        dialogue.stop("skipped", "refused by the template", str(error))
        return None
    if len(ids) + settings.max_new > target.shape.max_positions:
        detail = f"{len(ids)} tokens and {settings.max_new} new ones exceed the target's {target.shape.max_positions} positions"
        dialogue.stop("skipped", "too long", detail)
        return None
    return ids


def _said(target: Target, prompt: Sequence[int], output: Output) -> Spoken:
    assert target.tokenizer is not None
    return spoken(target.tokenizer, prompt, output.ids[:-1] if output.finished else output.ids)
