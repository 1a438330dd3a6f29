"""The Admin service, over the ranks of any node."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import grpc

from pdserve.errors import QueueFull
from pdserve.rounds import NUM_KEPT, RankRounds
from pdserve.rpc.generator import RoundSource
from pdserve.rpc.rounds_codec import decode_last, encode_rounds
from pdserve.rpc.server import Service
from pdserve.v1 import admin_pb2 as pb
from pdserve.v1.admin_pb2_grpc import add_AdminServicer_to_server

SERVICE_NAME = "pdserve.v1.Admin"
MAX_CALLERS = 8
# How often a rank that is followed is asked for what is new.
PAUSE_S = 0.1

Context = grpc.aio.ServicerContext[Any, Any]


def admin_service(source: RoundSource) -> Service:
    return Service(SERVICE_NAME, partial(add_AdminServicer_to_server, AdminServicer(source)))


class AdminServicer:
    """Raises PdserveErrors, which the server's boundary turns into statuses. Runs in the server's event loop."""

    def __init__(self, source: RoundSource) -> None:
        self._source = source
        self._num_callers = 0

    async def StreamRounds(self, request: pb.StreamRoundsRequest, context: Context) -> None:
        """Ranks are asked one by one as each has been read, so a reader that is slow finds gaps, and nothing piles up.

        One that is in a long forward answers after it, and keeps the others from nothing.
        """
        last = decode_last(request)
        with self._place():
            line = _Line(context)
            streams = [
                asyncio.create_task(self._stream(rank, last, follows=request.follow, line=line))
                for rank in range(len(self._source))
            ]
            try:
                for ended in asyncio.as_completed(streams):
                    await ended
            finally:
                for stream in streams:
                    stream.cancel()
                await asyncio.gather(*streams, return_exceptions=True)

    async def _stream(self, rank: int, last: int, *, follows: bool, line: _Line) -> None:
        seen = await self._source.rounds(rank, after=None, most=last)
        await line.write(seen)
        while follows:
            await asyncio.sleep(PAUSE_S)
            seen = await self._source.rounds(rank, after=seen.newest, most=NUM_KEPT)
            if seen.rounds:
                await line.write(seen)

    @contextmanager
    def _place(self) -> Iterator[None]:
        """Among those who are told. Raises QueueFull."""
        if self._num_callers >= MAX_CALLERS:
            raise QueueFull(f"{MAX_CALLERS} callers stream rounds of this node, the limit; let one of them end first")
        self._num_callers += 1
        try:
            yield
        finally:
            self._num_callers -= 1


class _Line:
    """To the caller: one response at a time, whichever rank it is of."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._is_free = asyncio.Lock()

    async def write(self, rounds: RankRounds) -> None:
        """Returns when the transport took all of it, however long the caller takes to read."""
        async with self._is_free:
            for response in encode_rounds(rounds):
                await self._context.write(response)
