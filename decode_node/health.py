"""What a prefill node says of its health, as it says it: the quickest way to know that it goes, and that it is back."""

from __future__ import annotations

import asyncio

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from decode_node.words import plain
from pdserve.errors import PeerError

SERVICE = "pdserve.v1.Handoff"


class PeerHealth:
    """Of one connection. is_serving: None until it was heard. has_service: prompts can be handed to it at all.

    changed: set at each change.
    """

    def __init__(self, channel: grpc.aio.Channel, changed: asyncio.Event) -> None:
        self._stub = health_pb2_grpc.HealthStub(channel)
        self._changed = changed
        self.is_serving: bool | None = None
        self.has_service = True

    async def watch(self) -> PeerError:
        """Returns why nothing more can be heard.

        A node says that it serves no more when it drains, and when its rank has died; one that was killed says it by
        the broken stream.
        """
        try:
            async for answer in self._stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE)):
                self.has_service = answer.status != health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
                self.is_serving = answer.status == health_pb2.HealthCheckResponse.SERVING
                self._changed.set()
        except grpc.aio.AioRpcError as error:
            return PeerError(plain(error))
        return PeerError("it ended the stream that tells of its health")
