"""grpc.health.v1 for a node as a whole ("") and for each of its services."""

from __future__ import annotations

from collections.abc import Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio

SERVICE_NAME = "grpc.health.v1.Health"


class Health:
    """NOT_SERVING from `start` until the node says otherwise."""

    def __init__(self, service_names: Sequence[str]) -> None:
        self._names = ("", *service_names)
        self._servicer = aio.HealthServicer()

    def register(self, server: grpc.aio.Server) -> None:
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def set_serving(self, is_serving: bool) -> None:
        statuses = health_pb2.HealthCheckResponse
        status = statuses.SERVING if is_serving else statuses.NOT_SERVING
        for name in self._names:
            await self._servicer.set(name, status)
