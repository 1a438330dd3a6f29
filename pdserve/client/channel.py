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
# Targets that gRPC reads by itself, such as dns:///NAME:PORT.
URI_SCHEMES = ("dns:", "ipv4:", "ipv6:", "unix:", "unix-abstract:", "vsock:", "xds:")


def target_fault(target: str) -> str | None:
    """What is wrong with how it is written, as the rest of a sentence about it; None for HOST:PORT and gRPC's URIs."""
    if target.startswith(URI_SCHEMES):
        return None
    host, colon, port = target.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    if not colon or "," in target or (":" in host and not is_bracketed) or not host.strip("[]"):
        return f"must be HOST:PORT, such as {DEFAULT_TARGET}; an IPv6 address goes in brackets"
    if not (port.isascii() and port.isdecimal() and 1 <= int(port) <= 65535):
        return f"must be HOST:PORT with a port from 1 to 65535, such as {DEFAULT_TARGET}"
    return None


def joined(targets: str | Sequence[str]) -> str:
    """One gRPC target. Several nodes go by IP address, as gRPC resolves one name only. Raises InvalidRequest."""
    if not targets:
        raise InvalidRequest("targets is empty, it needs at least one address", "targets")
    listed = [targets] if isinstance(targets, str) else list(targets)
    if faults := [f"target {target!r} {fault}" for target in listed if (fault := target_fault(target))]:
        raise InvalidRequest("; ".join(faults), "targets")
    if len(listed) == 1:
        return listed[0]
    schemes = {_scheme(target) for target in listed}
    if len(schemes) > 1:
        raise InvalidRequest("targets mix IPv4 and IPv6, they must be of one kind", "targets")
    return f"{schemes.pop()}:{','.join(listed)}"


def shown(targets: str | Sequence[str]) -> str:
    """The targets as a person would write them."""
    return targets if isinstance(targets, str) else ",".join(targets)


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
