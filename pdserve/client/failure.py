"""gRPC statuses back into pdserve's errors."""

from __future__ import annotations

from collections.abc import Iterable

import grpc

from pdserve.errors import (
    BY_NAME,
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    NotReady,
    PdserveError,
    QueueFull,
    RequestIdInUse,
    WrongRole,
)
from pdserve.rpc.metadata import ERROR_KEY, PLACEMENT_KEY, PUSHBACK_KEY

Metadata = Iterable[tuple[str, str | bytes]]

# For statuses that gRPC itself made up. RESOURCE_EXHAUSTED without a name: a message over the size limit.
BY_CODE: dict[grpc.StatusCode, type[PdserveError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.RESOURCE_EXHAUSTED: InvalidRequest,
    grpc.StatusCode.ALREADY_EXISTS: RequestIdInUse,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.FAILED_PRECONDITION: WrongRole,
    grpc.StatusCode.UNIMPLEMENTED: WrongRole,
    grpc.StatusCode.UNAVAILABLE: NotReady,
}
# How gRPC begins what it says where nobody listens, and of a name that nobody knows.
UNREACHABLE = ("failed to connect to all addresses", "connections to all backends failing")
UNRESOLVED = ("DNS resolution failed", "Name resolution failure", "errors resolving")


def error_from(
    code: grpc.StatusCode,
    details: str | None,
    metadata: Metadata | None,
    where: str = "the target",
    is_answering: bool = False,
) -> PdserveError:
    """The error the node raised, with its message; of what gRPC found out by itself, what it means.

    where: the targets that were called. is_answering: part of the answer has come.
    """
    values = dict(metadata or ())
    cls = BY_NAME.get(str(values.get(ERROR_KEY)), BY_CODE.get(code, InternalError))
    message = details or f"the call ended with {code.name}"
    if ERROR_KEY not in values:
        message = _in_plain_words(code, message, where, is_answering)
    if issubclass(cls, QueueFull) and PUSHBACK_KEY in values:
        return cls(message, retry_after_s=int(values[PUSHBACK_KEY]) / 1000)
    return cls(message)


def _in_plain_words(code: grpc.StatusCode, details: str, where: str, is_answering: bool) -> str:
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return "the answer was not complete within timeout_s"
    if code is not grpc.StatusCode.UNAVAILABLE:
        return details
    if details.startswith(UNRESOLVED):
        return f"the host of {where} is not known; check how it is written"
    if details.startswith(UNREACHABLE):
        return f"no node answers at {where}; start one with `pdserve up smollm2`, or name another target"
    reason = details.removeprefix("Stream removed ").strip("()")
    if is_answering:
        again = "what came of the answer is not all of it; asked again, it starts from its beginning"
        return f"the node at {where} went away in the middle of the answer ({reason}); {again}"
    return f"the node at {where} went away before it answered ({reason}); the request may be sent again"


def placements_in(metadata: Metadata | None) -> tuple[str, ...]:
    """One a sample, in index order; empty when the node did not say."""
    return tuple(str(value) for key, value in metadata or () if key == PLACEMENT_KEY)
