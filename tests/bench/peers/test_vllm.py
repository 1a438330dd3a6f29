"""The client of vLLM's two steps, against a server that speaks as vLLM does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from pdserve.bench.listening import Call
from pdserve.bench.peers.vllm import VllmFailed, VllmNode, VllmPair
from pdserve.config.ports import free_port

TRANSFER = {"remote_engine_id": "p", "remote_block_ids": [3, 4]}


class Server(ThreadingHTTPServer):
    """Remembers what was posted. status: of every reply. num_said: tokens of a stream before it ends."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.status, self.num_said = 200, 100
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
        for number in range(min(self.server.num_said, body["max_tokens"])):
            self._say(json.dumps({"choices": [{"token_ids": [number]}]}))
        self._say("[DONE]")

    def _say(self, event: str) -> None:
        self.wfile.write(f"data: {event}\n\n".encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def pair(server: Server, tmp_path: Path) -> Iterator[VllmPair]:
    port = server.server_port
    nodes = [VllmNode(name, tmp_path, tmp_path, 0, tmp_path / name, port) for name in ("prefill", "decode")]
    pair = VllmPair(*nodes)
    yield pair
    pair.end()


async def test_the_decode_step_gets_what_the_prefill_step_gave(server: Server, pair: VllmPair) -> None:
    heard = await pair.hear(Call(7, (5, 6), 4))
    assert (heard.number, heard.token_ids, len(heard.arrivals_s)) == (7, (0, 1, 2, 3), 4)
    prefill, decode = server.posted
    assert (prefill["max_tokens"], prefill["kv_transfer_params"]["do_remote_decode"]) == (1, True)
    assert (decode["max_tokens"], decode["kv_transfer_params"]) == (4, TRANSFER)
    assert prefill["prompt"] == decode["prompt"] == [5, 6]


async def test_a_stream_is_given_up_when_it_is_enough(pair: VllmPair) -> None:
    heard = await pair.hear(Call(0, (5, 6), 50), lambda num_tokens: num_tokens == 3)
    assert heard.token_ids == (0, 1, 2)


async def test_a_refusal_and_a_stream_that_ends_early_are_told(server: Server, pair: VllmPair) -> None:
    server.num_said = 2
    with pytest.raises(VllmFailed, match="the stream ended after 2 of 4 tokens"):
        await pair.hear(Call(0, (5, 6), 4))
    server.status = 500
    with pytest.raises(VllmFailed, match="HTTP 500"):
        await pair.hear(Call(0, (5, 6), 4))


async def test_a_node_that_is_away_is_told(pair: VllmPair) -> None:
    pair.prefill.port = free_port()
    with pytest.raises(VllmFailed, match="refused"):
        await pair.hear(Call(0, (5, 6), 4))
