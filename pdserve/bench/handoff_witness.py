"""Stands between a decode node and a prefill node, passes their messages on, and knows how far each prompt is."""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc

from pdserve.v1 import handoff_pb2 as pb

PREFILL = "/pdserve.v1.Handoff/Prefill"


class Phase(enum.Enum):
    """Of a request, by the last of these messages that passed. idle: of a process that has none."""

    IDLE = "idle"
    QUEUED = "queued"  # Start
    PREFILLING = "mid-prefill"  # Accepted
    READING = "mid-READ"  # a ChunkReady
    FIRST_TOKEN = "after the first token"  # FirstToken, and not confirmed yet
    DECODING = "decoding"  # Released: its prompt's KV is D's


# What a message moves its request to; a later phase is never left for an earlier one.
BY_KIND = {
    "start": Phase.QUEUED,
    "accepted": Phase.PREFILLING,
    "chunk_ready": Phase.READING,
    "first_token": Phase.FIRST_TOKEN,
    "released": Phase.DECODING,
}
ORDER = list(Phase)


@dataclass(frozen=True, slots=True)
class Passed:
    """A message on its way. request_id: the decode node's name for the request. num_tokens: of a chunk, else 0.

    at_s: when, on this process' monotonic clock.
    """

    request_id: str
    kind: str
    at_s: float
    num_tokens: int = 0


@dataclass(slots=True)
class Witness:
    """`start` it before the decode node; `address` stands for the prefill node at `target`. One event loop.

    phases: of prompts whose streams are open, by the decode node's name. log: everything that passed, in order.
    """

    target: str
    address: str = ""
    phases: dict[str, Phase] = field(default_factory=dict)
    log: list[Passed] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    _server: Any = None
    _channel: Any = None

    async def start(self) -> str:
        options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        # It has to find a prefill node that comes back as quickly as a decode node does.
        reconnect = [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 250)]
        self._channel = grpc.aio.insecure_channel(self.target, options=[*options, *reconnect])
        self._server = grpc.aio.server(options=options)
        self._server.add_generic_rpc_handlers((_Handlers(self),))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        return self.address

    async def close(self) -> None:
        await self._server.stop(0)
        await self._channel.close()

    def in_phase(self, phase: Phase) -> list[str]:
        """Requests whose prompts are that far."""
        return [request_id for request_id, at in self.phases.items() if at is phase]

    async def until(self, kind: str, number: int = 1) -> Passed:
        """The number-th message of that kind, counted from the start. Bound it by a timeout of yours."""
        while len(found := [passed for passed in self.log if passed.kind == kind]) < number:
            self.changed.clear()
            await self.changed.wait()
        return found[number - 1]

    # ------------------------------------------------------------ calls, as bytes

    async def pass_on(self, method: str, requests: AsyncIterator[bytes], context: Any) -> AsyncGenerator[bytes, None]:
        """Any call of any shape."""
        call = self._channel.stream_stream(method)()
        pump = asyncio.create_task(_pump(requests, call))
        try:
            async for raw in call:
                yield raw
        except grpc.aio.AioRpcError as error:
            await _fail_as(context, error)
        finally:
            pump.cancel()
            call.cancel()

    async def prefill(self, requests: AsyncIterator[bytes], context: Any) -> AsyncGenerator[bytes, None]:
        """A handoff; every message is looked at on its way."""
        call = self._channel.stream_stream(PREFILL)()
        name: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        pump = asyncio.create_task(self._pump(requests, call, name))
        try:
            async for raw in call:
                message = pb.PrefillResponse.FromString(raw)
                chunk = message.chunk_ready
                self._note(await name, message.WhichOneof("kind"), chunk.end_token - chunk.first_token)
                yield raw
        except grpc.aio.AioRpcError as error:
            await _fail_as(context, error)
        finally:
            pump.cancel()
            call.cancel()
            if name.done():
                self.phases.pop(name.result(), None)
                self._note(name.result(), "end")

    async def _pump(self, requests: AsyncIterator[bytes], call: Any, name: asyncio.Future[str]) -> None:
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            async for raw in requests:
                message = pb.PrefillRequest.FromString(raw)
                if not name.done():
                    name.set_result(message.start.request_key.request_id)
                self._note(await name, message.WhichOneof("kind"))
                await call.write(raw)
            await call.done_writing()

    def _note(self, request_id: str, kind: str | None, num_tokens: int = 0) -> None:
        self.log.append(Passed(request_id, kind or "unknown", time.monotonic(), num_tokens))
        phase = BY_KIND.get(kind or "")
        before = self.phases.get(request_id, Phase.IDLE)
        if phase is not None and ORDER.index(phase) > ORDER.index(before):
            self.phases[request_id] = phase
        self.changed.set()


@dataclass(frozen=True, slots=True)
class _Handlers(grpc.GenericRpcHandler):
    """Bytes in, bytes out: on the wire every call is a stream each way."""

    witness: Witness

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        method = handler_call_details.method
        passes = self.witness.prefill if method == PREFILL else partial(self.witness.pass_on, method)
        return grpc.stream_stream_rpc_method_handler(passes)


async def _pump(requests: AsyncIterator[bytes], call: Any) -> None:
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        async for raw in requests:
            await call.write(raw)
        await call.done_writing()


async def _fail_as(context: Any, error: grpc.aio.AioRpcError) -> None:
    """End the call as the other one ended, details of the status included. Raises."""
    await context.abort(error.code(), error.details() or "", error.trailing_metadata() or ())
