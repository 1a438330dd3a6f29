"""A node's gRPC server: services, health and reflection on one port."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import grpc
from grpc_reflection.v1alpha import reflection

from pdserve.errors import StartupError
from pdserve.rpc import health
from pdserve.rpc.boundary import Boundary
from pdserve.rpc.channel import server_options
from pdserve.rpc.limits import MAX_MESSAGE_BYTES

# After the calls were told, how long their statuses may take to reach a slow caller.
FLUSH_S = 1.0


@dataclass(frozen=True, slots=True)
class Service:
    """A servicer and the name of its service, `pdserve.v1.Inference` say."""

    name: str
    register: Callable[[grpc.aio.Server], None]


class Switchboard(grpc.GenericRpcHandler):
    """A new call goes to the services of the moment; one under way stays with those it began with."""

    def __init__(self) -> None:
        self._handlers: list[grpc.GenericRpcHandler] = []

    def use(self, services: Sequence[Service]) -> None:
        recorder = _Recorder([])
        for service in services:
            service.register(cast(grpc.aio.Server, recorder))
        self._handlers = recorder.handlers

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """The handler of a call, None for a method that no service has."""
        found = (handler.service(handler_call_details) for handler in self._handlers)
        return next((handler for handler in found if handler is not None), None)


@dataclass(frozen=True, slots=True)
class _Recorder:
    """Stands where generated code registers a servicer, as a server takes no services after its start."""

    handlers: list[grpc.GenericRpcHandler]

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        self.handlers.extend(handlers)

    def add_registered_method_handlers(self, service_name: str, method_handlers: object) -> None:
        """The same handlers once more, by name; a registered one would win over the switchboard."""


class RpcServer:
    """start → set_serving(True) after the warm-up → stop. Belongs to the event loop it was made in."""

    def __init__(
        self,
        services: Sequence[Service],
        *,
        host: str = "127.0.0.1",
        port: int = 50051,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        has_reflection: bool = True,
    ) -> None:
        """port 0 takes a free one; `start` says which."""
        self._host = host
        self._port = port
        self._boundary = Boundary()
        self._health = health.Health([service.name for service in services])
        self._server = grpc.aio.server(interceptors=[self._boundary], options=server_options(max_message_bytes))
        self._health.register(self._server)
        self._switchboard = Switchboard()
        self._switchboard.use(services)
        self._server.add_generic_rpc_handlers((self._switchboard,))
        if has_reflection:
            names = [*(service.name for service in services), health.SERVICE_NAME, reflection.SERVICE_NAME]
            reflection.enable_server_reflection(names, self._server)

    async def start(self) -> int:
        """Listen, NOT_SERVING and taking no streams; the port. Raises StartupError when the address can't be had."""
        check_address(self._host, self._port)
        host = f"[{self._host}]" if ":" in self._host else self._host
        try:
            port = self._server.add_insecure_port(f"{host}:{self._port}")
        except RuntimeError as error:
            raise cannot_listen(self._host, self._port, str(error)) from error
        await self._health.set_serving(False)
        await self._server.start()
        return port

    def use(self, services: Sequence[Service]) -> None:
        """From now on new calls go to these, of the names given at first."""
        self._switchboard.use(services)

    async def set_serving(self, is_serving: bool) -> None:
        """What health says. The first True also opens the node to streams; a later False closes it to none."""
        if is_serving:
            self._boundary.refusal = None
        await self._health.set_serving(is_serving)

    async def stop(self, grace_s: float) -> None:
        """Take no new streams, let open calls end for grace_s seconds, end the rest with UNAVAILABLE, close."""
        self._boundary.refusal = "the node is draining; another one may answer"
        await self._health.set_serving(False)
        await self._wait_idle(grace_s)
        self._boundary.end_calls()
        await self._wait_idle(FLUSH_S)
        await self._server.stop(FLUSH_S)

    async def _wait_idle(self, limit_s: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._boundary.wait_idle(), limit_s)


def check_address(host: str, port: int) -> None:
    """Raises StartupError, in one line, where gRPC would write its own to standard error first."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        raise cannot_listen(host, port, error.strerror or str(error)) from error


def cannot_listen(host: str, port: int, reason: str) -> StartupError:
    return StartupError(f"cannot listen on {host} port {port}: {reason}; choose others with --host and --port")
