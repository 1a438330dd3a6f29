"""Around every call of every service: errors become statuses, bytes that are no message become INVALID_ARGUMENT,
and a node that is starting or draining takes no new streams.

Handlers raise PdserveErrors and know nothing of status codes.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from pdserve.errors import InternalError, InvalidRequest, NotReady, PdserveError
from pdserve.rpc.status import status_of

log = logging.getLogger(__name__)

# Their callers stay for as long as they like: a drain does not wait for them, and they may ask at any time.
WATCHERS = ("/grpc.health.", "/grpc.reflection.", "/pdserve.v1.Admin/StreamRounds")

Context = grpc.aio.ServicerContext[Any, Any]
Handler = Any  # grpc.RpcMethodHandler of any messages


@dataclass(frozen=True, slots=True)
class Undecodable:
    """Takes the place of a request whose bytes are not one."""

    reason: str


class Boundary(grpc.aio.ServerInterceptor):
    """Belongs to the event loop of its server. refusal: why new streams are not taken now, if they aren't."""

    def __init__(self) -> None:
        self.refusal: str | None = "the node is starting; wait until its health is SERVING"
        self._calls: set[asyncio.Task[Any]] = set()
        self._watchers: set[asyncio.Task[Any]] = set()
        self._is_ending = False
        self._idle = asyncio.Event()
        self._idle.set()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        handler = await continuation(handler_call_details)
        return None if handler is None else self._guarded(handler, handler_call_details.method)

    async def wait_idle(self) -> None:
        """Returns when no call but watchers is open."""
        await self._idle.wait()

    def end_calls(self) -> None:
        """End every open call with UNAVAILABLE."""
        self._is_ending = True
        for task in self._calls | self._watchers:
            task.cancel()

    def _guarded(self, handler: Handler, method: str) -> Handler:
        behaviour = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream

        async def call(request: Any, context: Context) -> Any:
            async with self._call(request, context, handler, method):
                return await behaviour(request, context)

        async def stream(request: Any, context: Context) -> None:
            """A generator is closed here and now, where gRPC would leave that to the garbage collector."""
            async with (
                self._call(request, context, handler, method),
                aclosing(behaviour(request, context)) as responses,
            ):
                async for response in responses:
                    await context.write(response)

        return _rebuilt(handler, stream if inspect.isasyncgenfunction(behaviour) else call)

    @asynccontextmanager
    async def _call(self, request: Any, context: Context, handler: Handler, method: str) -> AsyncIterator[None]:
        task = asyncio.current_task()
        assert task is not None
        is_watcher = method.startswith(WATCHERS)
        (self._watchers if is_watcher else self._calls).add(task)
        if not is_watcher:
            self._idle.clear()
        try:
            self._check(request, needs_open_node=handler.response_streaming and not is_watcher)
            yield
        except PdserveError as error:
            await _abort(context, error)
        except asyncio.CancelledError:
            if not self._is_ending:
                raise  # the caller went away or its deadline passed: nobody is left to tell
            await _abort(context, NotReady("the node stopped before the answer was complete"))
        except DecodeError as error:  # from the stream of requests that the handler reads
            await _abort(context, _undecodable(str(error)))
        except grpc.aio.AbortError:
            raise
        except grpc.aio.BaseError:  # a write to a caller who has gone: the same as a cancellation, found out earlier
            raise asyncio.CancelledError from None
        except Exception:
            if context.done():
                raise
            log.exception("call of %s failed", method)
            await _abort(context, InternalError("internal error; the node's log has the details"))
        finally:
            self._watchers.discard(task)
            self._calls.discard(task)
            if not self._calls:
                self._idle.set()

    def _check(self, request: Any, *, needs_open_node: bool) -> None:
        if isinstance(request, Undecodable):
            raise _undecodable(request.reason)
        if needs_open_node and self.refusal is not None:
            raise NotReady(self.refusal)


async def _abort(context: Context, error: PdserveError) -> None:
    """End the call with the error's status, and with the metadata that its handler set beside it."""
    code, message, metadata = status_of(error)
    await context.abort(code, message, (*(context.trailing_metadata() or ()), *metadata))


def _rebuilt(handler: Handler, behaviour: Callable[..., Any]) -> Handler:
    make = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[handler.request_streaming, handler.response_streaming]
    deserializer = handler.request_deserializer
    if not handler.request_streaming:
        deserializer = _lenient(deserializer)
    return make(behaviour, deserializer, handler.response_serializer)


def _undecodable(reason: str) -> InvalidRequest:
    return InvalidRequest(f"the request's bytes are not a message of this call: {reason}")


def _lenient(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """gRPC would answer UNKNOWN for bytes that do not parse, before any handler saw them."""

    def deserialized(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError as error:
            return Undecodable(str(error))

    return deserialized
