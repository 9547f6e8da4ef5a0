"""A small OpenAI-compatible server for tests: a real process that decodes with a toy target, and fails on request.

    python tests/openai_server.py FOLDER LOG

It prints its port, then serves until its stdin closes. Under the path /faulty/v1 a share of the chat requests, by chance, gets 429,
500, a dropped connection or a late reply, the fields that OpenAI does not have are refused, and the key sesame-123 is wanted. A
prompt that contains FAIL always gets 500, one with REFUSE always 400. Every chat request's body is a line of the log.
"""

import json
import os
import random
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from draftsmith.inference.decode import generate
from draftsmith.inference.load_target import load
from draftsmith.inference.rendering import prompt_ids
from draftsmith.inference.sampling import Sampler

MODEL, FAULTY, SHARE = "toy", "/faulty", 0.4


def main() -> None:
    folder, log = sys.argv[1:]
    target, lock, rng = load(folder), threading.Lock(), random.Random(0)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if self.allowed():
                found = self.path.removeprefix(FAULTY) == "/v1/models"
                models = {"object": "list", "data": [{"id": MODEL, "object": "model", "root": "somewhere"}]}
                self.reply(200 if found else 404, models if found else {"error": "no such path"})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            faulty = self.path.startswith(FAULTY)
            if not self.allowed():
                return
            with lock:
                fault = rng.choice(["429", "500", "drop", "late"]) if faulty and rng.random() < SHARE else ""
                with Path(log).open("a") as file:
                    file.write(json.dumps(body) + "\n")
            text = json.dumps(body["messages"])
            if fault == "drop":
                self.close_connection = True
            elif fault in ("429", "500"):
                self.reply(int(fault), {"error": "by chance"}, {"retry-after": "0.01"} if fault == "429" else {})
            elif "FAIL" in text:
                self.reply(500, {"error": "always"})
            elif "REFUSE" in text or (faulty and {"top_k", "min_p", "repetition_penalty"} & {*body}):
                self.reply(400, {"error": "not that"})
            else:
                if fault == "late":
                    time.sleep(0.5)
                self.reply(200, self.answer(body))

        def answer(self, body: dict[str, Any]) -> dict[str, Any]:
            assert target.tokenizer is not None and body["temperature"] == 0, "seeds are not this server's"
            ids = prompt_ids(target.tokenizer, body["messages"])
            with lock:
                (output,) = generate(target, [ids], max_new=body["max_tokens"], sampler=Sampler())
            text = target.tokenizer.decode(output.ids[:-1] if output.finished else output.ids, skip_special_tokens=True)
            choice = {
                "message": {"role": "assistant", "content": text},
                "finish_reason": "stop" if output.finished else "length",
            }
            return {"choices": [choice], "usage": {"completion_tokens": len(output.ids)}}

        def allowed(self) -> bool:
            right = not self.path.startswith(FAULTY) or self.headers["authorization"] == "Bearer sesame-123"
            if not right:
                self.reply(401, {"error": f"the key {self.headers['authorization']} is wrong"})
            return right

        def reply(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
            content = json.dumps(body).encode()
            self.send_response(status)
            for name, value in {"content-length": str(len(content)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *arguments: Any) -> None:
            """Nothing on stderr."""

        def handle(self) -> None:
            try:
                super().handle()
            except ConnectionError:
                pass  # a client that was killed

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_address[1], flush=True)
    sys.stdin.read()
    os._exit(0)  # without waiting for requests under way


if __name__ == "__main__":
    main()
