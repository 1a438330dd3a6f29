"""The proxy on the control channel does what it is told, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from pdserve.bench.control_proxy import ControlProxy

LIMIT_S = 20.0


@dataclass
class Line:
    """A connection through the proxy to somebody who says everything back."""

    proxy: ControlProxy
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def echo(self, said: bytes) -> bytes:
        """What comes back of it; shorter where the line ends."""
        self.writer.write(said)
        async with asyncio.timeout(LIMIT_S):
            try:
                return await self.reader.readexactly(len(said))
            except asyncio.IncompleteReadError as error:
                return error.partial

    async def rest(self) -> bytes:
        """What comes until the line ends, in whatever way."""
        came = b""
        try:
            async with asyncio.timeout(LIMIT_S):
                while piece := await self.reader.read(100):
                    came += piece
        except ConnectionError:
            pass
        return came


async def _say_back(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(1 << 16):
        writer.write(piece)
    writer.close()


@pytest.fixture
async def proxy() -> AsyncIterator[ControlProxy]:
    server = await asyncio.start_server(_say_back, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    proxy = ControlProxy(f"127.0.0.1:{port}")
    await proxy.start()
    yield proxy
    await proxy.close()
    server.close()


async def connect(proxy: ControlProxy) -> Line:
    host, _, port = proxy.address.rpartition(":")
    return Line(proxy, *await asyncio.open_connection(host, int(port)))


@pytest.fixture
async def line(proxy: ControlProxy) -> Line:
    return await connect(proxy)


async def test_bytes_pass_as_they_are(line: Line) -> None:
    said = bytes(range(256)) * 1000
    assert await line.echo(said) == said


async def test_nothing_passes_while_it_is_held_and_everything_after(line: Line) -> None:
    assert await line.echo(b"before") == b"before"
    line.proxy.hold()
    late = asyncio.create_task(line.echo(b"after"))
    done, _ = await asyncio.wait([late], timeout=0.2)
    assert not done
    line.proxy.heal()
    assert await late == b"after"


async def test_a_cut_ends_the_connection_and_the_next_one_works(line: Line) -> None:
    assert await line.echo(b"before") == b"before"
    line.proxy.cut()
    assert await line.rest() == b""
    again = await connect(line.proxy)
    assert await again.echo(b"again") == b"again"
    assert line.proxy.num_connections == 2


async def test_a_truncation_lets_so_many_bytes_pass_and_cuts(line: Line) -> None:
    assert await line.echo(b"before") == b"before"
    line.proxy.truncate(3)
    assert not line.proxy.was_cut
    line.writer.write(b"123456")
    assert b"123".startswith(await line.rest())
    assert line.proxy.was_cut
