"""Where the headless nodes of a group come to: the first node's end of their connections."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from pdserve import __version__
from pdserve.assembly.guest import Guest
from pdserve.assembly.messages import FromHeadless, Hello, Refused, ToHeadless
from pdserve.assembly.wire import Wire, WireLost
from pdserve.errors import StartupError

log = logging.getLogger(__name__)

# How often it is told who is waited for.
TELL_S = 10.0


class Assembly:
    """Lives as long as the node; `gather` once for each life of its group. Belongs to the front's event loop."""

    def __init__(self, num_nodes: int, revision: str) -> None:
        """revision: of the model that every node has to load."""
        self._num_nodes = num_nodes
        self._revision = revision
        self._guests: dict[int, Guest] = {}
        self._came = asyncio.Event()
        self._connections: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def listening(self, host: str, port: int) -> AsyncIterator[None]:
        """Raises StartupError where it cannot listen."""
        try:
            server = await asyncio.start_server(self._accept, host, port)
        except OSError as error:
            raise StartupError(
                f"cannot listen on {host}:{port}: {error.strerror}; --dist-init-addr is an address of the first node"
            ) from None
        try:
            yield
        finally:
            server.close()
            for connection in self._connections:
                connection.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)

    async def gather(self, timeout_s: float, on_waiting: Callable[[int], None]) -> list[Guest]:
        """Every other node, in order, once all are here. on_waiting: told how many are, when that changes.

        Raises StartupError that names those who did not come.
        """
        deadline = asyncio.get_running_loop().time() + timeout_s
        while missing := self._missing():
            on_waiting(len(self._guests))
            left_s = deadline - asyncio.get_running_loop().time()
            if left_s <= 0:
                raise StartupError(
                    f"{_nodes(missing)} did not come within {timeout_s:.0f} s: look at their logs, or raise "
                    "--startup-timeout-s"
                )
            await self._wait(min(left_s, TELL_S), missing)
        return [self._guests[node_rank] for node_rank in range(1, self._num_nodes)]

    def _missing(self) -> list[int]:
        return [
            node_rank
            for node_rank in range(1, self._num_nodes)
            if node_rank not in self._guests or self._guests[node_rank].is_lost
        ]

    async def _wait(self, limit_s: float, missing: list[int]) -> None:
        self._came.clear()
        try:
            async with asyncio.timeout(limit_s):
                await self._came.wait()
        except TimeoutError:
            log.info("waiting for %s of the group", _nodes(missing))

    # ------------------------------------------------------------ one connection

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.create_task(self._on_connection(reader, writer))
        self._connections.add(connection)
        connection.add_done_callback(self._connections.discard)

    async def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire: Wire[FromHeadless, ToHeadless] = Wire(reader, writer, FromHeadless)
        try:
            hello = await wire.receive()
        except WireLost as lost:
            log.warning("somebody at %s is no node of this group: %s", wire.remote_host, lost)
            await wire.close()
            return
        if (refused := self._refusal(hello)) is not None:
            log.warning("a node at %s was refused: %s", wire.remote_host, refused.reason)
            wire.send(refused)
            await wire.close()
            return
        assert isinstance(hello, Hello)
        await self._host(Guest(hello.node_rank, wire))

    async def _host(self, guest: Guest) -> None:
        self._guests[guest.node_rank] = guest
        self._came.set()
        log.info("node %d of the group is here, from %s", guest.node_rank, guest.host)
        try:
            reason = await guest.run()
        finally:
            del self._guests[guest.node_rank]
        log.info("node %d of the group is gone: %s", guest.node_rank, reason)

    def _refusal(self, hello: FromHeadless) -> Refused | None:
        if not isinstance(hello, Hello):
            return Refused(f"the first message is {type(hello).__name__}, it must be Hello", is_final=True)
        if hello.version != __version__:
            return _mismatch("version", __version__, hello.version, "install the same on every node")
        if hello.num_nodes != self._num_nodes:
            return _mismatch("--nnodes", self._num_nodes, hello.num_nodes, "give every node the same")
        if not 1 <= hello.node_rank < self._num_nodes:
            remedy = f"the others are 1 to {self._num_nodes - 1}"
            return Refused(f"--node-rank is {hello.node_rank} there: {remedy}", is_final=True)
        if hello.revision != self._revision:
            return _mismatch("model_revision", self._revision, hello.revision, "give every node the same model")
        if hello.node_rank in self._guests:
            here = self._guests[hello.node_rank].host
            reason = (
                f"--node-rank {hello.node_rank} is a node at {here} already; if that one is gone it will be missed soon"
            )
            return Refused(reason, is_final=False)
        return None


def _mismatch(field: str, here: object, there: object, remedy: str) -> Refused:
    return Refused(f"{field} is {here} on the first node, {there} there; {remedy}", is_final=True)


def _nodes(ranks: list[int]) -> str:
    return f"node {ranks[0]}" if len(ranks) == 1 else f"nodes {', '.join(map(str, ranks))}"
