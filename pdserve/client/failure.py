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


def error_from(code: grpc.StatusCode, details: str | None, metadata: Metadata | None) -> PdserveError:
    """The error the node raised, with its message."""
    values = dict(metadata or ())
    message = details or f"the call ended with {code.name}"
    cls = BY_NAME.get(str(values.get(ERROR_KEY)), BY_CODE.get(code, InternalError))
    if code is grpc.StatusCode.DEADLINE_EXCEEDED and ERROR_KEY not in values:
        message = "the answer was not complete within timeout_s"
    if issubclass(cls, QueueFull) and PUSHBACK_KEY in values:
        return cls(message, retry_after_s=int(values[PUSHBACK_KEY]) / 1000)
    return cls(message)


def placements_in(metadata: Metadata | None) -> tuple[str, ...]:
    """One a sample, in index order; empty when the node did not say."""
    return tuple(str(value) for key, value in metadata or () if key == PLACEMENT_KEY)
