"""What a request is told by each kind of server."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from http.client import IncompleteRead
from pathlib import Path
from typing import Any, cast

import pytest

from pdserve.bench.listening import Call, Heard
from pdserve.bench.peers.http_server import CompletionServer, ServerFailed
from pdserve.bench.policy_runs import Model
from pdserve.bench.serve import servers
from pdserve.bench.serve.clients import RequestFailed
from pdserve.bench.serve.servers import HttpPeer, Node, http_peer
from pdserve.client import AsyncClient
from pdserve.config.ports import free_port
from pdserve.errors import InternalError, InvalidRequest, PdserveError, QueueFull, StartupError

CALL = Call(0, (1, 2), 3)
MODEL = Model(Path("nowhere"), tuple(range(100)))


class Peer:
    """A server that fails, or answers at once."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.num_warm = 0

    async def hear(self, call: Call) -> Heard:
        if self.error:
            raise self.error
        return Heard(call.number, 0.0, (1.0,) * call.num_output_tokens)

    def hear_all(self, calls: list[Call]) -> list[Heard]:
        if self.error:
            raise self.error
        self.num_warm += len(calls)
        return [Heard(call.number, 0.0, (1.0,)) for call in calls]


async def told(server: servers.Server) -> tuple[str, bool]:
    with pytest.raises(RequestFailed) as failed:
        await server.hear(CALL)
    return str(failed.value), failed.value.is_refused


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ServerFailed("HTTP 503"), ("HTTP 503", True)),
        (ServerFailed("HTTP 400"), ("HTTP 400", True)),
        (ServerFailed("HTTP 500"), ("HTTP 500", False)),
        (ServerFailed("Connection refused"), ("Connection refused", False)),
        (IncompleteRead(b""), ("the reply can't be read: IncompleteRead", False)),
        (ValueError("no JSON"), ("the reply can't be read: ValueError", False)),
    ],
)
async def test_an_http_server_s_failure_is_told(error: Exception, expected: tuple[str, bool]) -> None:
    assert await told(HttpPeer(cast(CompletionServer, Peer(error)))) == expected


@pytest.mark.parametrize(
    ("error", "is_refused"),
    [(QueueFull("full"), True), (InvalidRequest("too long"), True), (InternalError("lost"), False)],
)
async def test_a_node_s_failure_is_told(error: PdserveError, is_refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*words: Any) -> Heard:
        raise error

    monkeypatch.setattr(servers, "hear", fail)
    async with AsyncClient() as client:
        assert await told(Node(client)) == (error.message, is_refused)


async def test_where_nobody_listens_a_request_is_told_so() -> None:
    async with AsyncClient(f"127.0.0.1:{free_port()}", timeout_s=20.0, max_attempts=1) as client:
        reason, is_refused = await told(Node(client))
    assert "no node answers at" in reason
    assert not is_refused


def serve(peer: Peer) -> Any:
    @contextlib.contextmanager
    def start(folder: Path) -> Iterator[CompletionServer]:
        assert folder.is_dir()
        yield cast(CompletionServer, peer)

    return start


async def test_an_http_server_is_warm_before_it_is_asked() -> None:
    peer = Peer()
    with http_peer("peer", MODEL, serve(peer)).start() as connect:
        assert peer.num_warm == 3
        async with connect() as server:
            assert len((await server.hear(CALL)).arrivals_s) == 3


def test_an_http_server_that_answers_no_first_request_did_not_start() -> None:
    kind = http_peer("peer", MODEL, serve(Peer(ServerFailed("HTTP 500"))))
    with pytest.raises(StartupError, match="peer did not answer its first requests: HTTP 500"), kind.start():
        pass
