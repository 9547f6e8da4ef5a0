"""Answers from a server in a process of its own: those made in process, whatever happens on the way, and all accounted for."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from draftsmith.inference.load_target import load
from draftsmith.inference.records import Conversation
from draftsmith.inference.sampling import Sampler
from draftsmith.inference.target import Target
from draftsmith.train.answers import Settings
from draftsmith.train.endpoint import Endpoint, regenerate_at
from draftsmith.train.regenerate import regenerate

SERVER = Path(__file__).parents[1] / "openai_server.py"


@pytest.fixture(scope="module")
def target(ending_folder: Path) -> Target:
    return load(ending_folder)


@pytest.fixture(scope="module")
def server(ending_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The address of a server process, and its log."""
    log = tmp_path_factory.mktemp("server") / "log.jsonl"
    command = [sys.executable, str(SERVER), str(ending_folder), str(log)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    yield f"http://127.0.0.1:{int(process.stdout.readline())}", log
    process.communicate("")
    assert process.returncode == 0


def settings(**changes: Any) -> Settings:
    return Settings(**{"sampler": Sampler(), "max_new": 12, "batch_size": 4, **changes})


def chats(count: int = 30) -> list[Conversation]:
    texts = [f"hello {i}, how are you today?" for i in range(count)]
    return [
        Conversation(f"c{i}", tuple({"role": role, "content": content} for role, content in
                     (("system", "be brief"), ("user", text), ("assistant", "old"), ("user", "and?"), ("assistant", "old"))))
        for i, text in enumerate(texts)
    ]  # fmt: skip


def asking(name: str, text: str) -> Conversation:
    return Conversation(name, ({"role": "user", "content": text},))


def endpoint(url: str, **changes: Any) -> Endpoint:
    return Endpoint(**{"url": url, "concurrency": 5, "pause": 0.01, "tries": 12, **changes})


@pytest.mark.parametrize("all_turns", [False, True])
def test_a_server_gives_the_answers_that_are_made_in_process(
    all_turns: bool, server: tuple[str, Path], target: Target, tmp_path: Path
) -> None:
    chosen = settings(all_turns=all_turns)
    ours = regenerate(target, chats(), tmp_path / "ours.jsonl", chosen)
    theirs = regenerate_at(endpoint(server[0] + "/v1/"), chats(), tmp_path / "theirs.jsonl", chosen)
    assert theirs == ours
    assert (tmp_path / "theirs.jsonl").read_bytes() == (tmp_path / "ours.jsonl").read_bytes()
    metas = [json.loads((tmp_path / f"{name}.jsonl.meta.json").read_text()) for name in ("ours", "theirs")]
    accounts = ("inputs", "done", "failed", "skipped", "reasons", "tokens", "truncated", "empty", "ended_early")
    assert [metas[0][name] for name in accounts] == [metas[1][name] for name in accounts]
    assert 0 < metas[1]["truncated"] < 30 and metas[1]["model"] == "toy"
    assert not list(tmp_path.glob("*.partial"))


def test_every_sampling_setting_is_sent_and_every_row_has_a_seed(server: tuple[str, Path], tmp_path: Path) -> None:
    url, log = server
    before = len(log.read_text().splitlines()) if log.exists() else 0
    regenerate_at(endpoint(url), chats(3), tmp_path / "out.jsonl", settings(seed=3))
    trial, *bodies = [json.loads(line) for line in log.read_text().splitlines()[before:]]
    assert trial["max_tokens"] == 1 and len(bodies) == 3
    neutral = {
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }
    for body in bodies:
        assert body.items() >= {**neutral, "temperature": 0.0, "max_tokens": 12, "n": 1, "model": "toy"}.items()
    assert len({body["seed"] for body in bodies}) == 3


def test_faults_pass_by_and_the_key_stays_in_the_request(
    server: tuple[str, Path],
    target: Target,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """40 % of the replies are 429, 500, dropped or later than the timeout; this server also refuses the fields of vLLM."""
    faulty = f"{server[0]}/faulty"
    monkeypatch.setenv("OPENAI_API_KEY", "sesame-123")
    ours = regenerate(target, chats(), tmp_path / "ours.jsonl", settings())
    assert regenerate_at(endpoint(faulty, timeout=0.4), chats(), tmp_path / "theirs.jsonl", settings()) == ours
    errors = capsys.readouterr().err
    assert (
        "refuses top_k, min_p, repetition_penalty" in errors and "30 inputs = 30 done + 0 failed + 0 skipped" in errors
    )
    assert "sesame" not in errors
    assert not any(b"sesame" in path.read_bytes() for path in tmp_path.iterdir())
    monkeypatch.setenv("OPENAI_API_KEY", "wrong-456")
    with pytest.raises(ValueError, match="wants a valid key; set OPENAI_API_KEY") as caught:
        regenerate_at(endpoint(faulty), chats(), tmp_path / "no.jsonl", settings())
    assert "wrong-456" not in str(caught.value)


def test_a_row_that_keeps_failing_is_counted_and_tried_again_by_the_same_command(
    server: tuple[str, Path], tmp_path: Path
) -> None:
    url, log = server
    out = tmp_path / "out.jsonl"
    rows = [*chats(20), asking("bad", "FAIL"), asking("refused", "REFUSE")]
    records = regenerate_at(endpoint(url, tries=2), rows, out, settings())
    assert [record["id"] for record in records] == [f"c{i}" for i in range(20)]
    meta = json.loads(Path(f"{out}.meta.json").read_text())
    assert [meta[name] for name in ("inputs", "done", "failed", "skipped")] == [22, 20, 1, 1]
    assert meta["reasons"] == {"failed: HTTP 500": 1, "skipped: refused by the server": 1}
    rejected = [json.loads(line) for line in Path(f"{out}.unanswered.jsonl").read_text().splitlines()]
    assert [(one["id"], one["kind"]) for one in rejected] == [("bad", "failed"), ("refused", "skipped")]
    assert "not that" in rejected[1]["detail"]

    before = len(log.read_text().splitlines())
    mended = [*rows[:20], asking("bad", "hello"), rows[21]]
    records = regenerate_at(endpoint(url, tries=2), mended, out, settings())
    assert len(records) == 21 and len(log.read_text().splitlines()) == before + 3  # the trial and the two that are open
    assert not list(tmp_path.glob("*.partial"))
    with pytest.raises(ValueError, match="rows have no answer .*failed, HTTP 500"):
        regenerate_at(endpoint(url, tries=2), [asking(str(i), "FAIL") for i in range(10)], out, settings())


KILLED = """
import sys
from draftsmith.inference.conversations import read_conversations
from draftsmith.inference.sampling import Sampler
from draftsmith.train.answers import Settings
from draftsmith.train.endpoint import Endpoint, regenerate_at
settings = Settings(sampler=Sampler(), max_new=12, batch_size=4)
regenerate_at(Endpoint(url=sys.argv[1], concurrency=1), read_conversations(sys.argv[2]), "out.jsonl", settings)
"""


def test_a_run_that_was_killed_asks_only_for_what_is_missing(
    server: tuple[str, Path], target: Target, tmp_path: Path
) -> None:
    url, log = server
    rows = [{"id": c.id, "messages": list(c.messages)} for c in chats(60)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, "-c", KILLED, url, "prompts.jsonl"]
    process = subprocess.Popen(command, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"})
    journal, deadline = tmp_path / "out.jsonl.answers.0.partial", time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if journal.exists() and journal.read_bytes().count(b"\n") >= 4:
            break
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert journal.exists() and not (tmp_path / "out.jsonl").exists()
    done = journal.read_bytes().count(b"\n") - 1
    time.sleep(0.2)  # what the killed one had asked last
    before = len(log.read_text().splitlines())
    theirs = regenerate_at(endpoint(url), chats(60), tmp_path / "out.jsonl", settings())
    assert len(log.read_text().splitlines()) - before == 1 + 60 - done
    assert theirs == regenerate(target, chats(60), tmp_path / "ours.jsonl", settings())


def test_a_wrong_address_or_model_is_said_before_anything_is_asked(server: tuple[str, Path], tmp_path: Path) -> None:
    for wrong, message in (
        (endpoint("http://127.0.0.1:9", tries=2), "http://127.0.0.1:9 does not answer .*give the address of"),
        (endpoint(server[0] + "/other"), "does not answer .HTTP 404"),
        (endpoint(server[0], model="big"), "has no model 'big'; give --model with one of: toy"),
        (endpoint("localhost:8000"), "'localhost:8000' is no address of a server"),
        (endpoint("http://user:secret@host"), "holds a password; set OPENAI_API_KEY instead"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            regenerate_at(wrong, chats(2), tmp_path / "out.jsonl", settings())
        assert "secret" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_reasoning_and_tool_calls_of_a_reply_are_carried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What vLLM and SGLang send with their parsers on; the toy has neither, so these replies are written by hand."""
    from draftsmith.train import endpoint as module

    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    replies = {
        "a": {"content": "\n\nyes", "reasoning_content": "\nwhy\n"},
        "b": {"content": None, "tool_calls": [call]},
        "c": {"content": None, "reasoning": "and on and on"},
        "d": {"content": "<think>\nwhy\n</think>\n\nyes"},
    }

    async def post(client: Any, endpoint: Endpoint, path: str, body: Any) -> Any:
        await asyncio.sleep(0)
        if body is None:
            return {"data": [{"id": "toy"}]}
        text = body["messages"][-1]["content"]
        reason = {"b": "tool_calls", "c": "length"}.get(text, "stop")
        return {"choices": [{"message": replies.get(text, {"content": ""}), "finish_reason": reason}]}

    monkeypatch.setattr(module, "_post", post)
    rows = [asking(name, name) for name in "abcd"]
    records = regenerate_at(endpoint("http://x"), rows, tmp_path / "out.jsonl", settings(max_bad_share=0.25))
    assert [record["messages"][-1] for record in records] == [
        {"role": "assistant", "content": "yes", "reasoning_content": "why"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "assistant", "content": "yes", "reasoning_content": "why"},
    ]
    meta = json.loads((tmp_path / "out.jsonl.meta.json").read_text())
    assert meta["reasons"] == {"failed: reasoning without an end": 1} and meta["empty"] == 0


def test_an_answer_that_the_server_broke_off_is_none_and_calls_are_sent_with_arguments_as_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM and SGLang end with `abort` what they drop at a shutdown, others with `content_filter`; no target ended that turn."""
    from draftsmith.train import endpoint as module

    bodies: list[Any] = []

    async def post(client: Any, endpoint: Endpoint, path: str, body: Any) -> Any:
        await asyncio.sleep(0)
        if body is None:
            return {"data": [{"id": "toy"}]}
        bodies.append(body)
        text = body["messages"][-1]["content"]
        said = {"content": "half \ud83d" if text == "half" else "yes", "reasoning_content": ""}
        return {
            "choices": [{"message": said, "finish_reason": text if text in ("abort", "content_filter") else "stop"}]
        }

    monkeypatch.setattr(module, "_post", post)
    call = {"type": "function", "function": {"name": "f", "arguments": {"city": "é"}}}
    called = (
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "", "tool_calls": [call], "supervised": False},
        {"role": "tool", "content": "sun"},
    )
    rows = [asking(text, text) for text in ("abort", "content_filter", "half", "fine")] + [
        Conversation("called", called)
    ]
    out, chosen = tmp_path / "out.jsonl", settings(max_bad_share=0.6, reasoning="drop")
    records = regenerate_at(endpoint("http://x", concurrency=1), rows, out, chosen)
    assert [record["id"] for record in records] == ["fine", "called"]
    yes = {"role": "assistant", "content": "yes"}  # no reasoning was dropped, so it is learned
    assert [record["messages"][-1] for record in records] == [yes, yes]
    assert json.loads(Path(f"{out}.meta.json").read_text())["reasons"] == {
        "failed: a reply of another form": 1,
        "failed: ended by the server (abort)": 1,
        "failed: ended by the server (content_filter)": 1,
    }
    sent = bodies[-1]["messages"][1]
    assert sent == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": '{"city": "é"}'}}],
    }
    assert records[1]["messages"][1]["tool_calls"] == [call]


def test_vllm_on_this_machine_gives_the_targets_answers(ending_folder: Path, target: Target, tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    port = "18113"
    command = ["vllm", "serve", str(ending_folder), "--port", port, "--dtype", "float32", "--max-model-len", "128"]
    engine = subprocess.Popen([*command, "--served-model-name", "toy", "--enforce-eager"])
    try:
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 600
        while engine.poll() is None and time.monotonic() < deadline:
            try:
                httpx.get(f"{url}/health")
                break
            except httpx.TransportError:
                time.sleep(2)
        theirs = regenerate_at(endpoint(url), chats(), tmp_path / "theirs.jsonl", settings())
    finally:
        engine.terminate()
        engine.wait()
    ours = regenerate(target, chats(), tmp_path / "ours.jsonl", settings())
    assert sum(a == b for a, b in zip(ours, theirs, strict=True)) >= 28  # another kernel's rounding may part a near-tie
