"""grpc.health.v1 without its stubs, which the SDK does not bring along.

A HealthCheckRequest for the node as a whole is empty; a HealthCheckResponse is its field 1, an enum, or nothing for 0.
"""

from __future__ import annotations

from pdserve.client.types import Health

HEALTH_METHOD = "/grpc.health.v1.Health/Check"
RESPONSES = {b"\x08\x01": Health.SERVING, b"\x08\x02": Health.NOT_SERVING}


def decode_health(response: bytes) -> Health:
    """UNKNOWN for what a health service says besides."""
    return RESPONSES.get(response, Health.UNKNOWN)
