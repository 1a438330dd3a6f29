"""What can be put under load: pdserve's nodes, a node that runs already, and other engines' HTTP servers."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pdserve.bench.asking import TIMEOUT_S
from pdserve.bench.deployed import WARM_UP_LENGTHS, WARM_UP_TOKENS, Deployed, fused, pair
from pdserve.bench.listening import Call, Heard, hear, unique_prompt
from pdserve.bench.peers.http_server import CompletionServer, ServerFailed
from pdserve.bench.policy_runs import Model
from pdserve.bench.serve.clients import RequestFailed, Server
from pdserve.client import AsyncClient
from pdserve.errors import InvalidRequest, PdserveError, QueueFull, StartupError

# Requests that run at once, where no load has more streams: the default of `pdserve serve`.
NUM_SLOTS = 32
DEPLOYMENTS: Mapping[str, Callable[..., AbstractContextManager[Deployed]]] = {"fused": fused, "pair": pair}
# HTTP statuses of a server that does not take a request: it can't ever, not so soon again, or not now.
REFUSALS = frozenset(f"HTTP {status}" for status in (400, 413, 422, 429, 503))

# Within the event loop that the server is asked from.
Connect = Callable[[], AbstractAsyncContextManager[Server]]


@dataclass(frozen=True, slots=True)
class Kind:
    """A server that can be started. name: in tables. start: it is up and warm within the block. Raises PdserveError.

    is_started: here, so that what it costs can be told.
    """

    name: str
    start: Callable[[], AbstractContextManager[Connect]]
    is_started: bool = True


@dataclass(frozen=True, slots=True)
class Node:
    """A pdserve node, asked over gRPC."""

    client: AsyncClient

    async def hear(self, call: Call) -> Heard:
        try:
            return await hear(self.client, call)
        except PdserveError as error:
            raise RequestFailed(error.message, isinstance(error, QueueFull | InvalidRequest)) from None


@dataclass(frozen=True, slots=True)
class HttpPeer:
    """Another engine's server."""

    server: CompletionServer

    async def hear(self, call: Call) -> Heard:
        try:
            return await self.server.hear(call)
        except ServerFailed as error:
            raise RequestFailed(str(error), str(error) in REFUSALS) from None
        except (HTTPException, ValueError) as error:  # a reply that was cut off
            raise RequestFailed(f"the reply can't be read: {type(error).__name__}") from None


def deployed(name: str, quantization: str, model: Model, num_streams: int, settings: Mapping[str, Any]) -> Kind:
    """fused or pair. num_streams: the most that are meant to run at once. settings: of each node, beside our own."""

    @contextlib.contextmanager
    def start() -> Iterator[Connect]:
        own = {"quantization": quantization, "max_num_seqs": max(NUM_SLOTS, num_streams)}
        with DEPLOYMENTS[name](model, **{**own, **settings}) as node:
            yield lambda: connected(node.address)

    return Kind(f"{name} {quantization}", start)


def at_addresses(addresses: Sequence[str]) -> Kind:
    """Nodes that somebody else has started and that take turns; they are not warmed up."""
    return Kind(",".join(addresses), lambda: contextlib.nullcontext(lambda: connected(addresses)), is_started=False)


def http_peer(name: str, model: Model, serve: Callable[[Path], AbstractContextManager[CompletionServer]]) -> Kind:
    """serve: starts it, with a folder for its log."""

    @contextlib.contextmanager
    def start() -> Iterator[Connect]:
        with TemporaryDirectory() as folder, serve(Path(folder)) as server:
            _warm_up(name, server, model)
            yield lambda: contextlib.nullcontext(HttpPeer(server))

    return Kind(name, start)


def _warm_up(name: str, server: CompletionServer, model: Model) -> None:
    """Raises StartupError where it can't be."""
    for length in WARM_UP_LENGTHS:
        try:
            server.hear_all([Call(0, unique_prompt(model.text, length, f"warm-up {length}"), WARM_UP_TOKENS)])
        except ServerFailed as error:
            raise StartupError(f"{name} did not answer its first requests: {error}") from None


@contextlib.asynccontextmanager
async def connected(addresses: str | Sequence[str]) -> AsyncIterator[Server]:
    """One attempt a request: what the node says is what its caller sees."""
    async with AsyncClient(addresses, timeout_s=TIMEOUT_S, max_attempts=1) as client:
        await client.server_info()  # so that no request's time holds the connection's
        yield Node(client)
