"""Every error pdserve raises on purpose.

    PdserveError
    ├── the caller's fault
    │   ├── InvalidRequest        INVALID_ARGUMENT     names the field, the value and the limit
    │   ├── RequestIdInUse        ALREADY_EXISTS
    │   ├── QueueFull             RESOURCE_EXHAUSTED   with the seconds after which a retry makes sense
    │   ├── DeadlineExceeded      DEADLINE_EXCEEDED
    │   ├── Cancelled             CANCELLED
    │   └── WrongRole             FAILED_PRECONDITION  this node does not answer that call
    ├── the peer's fault
    │   └── PeerError             UNAVAILABLE
    │       ├── PeerMismatch      FAILED_PRECONDITION  two nodes that must not be paired
    │       ├── PeerReplaced      FAILED_PRECONDITION  it was started anew since it was described
    │       ├── PeerBusy          UNAVAILABLE          it has no room to let a prompt wait
    │       ├── ProtocolError     UNAVAILABLE          a message out of order, a bad range, a wrong id
    │       └── TransferFailed    UNAVAILABLE          KV that was never confirmed
    ├── ours
    │   ├── NotReady              UNAVAILABLE          starting, draining, rank lost
    │   └── InternalError         INTERNAL
    └── StartupError              (no status)          one line and its remedy, printed without a traceback

`status` is the name of a gRPC status code; this module imports nothing, so that the SDK can share it.
"""

from __future__ import annotations

from typing import ClassVar


class PdserveError(Exception):
    """Base of all; `message` is fit for a client to read."""

    status: ClassVar[str] = "INTERNAL"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class InvalidRequest(PdserveError):
    """A request that can never be served as it stands; the message names the field, the value and the limit.

    field: the name alone, for a caller that wants to point at it.
    """

    status = "INVALID_ARGUMENT"

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class RequestIdInUse(PdserveError):
    """A live request has this id already."""

    status = "ALREADY_EXISTS"


class QueueFull(PdserveError):
    """No room to wait; worth a retry after `retry_after_s` seconds."""

    status = "RESOURCE_EXHAUSTED"

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(PdserveError):
    """The caller's deadline passed before the answer was complete."""

    status = "DEADLINE_EXCEEDED"


class Cancelled(PdserveError):
    """The caller went away."""

    status = "CANCELLED"


class WrongRole(PdserveError):
    """This node's role does not serve the call."""

    status = "FAILED_PRECONDITION"


class PeerError(PdserveError):
    """Another node could not be reached or did not keep to the protocol."""

    status = "UNAVAILABLE"


class PeerMismatch(PeerError):
    """Two nodes whose KV cannot be exchanged; the message names the field and both values."""

    status = "FAILED_PRECONDITION"


class PeerReplaced(PeerError):
    """The life of the peer that was meant is over; another description of it is to be had."""

    status = "FAILED_PRECONDITION"


class PeerBusy(PeerError):
    """The peer is well and takes no more prompts now."""


class ProtocolError(PeerError):
    """A peer's message out of order, a gap or an overlap, an id or a range out of bounds."""


class TransferFailed(PeerError):
    """KV that did not arrive, or arrived and was not confirmed."""


class NotReady(PdserveError):
    """This node is starting, draining, or lost its rank."""

    status = "UNAVAILABLE"


class InternalError(PdserveError):
    """A promise of ours was broken."""


class StartupError(PdserveError):
    """The node cannot start; `message` is one line that ends with the remedy."""


def _concrete(root: type[PdserveError]) -> dict[str, type[PdserveError]]:
    found = {root.__name__: root}
    for child in root.__subclasses__():
        found |= _concrete(child)
    return found


BY_NAME: dict[str, type[PdserveError]] = _concrete(PdserveError)


def named(name: str, message: str) -> PdserveError:
    """The error called `name`, as another process of ours reported it; an unknown name is an InternalError."""
    return BY_NAME.get(name, InternalError)(message)
