"""What gRPC says of a peer that fails, in words for people."""

from __future__ import annotations

import grpc

QUIET = "it went quiet: nothing comes back from it, as from a process that was stopped or a network that was cut"
# What gRPC calls a connection over which nothing comes back.
SIGNS_OF_QUIET = ("ping", "keepalive", "timed out", "timeout")


def plain(error: grpc.aio.AioRpcError) -> str:
    """Always the same for the same trouble: nothing in it counts or names a stream."""
    details = error.details() or "no reason given"
    is_cut = error.code() is grpc.StatusCode.UNAVAILABLE and any(sign in details.lower() for sign in SIGNS_OF_QUIET)
    if is_cut or error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return QUIET
    return f"{error.code().name}: {details}"
