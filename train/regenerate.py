"""Training conversations from the frozen target itself: it answers given prompts, or invents the prompts too.

A drafter learns the target's own law, so its data are the target's own answers (every method's first lever). With
`self_prompt` a chat target also writes the user turns, by sampling behind its template's user header (MAGPIE, Xu et al. 2024,
arXiv 2406.08464), so no data set is needed.

Long work resumes: finished batches are appended to FILE.partial and the batches are a pure function of the settings, so a
run that was killed and started again gives the same file as one that was not.
"""

import dataclasses
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from draftsmith.drafters.checkpoint import write_text
from draftsmith.inference.conversations import Conversation, prompt_ids, prompt_messages, read_conversations
from draftsmith.inference.decode import generate
from draftsmith.inference.output import Output
from draftsmith.inference.sampling import Sampler
from draftsmith.inference.target import Target

Record = dict[str, Any]
MARK = "\x02user turn\x02"
MIN_SELF_PROMPT_TOKENS = 5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How answers are made.

    Attributes:
        sampler: of the answers.
        max_new: token budget of an answer; one that reaches it is marked `truncated`.
        batch_size: prompts decoded together.
        samples: answers per prompt.
        seed: answers are a function of it, of the prompt's id and of the sample's number.
        self_prompt: number of user turns that the target invents (at temperature 1), 0 for none.
    """

    sampler: Sampler
    max_new: int = 256
    batch_size: int = 32
    samples: int = 1
    seed: int = 0
    self_prompt: int = 0


def regenerate(target: Target, prompts: str | Path | None, out: str | Path, settings: Settings) -> list[Record]:
    """Writes the conversations to `out` (JSONL, with provenance in `out`.meta.json) and returns them.

    Args:
        target: a chat model with its tokenizer.
        prompts: JSONL of either shape; a final assistant turn is dropped and answered anew. None with `self_prompt`.
        out: the file to write; it is complete or absent.
        settings: see there.

    Raises:
        ValueError: no prompts, broken ones (with file and line), or a partial file that other settings began.
    """
    out = Path(out)
    if not out.parent.is_dir():
        raise ValueError(f"the folder {out.parent} of the output file does not exist; create it first")
    if prompts is None and settings.self_prompt < 1:
        raise ValueError("no prompts: give a file of prompts, or --self-prompt N to let the target invent N of them")
    conversations = read_conversations(prompts) if prompts is not None else []
    if settings.self_prompt:
        conversations = conversations + invent_prompts(target, out, settings)
    jobs = [
        (f"{conversation.id}/{sample}" if settings.samples > 1 else conversation.id, conversation)
        for conversation in conversations
        for sample in range(settings.samples)
    ]
    tokenizer = target.tokenizer
    messages = [prompt_messages(conversation.messages) for _, conversation in jobs]
    ids = [prompt_ids(tokenizer, turns) for turns in messages]

    def finish(job: int, output: Output) -> Record:
        name, conversation = jobs[job]
        answer = _text(target, output)
        turns = [*messages[job], {"role": "assistant", "content": answer}]
        record: Record = {"id": name, "category": conversation.category, "messages": turns}
        return record if output.finished else {**record, "truncated": True}

    names = [name for name, _ in jobs]
    records = _run(target, names, ids, finish, out, "answers", settings.sampler, settings)
    meta = provenance(target, settings) | {"prompts": str(prompts) if prompts else None, "records": len(records)}
    write_text(Path(f"{out}.meta.json"), json.dumps(meta, indent=2) + "\n")
    write_text(out, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
    for stage in ("answers", "prompts"):
        _partial(out, stage).unlink(missing_ok=True)
    return records


def invent_prompts(target: Target, out: Path, settings: Settings) -> list[Conversation]:
    """User turns sampled behind the template's user header; unfinished, very short and repeated ones are dropped."""
    tokenizer = target.tokenizer
    if tokenizer is None or not tokenizer.chat_template:
        raise ValueError(f"{target.name} has no chat template, so it cannot invent user turns; give a file of prompts")
    header = tokenizer.apply_chat_template([{"role": "user", "content": MARK}], tokenize=False).split(MARK)[0]
    ids = tokenizer(header, add_special_tokens=False)["input_ids"]
    names = [f"self-{index:05d}" for index in range(settings.self_prompt)]

    def finish(job: int, output: Output) -> Record:
        usable = output.finished and len(output.ids) > MIN_SELF_PROMPT_TOKENS
        return {"id": names[job], "text": _text(target, output) if usable else ""}

    sampler = Sampler(temperature=1.0)
    records = _run(target, names, [ids] * len(names), finish, out, "prompts", sampler, settings)
    first: dict[str, str] = {}
    for record in records:
        if record["text"]:
            first.setdefault(record["text"], record["id"])
    return [Conversation(name, ({"role": "user", "content": text},), "self-prompt") for text, name in first.items()]


