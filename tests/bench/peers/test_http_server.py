"""A peer's server: its process, and the completions that it streams."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.bench.listening import Call
from pdserve.bench.peers import llama_server, vllm
from pdserve.bench.peers.http_server import Completions, CompletionServer, HttpServer, ServerFailed, serving
from pdserve.bench.processes import is_running
from pdserve.bench.waiting import until
from pdserve.config.ports import free_port
from pdserve.errors import StartupError
from tests.bench.peers.completion_server import Server, answering

# A server that says it is healthy, with a child of its own.
HEALTHY = """
import subprocess, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
child = subprocess.Popen(["sleep", "100"])
open(sys.argv[2], "w").write(str(child.pid))
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def server() -> Iterator[Server]:
    with answering() as server:
        yield server


def client(server: Server, completions: Completions, tmp_path: Path) -> CompletionServer:
    return CompletionServer(HttpServer("peer", [], server.server_port, tmp_path / "log"), completions)


@pytest.mark.parametrize("completions", [vllm.COMPLETIONS, llama_server.COMPLETIONS])
def test_all_answers_are_heard_in_order_and_each_call_leaves_at_its_time(
    server: Server, completions: Completions, tmp_path: Path
) -> None:
    calls = [Call(0, (5, 6), 4, at_s=0.3), Call(1, (7,), 2), Call(2, (8,), 3, at_s=0.1)]
    began_s = time.monotonic()
    heard = client(server, completions, tmp_path).hear_all(calls)
    assert [(answer.number, answer.token_ids) for answer in heard] == [(0, (0, 1, 2, 3)), (1, (0, 1)), (2, (0, 1, 2))]
    assert all(answer.called_s - began_s >= call.at_s for answer, call in zip(heard, calls, strict=True))
    assert sorted(body["prompt"] for body in server.posted) == [[5, 6], [7], [8]]
    assert all(body["ignore_eos"] and body["temperature"] == 0.0 for body in server.posted)


def test_an_answer_that_fails_is_told_when_the_others_have_ended(server: Server, tmp_path: Path) -> None:
    server.num_said = 3
    with pytest.raises(ServerFailed, match="the stream ended after 3 of 5 tokens"):
        client(server, vllm.COMPLETIONS, tmp_path).hear_all([Call(0, (5,), 5), Call(1, (5,), 2)])
    assert len(server.posted) == 2
    server.event = {"error": "out of slots"}
    with pytest.raises(ServerFailed, match="out of slots"):
        client(server, llama_server.COMPLETIONS, tmp_path).hear_all([Call(0, (5,), 5)])


def test_a_stream_past_its_deadline_is_told(server: Server, tmp_path: Path) -> None:
    peer = HttpServer("peer", [], server.server_port, tmp_path / "log")
    server.pause_s = 0.03
    pieces = vllm.COMPLETIONS.stream(peer, (5,), 9, timeout_s=0.1)
    with pytest.raises(ServerFailed, match=r"of 9 tokens came in 0\.1 s|timed out"):
        list(pieces)


async def test_a_server_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    port, child = free_port(), tmp_path / "child"
    healthy = HttpServer("peer", [sys.executable, "-c", HEALTHY, str(port), str(child)], port, tmp_path / "log")
    seen: list[int] = []
    healthy.when_healthy = seen.append
    with serving(healthy, vllm.COMPLETIONS) as running:
        assert seen == [running.pid]
        pids = [running.pid, int(child.read_text())]
        assert all(map(is_running, pids))
    # The kernel ends the child a moment after it was told to.
    assert await until(lambda: not any(map(is_running, pids)), poll_s=0.01, timeout_s=10)


def test_a_server_that_ends_at_once_is_told_with_the_end_of_its_log(tmp_path: Path) -> None:
    ends = HttpServer("peer", [sys.executable, "-c", "print('no such model')"], free_port(), tmp_path / "log")
    with (
        pytest.raises(StartupError, match="peer did not start; its log ends with:\nno such model"),
        serving(ends, vllm.COMPLETIONS),
    ):
        pass
