"""The target behind a server: answers through an OpenAI-compatible `/v1/chat/completions` (vLLM, SGLang), many at a time.

A server has sampling defaults of its own (vLLM takes them from the model's generation config), so every setting is sent, those that
are off too. What may pass by is tried again with growing pauses; a row that keeps failing is counted, and the same command tries it
again. No weights are loaded here. The key is read from OPENAI_API_KEY and goes nowhere but into the request.
"""

import asyncio
import dataclasses
import json
import os
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from draftsmith.inference.records import Conversation
from draftsmith.inference.turns import whole
from draftsmith.train import answers
from draftsmith.train.answers import Dialogue, Record, Rejected, Settings, check_share
from draftsmith.train.journal import Journal, Key
from draftsmith.train.progress import Progress
from draftsmith.train.reasoning import Spoken, split

EXTRAS = ("top_k", "min_p", "repetition_penalty")
"""Fields of vLLM and SGLang that OpenAI's own interface does not have."""
PASSING = (408, 409, 425, 429, 500, 502, 503, 504)
"""What may be otherwise at another try."""
REFUSING = (400, 413, 422)
"""What is wrong with this row: its length, a template that does not take it, tools that the server was not started for."""
ENDED = ("stop", "tool_calls", "function_call")
"""Finish reasons of an answer that the target ended; `length` is the budget, anything else (abort, content_filter) no answer."""
LONGEST_PAUSE = 60.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where the target is served.

    Attributes:
        url: of the server, with or without /v1.
        model: its name there; None if it serves one.
        concurrency: requests under way together.
        timeout: seconds for one answer.
        tries: of one request before its row has failed.
        pause: seconds before the second try; each pause is up to twice the one before.
    """

    url: str
    model: str | None = None
    concurrency: int = 16
    timeout: float = 600.0
    tries: int = 6
    pause: float = 1.0

    @property
    def base(self) -> str:
        return self.url.rstrip("/").removesuffix("/v1") + "/v1/"


def regenerate_at(
    endpoint: Endpoint,
    conversations: Sequence[Conversation],
    out: str | Path,
    settings: Settings,
    *,
    sources: Sequence[str] = (),
) -> list[Record]:
    """`regenerate` with the target behind a server; the arguments and the file are the same.

    The journal stays if rows failed that another try may answer.

    Raises:
        ValueError: no such server or model, no prompts, too many without an answer, or a journal that other settings began.
    """
    out = Path(out)
    _check_url(endpoint.url)
    rows, bad = answers.plan(conversations, out, settings)
    inputs = len(rows) + len(bad)
    check_share(bad, inputs, settings)

    async def run() -> tuple[Record, dict[Key, Record]]:
        async with _client(endpoint) as client:
            made = await _connect(client, endpoint, settings)
            with Journal(out, "answers", made) as journal:
                done = journal.read()
                dialogues = [Dialogue(row) for row in rows if row.key not in done]
                progress = Progress("answers", len(rows), len(rows) - len(dialogues), seconds=5.0)
                waiting = iter(dialogues)
                work = _Work(_Ask(client, endpoint, settings, made), journal, progress, bad, inputs)
                try:
                    async with asyncio.TaskGroup() as group:
                        for _ in range(min(endpoint.concurrency, len(dialogues))):
                            group.create_task(work(waiting))
                except ExceptionGroup as errors:
                    raise errors.exceptions[0] from None
                return made, journal.read()

    made, done = asyncio.run(run())
    about = made | {"endpoint": endpoint.url, "sources": list(sources)}
    records = answers.conclude(out, inputs, rows, done, bad, about, settings)
    if all(one.kind == "skipped" for one in bad):
        answers.clear(out)
    else:
        print("the same command tries the failed rows again", file=sys.stderr)
    return records


class Gone(Exception):
    """A request that has failed for good. `kind`, `reason` and `detail` as in `Rejected`."""

    def __init__(self, kind: answers.Kind, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.kind, self.reason, self.detail = kind, reason, detail


@dataclasses.dataclass(frozen=True, slots=True)
class _Work:
    """Answers one row after the other, until none waits; several of these run together.

    Attributes:
        ask: asks for an answer.
        journal: gets every row that has come to an end by itself; what the server refused or failed at is asked again next time.
        progress: the line that says how far.
        bad: rows without an answer; added to.
        inputs: rows in all.
    """

    ask: "_Ask"
    journal: Journal
    progress: Progress
    bad: list[Rejected]
    inputs: int

    async def __call__(self, waiting: Iterator[Dialogue]) -> None:
        for dialogue in waiting:
            gone = None
            while not dialogue.over:
                try:
                    await self.ask(dialogue)
                except Gone as error:
                    gone = error
                    dialogue.stop(gone.kind, gone.reason, gone.detail)
            if gone is not None and (gone.kind == "failed" or not dialogue.answers):
                self.bad.append(Rejected(dialogue.row.id, gone.kind, gone.reason, gone.detail))
                check_share(self.bad, self.inputs, self.ask.settings)
            else:
                self.journal.write([dialogue.result()])
            self.progress.add(1, dialogue.tokens)


@dataclasses.dataclass(frozen=True, slots=True)
class _Ask:
    """Asks for the next answer of a dialogue."""

    client: httpx.AsyncClient
    endpoint: Endpoint
    settings: Settings
    made: Record

    async def __call__(self, dialogue: Dialogue) -> None:
        row = dialogue.row
        seed = answers.row_seed(self.settings, "answers", f"{row.id}/turn {dialogue.turn}" if dialogue.turn else row.id)
        body = self.made["request"] | {
            "model": self.made["model"],
            "messages": [_sent(message) for message in dialogue.messages],
            "max_tokens": self.settings.max_new,
            "temperature": row.sampler.temperature,
            "seed": seed % 2**31,
        }
        if row.conversation.tools:
            body["tools"] = list(row.conversation.tools)
        reply = await _post(self.client, self.endpoint, "chat/completions", body)
        try:
            choice = reply["choices"][0]
            message, reason = choice["message"], choice["finish_reason"]
            text = whole(message.get("content") or "", "reply")
            thought = message.get("reasoning_content") or message.get("reasoning")
            said = (
                split(text)
                if thought is None
                else Spoken(text.lstrip("\n"), whole(thought, "reply").strip("\n") or None)
            )
            calls = message.get("tool_calls") or ()
            tokens = int((reply.get("usage") or {}).get("completion_tokens") or 0)
        except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
            raise Gone("failed", "a reply of another form", f"{error!r} in {ascii(reply)[:200]}") from error
        if reason not in (*ENDED, "length"):
            raise Gone(
                "failed",
                f"ended by the server ({reason})",
                "the answer is neither the target's to its end nor cut by the budget",
            )
        if thought is not None and reason == "length" and not text:
            said = Spoken("", thought, ended=False)
        dialogue.take(said, self.settings, tokens=tokens, finished=reason != "length", tool_calls=calls)


async def _connect(client: httpx.AsyncClient, endpoint: Endpoint, settings: Settings) -> Record:
    """What makes the answers: the model, and what every request says of sampling. Tries both before any row is asked."""
    try:
        # A wrong address should be said at once, not after all the tries that a row has.
        listed = await _post(client, dataclasses.replace(endpoint, tries=2), "models", None)
        found = {str(model["id"]): model for model in listed["data"]}
    except Gone as gone:
        raise ValueError(
            f"{endpoint.url} does not answer ({gone}); give the address of an OpenAI-compatible server"
        ) from gone
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"{endpoint.base}models answers in another form; give the address of an OpenAI-compatible server"
        ) from error
    model = endpoint.model or (next(iter(found)) if len(found) == 1 else None)
    if model not in found:
        what = f"has no model {model!r}" if model else "serves several models, or none"
        raise ValueError(f"{endpoint.url} {what}; give --model with one of: {', '.join(sorted(found))}")
    request = _request(settings)
    trial = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "temperature": 0.0}
    try:
        try:
            await _post(client, endpoint, "chat/completions", trial | request)
        except Gone as gone:
            if gone.kind != "skipped":
                raise
            request = {name: value for name, value in request.items() if name not in EXTRAS}
            await _post(client, endpoint, "chat/completions", trial | request)
            if settings.sampler.top_k is not None or settings.sampler.min_p:
                raise ValueError(
                    f"{endpoint.url} refuses top_k and min_p ({gone.detail}); leave them out, or use another server"
                ) from gone
            print(
                f"{endpoint.url} refuses {', '.join(EXTRAS)}: defaults that it may have for them cannot be turned off",
                file=sys.stderr,
            )
    except Gone as gone:
        raise ValueError(f"{endpoint.url} does not answer a trial request ({gone}); see the server's log") from gone
    return {
        "target": model,
        "model": model,
        "root": found[model].get("root"),  # vLLM: where the weights come from
        "request": request,
        "settings": {name: value for name, value in settings.identity().items() if name != "batch_size"},
    }


def _request(settings: Settings) -> Record:
    """The sampling settings of every row, those that are off too."""
    sampler = settings.sampler
    return {
        "top_p": sampler.top_p,
        "top_k": -1 if sampler.top_k is None else sampler.top_k,
        "min_p": sampler.min_p or 0.0,
        "repetition_penalty": sampler.repetition_penalty,
        "presence_penalty": sampler.presence_penalty,
        "frequency_penalty": sampler.frequency_penalty,
        "n": 1,
        "stream": False,
    }


async def _post(client: httpx.AsyncClient, endpoint: Endpoint, path: str, body: Record | None) -> Any:
    """The JSON of a reply, after as many tries as it takes. Without a body it is a GET. Raises `Gone`."""
    for attempt in range(endpoint.tries):
        pause = min(endpoint.pause * 2**attempt, LONGEST_PAUSE) * random.uniform(0.5, 1.0)
        try:
            reply = await (client.get(path) if body is None else client.post(path, json=body))
            if reply.is_success:
                return reply.json()
        except httpx.RequestError as error:
            gone = Gone("failed", type(error).__name__, str(error) or f"no reply in {endpoint.timeout:g} s")
        except ValueError as error:
            raise Gone("failed", "a reply that is not JSON", str(error)) from error
        else:
            gone = _refused(reply)
            if reply.status_code not in PASSING:
                raise gone
            pause = max(pause, _retry_after(reply))
        if attempt + 1 < endpoint.tries:
            await asyncio.sleep(pause)
    raise gone


def _refused(reply: httpx.Response) -> Gone:
    status, reason = reply.status_code, f"HTTP {reply.status_code}"
    if status in (401, 403):  # without the text, which may repeat the key
        return Gone("failed", reason, "the server wants a valid key; set OPENAI_API_KEY")
    detail = " ".join(reply.text.split())[:300]
    if status in REFUSING:
        long = any(words in detail for words in ("context length", "too long", "maximum context"))
        return Gone("skipped", "too long" if long else "refused by the server", detail)
    return Gone("failed", reason, detail)


def _retry_after(reply: httpx.Response) -> float:
    """Seconds that the server asks to wait; 0 if it does not, or gives a date."""
    text = reply.headers.get("retry-after", "")
    return float(text) if text.replace(".", "", 1).isdigit() else 0.0


def _sent(message: dict[str, Any]) -> dict[str, Any]:
    """A turn as it goes to the server: without our own marks, the arguments of calls as JSON text, as the interface has them."""
    sent = {name: value for name, value in message.items() if name != "supervised"}
    if "tool_calls" in sent:
        sent["tool_calls"] = [call | {"function": _as_text(call["function"])} for call in sent["tool_calls"]]
    return sent


def _as_text(function: dict[str, Any]) -> dict[str, Any]:
    arguments = function["arguments"]
    return (
        function if isinstance(arguments, str) else function | {"arguments": json.dumps(arguments, ensure_ascii=False)}
    )


def _client(endpoint: Endpoint) -> httpx.AsyncClient:
    key = os.environ.get("OPENAI_API_KEY")
    return httpx.AsyncClient(
        base_url=endpoint.base,
        headers={"Authorization": f"Bearer {key}"} if key else {},
        timeout=httpx.Timeout(endpoint.timeout, connect=min(10.0, endpoint.timeout)),
        limits=httpx.Limits(max_connections=endpoint.concurrency),
    )


def _check_url(text: str) -> None:
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL as error:
        raise ValueError(f"{text!r} is no address ({error}); give http://HOST:PORT") from error
    if url.userinfo:
        raise ValueError("the address of the server holds a password; set OPENAI_API_KEY instead")
    if url.scheme not in ("http", "https") or not url.host:
        raise ValueError(f"{text!r} is no address of a server; give http://HOST:PORT")
