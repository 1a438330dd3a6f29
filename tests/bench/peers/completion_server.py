"""An HTTP server that streams tokens as vLLM and llama.cpp do, and remembers what it was asked."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

TRANSFER = {"remote_engine_id": "p", "remote_block_ids": [3, 4]}


class Server(ThreadingHTTPServer):
    """status: of every reply. num_said: tokens of a stream before it ends. event: said in place of the first token.

    pause_s: before each token.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.status, self.num_said, self.pause_s = 200, 100, 0.0
        self.event: dict[str, Any] | None = None
        self.posted: list[dict[str, Any]] = []


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.posted.append(body)
        self.send_response(self.server.status)
        self.end_headers()
        if not body.get("stream"):
            self.wfile.write(json.dumps({"kv_transfer_params": TRANSFER}).encode())
            return
        if self.server.event is not None:
            self._say(self.server.event)
            return
        num_tokens = body["max_tokens"] if "max_tokens" in body else body["n_predict"]
        for number in range(min(self.server.num_said, num_tokens)):
            time.sleep(self.server.pause_s)
            self.wfile.write(b":\n\n")  # as llama.cpp does while it has nothing to say
            self._say({"choices": [{"token_ids": [number]}]} if "max_tokens" in body else {"tokens": [number]})
        self.wfile.write(b"data: [DONE]\n\n")

    def _say(self, event: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def answering() -> Iterator[Server]:
    """A server on a port of its own, for as long as the block."""
    server = Server()
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
