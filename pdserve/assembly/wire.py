"""One connection between two nodes of a group: messages with their length before them, and silence as an end."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Generic, TypeVar

import msgspec

Sent = TypeVar("Sent", bound=msgspec.Struct)
Received = TypeVar("Received")

# Each side says something every second; one that is not heard for this long is gone, or cut off.
BEAT_S = 1.0
SILENCE_S = 10.0
# A group of a thousand ranks is ordered in a tenth of this.
MAX_MESSAGE_BYTES = 16 * 2**20
_LENGTH_BYTES = 4


class WireLost(Exception):
    """The connection has ended, or might as well have."""


class Wire(Generic[Received, Sent]):
    """received: the union of message types that may come in."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, received: object) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder: msgspec.msgpack.Decoder[Received] = msgspec.msgpack.Decoder(received)

    @property
    def local_host(self) -> str:
        """The address by which the other end reaches us."""
        return str(self._writer.get_extra_info("sockname")[0])

    @property
    def remote_host(self) -> str:
        return str(self._writer.get_extra_info("peername")[0])

    def send(self, message: Sent) -> None:
        """Queued; a connection that has ended takes it and loses it, `receive` tells."""
        frame = msgspec.msgpack.encode(message)
        self._writer.write(len(frame).to_bytes(_LENGTH_BYTES, "big") + frame)

    async def receive(self, within_s: float = SILENCE_S) -> Received:
        """Raises WireLost, with the reason."""
        try:
            async with asyncio.timeout(within_s):
                length = int.from_bytes(await self._reader.readexactly(_LENGTH_BYTES), "big")
                if length > MAX_MESSAGE_BYTES:
                    raise WireLost(f"it sent {length} bytes at once, the limit is {MAX_MESSAGE_BYTES}")
                return self._decoder.decode(await self._reader.readexactly(length))
        except TimeoutError:
            raise WireLost(f"it said nothing for {within_s:.0f} s") from None
        except msgspec.DecodeError as error:
            raise WireLost(f"it sent what is no message: {error}") from None
        except (OSError, asyncio.IncompleteReadError):
            raise WireLost("the connection ended") from None

    def hang_up(self) -> None:
        """Whoever receives, on either end, hears that the connection ended."""
        self._writer.close()

    async def close(self) -> None:
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()


async def dial(host: str, port: int, received: object, *, within_s: float) -> Wire[Received, Sent]:
    """Raises WireLost when nobody answers."""
    try:
        async with asyncio.timeout(within_s):
            return Wire(*await asyncio.open_connection(host, port), received)
    except TimeoutError:
        raise WireLost(f"no answer within {within_s:.0f} s") from None
    except OSError as error:
        raise WireLost(error.strerror or str(error)) from None
