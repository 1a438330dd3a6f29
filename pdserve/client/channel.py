"""Where a client connects to, and gRPC's own retries, round robin and failover."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Sequence
from typing import Any

from pdserve.errors import InvalidRequest
from pdserve.rpc.channel import ChannelOptions, channel_options

SERVICE_NAME = "pdserve.v1.Inference"
DEFAULT_TARGET = "127.0.0.1:50051"
MAX_ATTEMPTS = 4  # gRPC allows 5
MAX_RECONNECT_BACKOFF_MS = 5_000


def joined(targets: str | Sequence[str]) -> str:
    """One gRPC target. Several nodes go by IP address, as gRPC resolves one name only."""
    if isinstance(targets, str):
        return targets
    if not targets:
        raise InvalidRequest("targets is empty, it needs at least one address", "targets")
    if len(targets) == 1:
        return targets[0]
    schemes = {_scheme(target) for target in targets}
    if len(schemes) > 1:
        raise InvalidRequest("targets mix IPv4 and IPv6, they must be of one kind", "targets")
    return f"{schemes.pop()}:{','.join(targets)}"


def client_options(num_targets: int, max_attempts: int, max_message_bytes: int) -> ChannelOptions:
    return [
        # A client of its own connects at once, whatever others in this process found at the address before.
        ("grpc.use_local_subchannel_pool", 1),
        *channel_options(max_message_bytes),
        ("grpc.max_reconnect_backoff_ms", MAX_RECONNECT_BACKOFF_MS),
        # gRPC retries only what it still holds.
        ("grpc.per_rpc_retry_buffer_size", 2 * max_message_bytes),
        ("grpc.service_config", json.dumps(service_config(num_targets, max_attempts))),
    ]


def checked_timeout(timeout_s: float | None) -> float | None:
    """Raises InvalidRequest for what is no time."""
    if timeout_s is not None and not timeout_s > 0:
        raise InvalidRequest(f"timeout_s is {timeout_s}, it must be above 0, or None for no limit", "timeout_s")
    return timeout_s


def service_config(num_targets: int, max_attempts: int) -> dict[str, Any]:
    """A call is retried until its first message arrived, never after. A full queue says when to come back.

    One node is asked even when its health is red, since its own words say more than a missing connection.
    """
    names = [{"service": SERVICE_NAME}]
    method: dict[str, Any] = {"name": names}
    if max_attempts > 1:
        method["retryPolicy"] = {
            "maxAttempts": max_attempts,
            "initialBackoff": "0.1s",
            "maxBackoff": "2s",
            "backoffMultiplier": 2,
            "retryableStatusCodes": ["UNAVAILABLE", "RESOURCE_EXHAUSTED"],
        }
    config: dict[str, Any] = {"methodConfig": [method]}
    if num_targets > 1:
        config["loadBalancingConfig"] = [{"round_robin": {}}]
        config["healthCheckConfig"] = {"serviceName": SERVICE_NAME}
    return config


def _scheme(target: str) -> str:
    host = target.rpartition(":")[0].strip("[]")
    try:
        return f"ipv{ipaddress.ip_address(host).version}"
    except ValueError:
        raise InvalidRequest(
            f"target {target!r} is not ADDRESS:PORT with an IP address; give addresses, or one dns:///NAME:PORT",
            "targets",
        ) from None
