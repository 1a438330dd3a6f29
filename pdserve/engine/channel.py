"""Sockets between a front and its ranks: ZeroMQ pairs, over ipc in a directory that only this user may enter, or over
tcp to ranks on other machines.

Each message is one frame of typed msgpack. The front binds, a rank connects; a leader binds, its followers connect. A
rank's loop and its transport thread have a socket each, so that neither waits for the other.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import zmq

from pdserve.errors import NotReady

Sent = TypeVar("Sent")
Received = TypeVar("Received")

# What a zmq.Poller takes.
Pollable = int | zmq.Socket[Any]

# Messages of one kind that may wait for the other side; a round sends one.
_HIGH_WATER = 100_000


@contextmanager
def private_directory() -> Iterator[Path]:
    """A directory of mode 0700 for ipc endpoints, removed at the end. Short: a socket path has 107 bytes at most.

    Those of processes that were killed are removed first; the name says whose they were.
    """
    for left in Path(tempfile.gettempdir()).glob("pdserve-*-*"):
        owner = left.name.split("-")[1]
        if owner.isdecimal() and not Path(f"/proc/{owner}").exists():
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"pdserve-{os.getpid()}-") as path:
        os.chmod(path, 0o700)
        yield Path(path)


def _set_options(socket: zmq.Socket[Any], linger_ms: int, endpoint: str) -> None:
    socket.setsockopt(zmq.SNDHWM, _HIGH_WATER)
    socket.setsockopt(zmq.RCVHWM, _HIGH_WATER)
    socket.setsockopt(zmq.LINGER, linger_ms)
    if endpoint.startswith("tcp:"):
        socket.setsockopt(zmq.IPV6, 1)
        # What a broken connection has swallowed is lost: with a second one, the two ends would have different views.
        socket.setsockopt(zmq.RECONNECT_IVL, -1)


class RankChannel(Generic[Received, Sent]):
    """A rank's end; owned by one thread. `received` is the union of message types that may come in.

    binds: the other end is a rank too, and connects.
    """

    def __init__(self, endpoint: str, received: object, *, binds: bool = False) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
        _set_options(self._socket, 1000, endpoint)
        if binds:
            self._socket.bind(endpoint)
        else:
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
    """The front's end, on its event loop. `listen` once, then each message is handed to its callback, in order."""

    def __init__(self, endpoint: str, received: object) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
        _set_options(self._socket, 0, endpoint)
        self._socket.bind(endpoint)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Received] = msgspec.msgpack.Decoder(received)
        self._on_message: Callable[[Received], None] | None = None
        self.endpoint: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def listen(self, on_message: Callable[[Received], None]) -> None:
        """Call `on_message` for whatever comes, from now on."""
        self._on_message = on_message
        loop = asyncio.get_running_loop()
        loop.add_reader(self._socket.fileno(), self._drain)
        loop.call_soon(self._drain)

    def send(self, message: Sent) -> None:
        """Queued at once. Raises NotReady when the rank has taken nothing for very long."""
        try:
            self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            raise NotReady(f"the rank leaves {_HIGH_WATER} messages unread") from None
        # The descriptor tells of news once, and a send may have swallowed that: look for oneself.
        asyncio.get_running_loop().call_soon(self._drain)

    def _drain(self) -> None:
        while self._on_message is not None and not self._socket.closed:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._on_message(self._decoder.decode(frame))

    def close(self) -> None:
        if self._on_message is not None:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
            self._on_message = None
        self._socket.close()
