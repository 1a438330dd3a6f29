"""Sockets between a front and its ranks: ZeroMQ pairs over ipc in a directory that only this user may enter.

Each message is one frame of typed msgpack. The front binds, a rank connects; a rank's loop and its transport thread
have a socket each, so that neither waits for the other.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import zmq
import zmq.asyncio

Sent = TypeVar("Sent")
Received = TypeVar("Received")

# Messages of one kind that may wait for the other side; a round sends one.
_HIGH_WATER = 100_000


@contextmanager
def private_directory() -> Iterator[Path]:
    """A directory of mode 0700 for ipc endpoints, removed at the end. Short: a socket path has 107 bytes at most."""
    with tempfile.TemporaryDirectory(prefix="pdserve-") as path:
        os.chmod(path, 0o700)
        yield Path(path)


def _set_options(socket: zmq.Socket[Any], linger_ms: int) -> None:
    socket.setsockopt(zmq.SNDHWM, _HIGH_WATER)
    socket.setsockopt(zmq.RCVHWM, _HIGH_WATER)
    socket.setsockopt(zmq.LINGER, linger_ms)


class RankChannel(Generic[Received, Sent]):
    """A rank's end; owned by one thread. `received` is the union of message types that may come in."""

    def __init__(self, endpoint: str, received: object) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
        _set_options(self._socket, linger_ms=1000)
        self._socket.connect(endpoint)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Received] = msgspec.msgpack.Decoder(received)

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """For a poller."""
        return self._socket

    def send(self, message: Sent) -> None:
        self._socket.send(self._encoder.encode(message), copy=False)

    def receive_all(self) -> list[Received]:
        """Everything that waits, without blocking."""
        messages: list[Received] = []
        while True:
            try:
                messages.append(self._decoder.decode(self._socket.recv(zmq.NOBLOCK)))
            except zmq.Again:
                return messages

    def close(self) -> None:
        self._socket.close()


class FrontChannel(Generic[Received, Sent]):
    """The front's end, for asyncio."""

    def __init__(self, endpoint: str, received: object) -> None:
        self._socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
        _set_options(self._socket, linger_ms=0)
        self._socket.bind(endpoint)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Received] = msgspec.msgpack.Decoder(received)

    async def send(self, message: Sent) -> None:
        await self._socket.send(self._encoder.encode(message))

    async def receive(self) -> Received:
        return self._decoder.decode(await self._socket.recv())

    def close(self) -> None:
        self._socket.close()