def provenance(target: Target, settings: Settings) -> Record:
    """What made the data: target, settings and versions."""
    return {
        "target": target.name,
        "fingerprint": target.shape.fingerprint,
        "dtype": str(target.dtype).removeprefix("torch."),
        "settings": dataclasses.asdict(settings),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }


def _run(
    target: Target,
    names: Sequence[str],
    prompts: Sequence[list[int]],
    finish: Callable[[int, Output], Record],
    out: Path,
    stage: str,
    sampler: Sampler,
    settings: Settings,
) -> list[Record]:
    """Decodes all prompts in batches of similar length; finished batches survive a kill."""
    order = sorted(range(len(prompts)), key=lambda job: (len(prompts[job]), job))
    batches = [order[i : i + settings.batch_size] for i in range(0, len(order), settings.batch_size)]
    identity = _identity(target, settings, names, prompts)
    partial = _partial(out, stage)
    done = _read_partial(partial, identity)
    progress = _Progress(len(prompts), sum(len(batch) for i, batch in enumerate(batches) if i in done), stage)
    if not done:
        write_text(partial, json.dumps({"identity": identity}) + "\n")
    with partial.open("a", encoding="utf-8") as file:
        for index, batch in enumerate(batches):
            if index in done:
                continue
            outputs = generate(
                target,
                [prompts[job] for job in batch],
                max_new=settings.max_new,
                sampler=sampler,
                seeds=[_seed(settings.seed, stage, names[job]) for job in batch],
            )
            done[index] = [finish(job, output) for job, output in zip(batch, outputs, strict=True)]
            file.write(json.dumps({"batch": index, "records": done[index]}, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
            progress.add(len(batch), sum(len(output.ids) for output in outputs))
    progress.close()
    by_job = {
        job: record for index, batch in enumerate(batches) for job, record in zip(batch, done[index], strict=True)
    }
    return [by_job[job] for job in range(len(prompts))]


def _read_partial(partial: Path, identity: str) -> dict[int, list[Record]]:
    """The finished batches of an earlier run; a last line cut off by a kill is dropped."""
    if not partial.exists():
        return {}
    content = partial.read_bytes()  # as bytes: the cut may be inside a character, and answers may hold U+2028
    complete = content[: content.rfind(b"\n") + 1]
    if complete != content:
        write_text(partial, complete.decode())
    lines = complete.splitlines()
    if not lines:
        return {}
    if json.loads(lines[0]).get("identity") != identity:
        raise ValueError(
            f"{partial} was begun with other prompts, settings or another target; "
            "finish that run with its own command, or delete the file to start anew"
        )
    entries = [json.loads(line) for line in lines[1:]]
    return {entry["batch"]: entry["records"] for entry in entries}


def _identity(target: Target, settings: Settings, names: Sequence[str], prompts: Sequence[list[int]]) -> str:
    digest = hashlib.sha256(json.dumps(provenance(target, settings), sort_keys=True).encode())
    digest.update(json.dumps([list(names), list(prompts)]).encode())
    return digest.hexdigest()[:16]


def _seed(seed: int, stage: str, name: str) -> int:
    """A row's own seed, so that its answer does not depend on which others are asked."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{stage}/{name}".encode()).digest()[:7], "big")


def _text(target: Target, output: Output) -> str:
    assert target.tokenizer is not None
    ids = output.ids[:-1] if output.finished else output.ids
    return str(target.tokenizer.decode(ids, skip_special_tokens=True))


def _partial(out: Path, stage: str) -> Path:
    return out.with_name(f"{out.name}.{stage}.partial")


class _Progress:
    """A line on stderr after every batch: how far, how fast, how much longer."""

    def __init__(self, total: int, done: int, what: str) -> None:
        self.total, self.done, self.what = total, done, what
        self.fresh = self.tokens = 0
        self.start = time.perf_counter()
        if done:
            print(f"{what}: {done} of {total} are there from an earlier run", file=sys.stderr)

    def add(self, prompts: int, tokens: int) -> None:
        self.done, self.fresh, self.tokens = self.done + prompts, self.fresh + prompts, self.tokens + tokens
        elapsed = time.perf_counter() - self.start
        left = (self.total - self.done) * elapsed / self.fresh
        print(
            f"{self.what}: {self.done} of {self.total}, {self.tokens:,} tokens, {self.tokens / elapsed:.0f} tokens/s, "
            f"{left / 60:.1f} min left",
            file=sys.stderr,
        )

    def close(self) -> None:
        sys.stderr.flush()
