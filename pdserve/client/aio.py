"""The client for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, Unpack, cast

import grpc
import grpc.aio

from pdserve.client import wire
from pdserve.client.channel import DEFAULT_TARGET, MAX_ATTEMPTS, checked_timeout, client_options, joined, shown
from pdserve.client.failure import error_from, placements_in
from pdserve.client.health import HEALTH_METHOD, decode_health
from pdserve.client.types import Answer, GenerateOptions, Health, Piece, ServerInfo, checked_last
from pdserve.errors import PdserveError
from pdserve.request import RankLoad
from pdserve.rounds import RankRounds
from pdserve.rpc.codec import decode_loads, decode_model
from pdserve.rpc.limits import MAX_MESSAGE_BYTES, ModelCard
from pdserve.rpc.rounds_codec import DEFAULT_LAST, decode_rounds
from pdserve.v1 import admin_pb2
from pdserve.v1 import inference_pb2 as pb
from pdserve.v1.admin_pb2_grpc import AdminStub
from pdserve.v1.inference_pb2_grpc import InferenceStub

if TYPE_CHECKING:
    from pdserve.v1.admin_pb2_grpc import AdminAsyncStub
    from pdserve.v1.inference_pb2_grpc import InferenceAsyncStub

T = TypeVar("T")
Response = TypeVar("Response")


class AsyncClient:
    """`Client` for asyncio: the same calls, awaited. Belongs to the event loop it was made in."""

    def __init__(
        self,
        targets: str | Sequence[str] = DEFAULT_TARGET,
        *,
        timeout_s: float | None = None,
        max_attempts: int = MAX_ATTEMPTS,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        num_targets = 1 if isinstance(targets, str) else len(targets)
        self._where = shown(targets)
        self._timeout_s = timeout_s
        self._max_message_bytes = max_message_bytes
        options = client_options(num_targets, max_attempts, max_message_bytes)
        self._channel = grpc.aio.insecure_channel(joined(targets), options=options)
        self._stub = cast("InferenceAsyncStub", InferenceStub(cast(Any, self._channel)))
        self._admin = cast("AdminAsyncStub", AdminStub(cast(Any, self._channel)))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends every open call too."""
        await self._channel.close()

    async def generate(
        self, prompt: str | None = None, *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Answer:
        """One whole answer to a prompt, to `messages` or to `token_ids`."""
        return (await self.generate_samples(prompt, num_samples=1, timeout_s=timeout_s, **options))[0]

    async def generate_samples(
        self,
        prompt: str | None = None,
        *,
        num_samples: int,
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> tuple[Answer, ...]:
        """Several whole answers to one prompt."""
        async with self._start(prompt, options, num_samples, False, timeout_s) as stream:
            pieces = [piece async for piece in stream]
            return wire.gathered(pieces, await stream.placements(), num_samples)

    def stream(
        self,
        prompt: str | None = None,
        *,
        num_samples: int = 1,
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncStream:
        """The answer as it comes. Closing the stream, or dropping it, aborts the request."""
        return self._start(prompt, options, num_samples, True, timeout_s)

    async def abort(self, request_id: str, *, timeout_s: float | None = None) -> bool:
        """End somebody's live request with finish reason `abort`; False if no such request lives."""
        return (await self._call(self._stub.Abort, pb.AbortRequest(request_id=request_id), timeout_s)).found

    async def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Sequence[Mapping[str, str]] | None = None,
        add_special_tokens: bool | None = None,
        timeout_s: float | None = None,
    ) -> tuple[int, ...]:
        request = wire.encode_tokenize(text, messages, add_special_tokens)
        return tuple((await self._call(self._stub.Tokenize, request, timeout_s)).token_ids)

    async def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool | None = None, timeout_s: float | None = None
    ) -> str:
        request = wire.encode_detokenize(token_ids, skip_special_tokens)
        return (await self._call(self._stub.Detokenize, request, timeout_s)).text

    async def model_info(self, *, timeout_s: float | None = None) -> ModelCard:
        return decode_model(await self._call(self._stub.GetModelInfo, pb.GetModelInfoRequest(), timeout_s))

    async def server_info(self, *, timeout_s: float | None = None) -> ServerInfo:
        return wire.decode_server(await self._call(self._stub.GetServerInfo, pb.GetServerInfoRequest(), timeout_s))

    async def loads(self, *, check_integrity: bool = False, timeout_s: float | None = None) -> tuple[RankLoad, ...]:
        """What each rank of the node has on its hands. check_integrity: InternalError where its tables disagree."""
        request = pb.GetLoadsRequest(check_integrity=check_integrity)
        return decode_loads(await self._call(self._stub.GetLoads, request, timeout_s))

    def rounds(
        self, *, last: int = DEFAULT_LAST, follow: bool = False, timeout_s: float | None = None
    ) -> AsyncResponses[RankRounds]:
        """The last rounds of each rank of a node of any kind, and, if follow, those to come, until it is closed.

        Each batch is of one rank, in order. A caller that reads too slowly finds in `num_lost` what it missed.
        """
        request = admin_pb2.StreamRoundsRequest(last=checked_last(last), follow=follow)
        call = self._admin.StreamRounds(request, timeout=self._deadline(timeout_s))
        return AsyncResponses(call, self._where, decode_rounds)

    async def health(self, *, timeout_s: float | None = None) -> Health:
        """What the node says of itself as a whole, by grpc.health.v1. Raises NotReady where nobody answers."""
        check = self._channel.unary_unary(HEALTH_METHOD, bytes, decode_health)
        return await self._call(check, b"", timeout_s)

    def _start(
        self,
        prompt: str | None,
        options: GenerateOptions,
        num_samples: int,
        is_streamed: bool,
        timeout_s: float | None,
    ) -> AsyncStream:
        request = wire.encode_generate(
            prompt,
            options,
            num_samples=num_samples,
            is_streamed=is_streamed,
            max_message_bytes=self._max_message_bytes,
        )
        call = self._stub.Generate(request, timeout=self._deadline(timeout_s))
        return AsyncStream(call, self._where, wire.decode_piece)

    async def _call(self, method: Callable[..., Awaitable[T]], request: Any, timeout_s: float | None) -> T:
        try:
            return await method(request, timeout=self._deadline(timeout_s))
        except grpc.aio.AioRpcError as error:
            raise _error_of(error, self._where) from None

    def _deadline(self, timeout_s: float | None) -> float | None:
        return checked_timeout(self._timeout_s if timeout_s is None else timeout_s)


class AsyncResponses(Generic[Response]):
    """What a node says as it comes: iterate over it, once. Leaving an `async with` or closing it ends the call."""

    def __init__(self, call: grpc.aio.UnaryStreamCall[Any, Any], where: str, decode: Callable[[Any], Response]) -> None:
        """where: the targets, for what is told of a call that fails."""
        self._call = call
        self._where = where
        self._decode = decode
        self._is_answering = False
        self._responses = call.__aiter__()
        self._is_closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()

    def __aiter__(self) -> AsyncIterator[Response]:
        return self

    async def __anext__(self) -> Response:
        try:
            response = await anext(self._responses)
        except grpc.aio.AioRpcError as error:
            raise _error_of(error, self._where, self._is_answering) from None
        except asyncio.CancelledError:
            if self._is_closed and not _is_cancelled():
                raise StopAsyncIteration from None
            raise
        self._is_answering = True
        return self._decode(response)

    def close(self) -> None:
        self._is_closed = True
        self._call.cancel()


class AsyncStream(AsyncResponses[Piece]):
    """An answer as it comes. Ending the call aborts what is left of it."""

    async def placements(self) -> tuple[str, ...]:
        """Where each sample's prompt was prefilled, in index order. Waits for the end of the stream."""
        return placements_in(cast(Any, await self._call.trailing_metadata()))


def _is_cancelled() -> bool:
    """The caller's own task is, rather than the call it waits for (gRPC raises the same for both)."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _error_of(error: grpc.aio.AioRpcError, where: str, is_answering: bool = False) -> PdserveError:
    return error_from(error.code(), error.details(), cast(Any, error.trailing_metadata()), where, is_answering)
