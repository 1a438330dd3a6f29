"""A prefill node's stand-in that passes everything on, changed as the test says; and a decode node's by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import grpc

from pdserve.request import RequestId, SamplingParams
from pdserve.rpc.handoff import ChunkReady, Description, FirstToken, RequestKey, Start, ToDecode, ToPrefill
from pdserve.rpc.handoff_codec import (
    decode_description,
    decode_to_decode,
    decode_to_prefill,
    encode_describe,
    encode_to_decode,
    encode_to_prefill,
)
from pdserve.rpc.server import RpcServer, Service
from pdserve.v1 import handoff_pb2 as pb
from pdserve.v1 import handoff_pb2_grpc
from tests.roles.cluster import Node
from tests.roles.journal import LIMIT_S, Journal


class End:
    """Instead of a message: the stream ends here, in good order."""


Passed = ToDecode | pb.PrefillResponse | End | Exception
ToDecodeChange = Callable[[ToDecode], Sequence[Passed]]


@dataclass(frozen=True, slots=True)
class Asked:
    """D's message reached the relay."""

    message: ToPrefill
    kind: type[ToPrefill]


class Relay(handoff_pb2_grpc.HandoffServicer):
    """change: what becomes of each message from P to D; an exception breaks the stream there.

    is_deaf_to: what D says of this kind is lost. is_deaf: nothing D says is even read. redescribe: what becomes of P's
    description. reask: what P is asked instead of D's question. is_quiet: who asks for a description hears nothing.
    """

    def __init__(self, target: str, journal: Journal) -> None:
        self.change: ToDecodeChange = lambda said: [said]
        self.is_deaf_to: type[ToPrefill] | None = None
        self.is_deaf = False
        self.is_quiet = False
        self.max_prompt_tokens: int | None = None
        self.redescribe: Callable[[pb.DescribeResponse], None] = lambda _: None
        self.reask: Callable[[pb.DescribeRequest], pb.DescribeRequest] = lambda request: request
        self.address = ""
        self._journal = journal
        self._channel = grpc.aio.insecure_channel(target)
        self._stub = stub_of(self._channel)

    async def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.DescribeResponse:
        if self.is_quiet:
            await asyncio.Event().wait()
        try:
            described = await self._stub.Describe(self.reask(request))
        except grpc.aio.AioRpcError as error:
            await context.abort(error.code(), error.details())
        self.redescribe(described)
        if self.max_prompt_tokens is not None:
            described.max_prompt_tokens = self.max_prompt_tokens
        return described

    async def Prefill(
        self, requests: AsyncIterator[pb.PrefillRequest], context: Any
    ) -> AsyncGenerator[pb.PrefillResponse, None]:
        if self.is_deaf:
            await asyncio.Event().wait()
        call = self._stub.Prefill()
        pump = asyncio.create_task(self._pump(requests, call))
        try:
            async for message in call:
                for said in self.change(decode_to_decode(message)):
                    match said:
                        case End():
                            return
                        case Exception():
                            raise said
                        case pb.PrefillResponse():
                            yield said
                        case _:
                            yield encode_to_decode(said)
        finally:
            pump.cancel()
            call.cancel()

    async def _pump(self, requests: AsyncIterator[pb.PrefillRequest], call: Any) -> None:
        async for request in requests:
            asked = decode_to_prefill(request)
            self._journal.note(Asked(asked, type(asked)))
            if type(asked) is not self.is_deaf_to:
                await call.write(request)

    async def close(self) -> None:
        await self._channel.close()


@asynccontextmanager
async def relay_to(node: Node, journal: Journal) -> AsyncIterator[Relay]:
    relay = Relay(node.address, journal)
    handoff = Service("pdserve.v1.Handoff", partial(handoff_pb2_grpc.add_HandoffServicer_to_server, relay))
    server = RpcServer([handoff], port=0)
    relay.address = f"127.0.0.1:{await server.start()}"
    await server.set_serving(True)
    try:
        yield relay
    finally:
        await server.stop(grace_s=0)
        await relay.close()


def stub_of(channel: grpc.aio.Channel) -> handoff_pb2_grpc.HandoffAsyncStub:
    return cast("handoff_pb2_grpc.HandoffAsyncStub", handoff_pb2_grpc.HandoffStub(cast(Any, channel)))


class Stream:
    """One handoff, told by hand."""

    def __init__(self, call: Any) -> None:
        self.call = call

    async def say(self, message: ToPrefill | pb.PrefillRequest) -> None:
        await self.call.write(message if isinstance(message, pb.PrefillRequest) else encode_to_prefill(message))

    async def hear(self, kind: type[ToDecode] | tuple[type[ToDecode], ...]) -> Any:
        """The next message of this kind; what comes before is passed over."""
        async with asyncio.timeout(LIMIT_S):
            async for message in self.call:
                if isinstance(said := decode_to_decode(message), kind):
                    return said
        raise AssertionError(f"the stream ended without a {kind}")

    async def hear_the_prompt_out(self) -> FirstToken:
        """Until everything was said that may come before the release: the first token, and every chunk."""
        first, num_chunks = None, 0
        while first is None or num_chunks < first.num_chunks:
            said = await self.hear((FirstToken, ChunkReady))
            first, num_chunks = (said, num_chunks) if isinstance(said, FirstToken) else (first, num_chunks + 1)
        return first

    async def hang_up(self) -> None:
        self.call.cancel()

    async def fate(self) -> tuple[grpc.StatusCode, str]:
        """How the stream ended, whatever is still said."""
        async with asyncio.timeout(LIMIT_S):
            try:
                async for _ in self.call:
                    pass
            except grpc.aio.AioRpcError:
                pass
            return await self.call.code(), await self.call.details()


class DecodeByHand:
    """The decode node's side of the protocol, one message at a time."""

    def __init__(self, node: Node) -> None:
        self.channel = grpc.aio.insecure_channel(node.address)
        self.stub = stub_of(self.channel)

    async def describe(self) -> Description:
        return decode_description(await self.stub.Describe(encode_describe()))

    async def start_of(self, prompt: Sequence[int], name: str = "by-hand") -> Start:
        description = await self.describe()
        return Start(
            incarnation=description.incarnation,
            request_key=RequestKey("decode-by-hand", RequestId(name), 0),
            weights_version=description.weights_version,
            prompt=tuple(prompt),
            sampling=SamplingParams(max_new_tokens=8, temperature=0.0),
            num_cached_tokens=0,
            fingerprint=description.fingerprint,
        )

    def open(self) -> Stream:
        return Stream(self.stub.Prefill())

    async def begin(self, prompt: Sequence[int], name: str = "by-hand", time_left_s: float | None = None) -> Stream:
        stream = self.open()
        await stream.say(replace(await self.start_of(prompt, name), time_left_s=time_left_s))
        return stream

    async def close(self) -> None:
        await self.channel.close()


@asynccontextmanager
async def decode_by_hand(node: Node) -> AsyncIterator[DecodeByHand]:
    by_hand = DecodeByHand(node)
    try:
        yield by_hand
    finally:
        await by_hand.close()
