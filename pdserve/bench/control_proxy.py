"""The wire between a decode node and a prefill node's gRPC port, to be slowed, held, truncated and cut.

Bytes only: what a router that dies, a full link or a firewall does to a connection. KV travels beside it, untouched.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field

READ_BYTES = 64 << 10


@dataclass(slots=True, eq=False)
class ControlProxy:
    """Listens on `address` once started and passes everything on to HOST:PORT `target`; it belongs to one event loop.

    delay_s: each piece waits that long on its way. num_connections: accepted so far.
    """

    target: str
    address: str = ""
    delay_s: float = 0.0
    num_connections: int = 0
    _open: asyncio.Event = field(default_factory=asyncio.Event)
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)
    _pumps: set[asyncio.Task[None]] = field(default_factory=set)
    _bytes_left: int | None = None
    _server: asyncio.Server | None = None

    async def start(self) -> str:
        """The address to connect to."""
        self._open.set()
        self._server = await asyncio.start_server(self._on_connection, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self.address

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self.cut()
        for pump in list(self._pumps):
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    # ------------------------------------------------------------ faults

    def hold(self) -> None:
        """A partition: connections stay, nothing passes either way until `heal`."""
        self._open.clear()

    def slow(self, delay_s: float) -> None:
        """Every piece is late from now on until `heal`."""
        self.delay_s = delay_s

    def truncate(self, num_bytes: int) -> None:
        """That many more bytes pass, in whatever direction; then everything is cut, maybe in mid-message."""
        self._bytes_left = num_bytes

    def cut(self) -> None:
        """Every connection is reset; new ones are taken."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    @property
    def was_cut(self) -> bool:
        """No truncation is under way: what was let pass has passed."""
        return self._bytes_left is None

    def heal(self) -> None:
        """What was held passes now."""
        self.delay_s = 0.0
        self._bytes_left = None
        self._open.set()

    # ------------------------------------------------------------ bytes

    async def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        host, _, port = self.target.rpartition(":")
        try:
            theirs = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, theirs[1]}
        for source, sink in ((reader, theirs[1]), (theirs[0], writer)):
            pump = asyncio.create_task(self._pump(source, sink))
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while piece := await source.read(READ_BYTES):
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                await self._open.wait()
                passed = self._passing(piece)
                sink.write(passed)
                await sink.drain()
                if len(passed) < len(piece):
                    self._bytes_left = None
                    self.cut()
        self._writers.discard(sink)
        sink.close()

    def _passing(self, piece: bytes) -> bytes:
        if self._bytes_left is None:
            return piece
        passed = piece[: self._bytes_left]
        self._bytes_left -= len(passed)
        return passed
