"""The front's end of a rank's channel, for tests that play the front by hand in one thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
import zmq

LIMIT_S = 20.0

M = TypeVar("M")


class OtherEnd:
    """Binds `endpoint`; decodes the union `received`. seen: everything that came."""

    def __init__(self, endpoint: str, received: object) -> None:
        self._socket = zmq.Context.instance().socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(endpoint)
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(received)
        self.seen: list[Any] = []

    def send(self, *messages: msgspec.Struct) -> None:
        for message in messages:
            self._socket.send(msgspec.msgpack.encode(message))

    def next(self) -> Any:
        assert self._socket.poll(round(LIMIT_S * 1000)), f"nothing came after {self.seen[-5:]}"
        self.seen.append(self._decoder.decode(self._socket.recv()))
        return self.seen[-1]

    def hear(self, kind: type[M]) -> M:
        """The next message of this kind; others are passed over."""
        while not isinstance(message := self.next(), kind):
            pass
        return message

    def close(self) -> None:
        self._socket.close()


@contextmanager
def other_end(endpoint: str, received: object) -> Iterator[OtherEnd]:
    end = OtherEnd(endpoint, received)
    try:
        yield end
    finally:
        end.close()


def wait_for(find: Callable[[], M | None]) -> M:
    """What `find` finds; another thread brings it about."""
    deadline_s = time.monotonic() + LIMIT_S
    while (found := find()) is None:
        assert time.monotonic() < deadline_s, "it never happened"
    return found
