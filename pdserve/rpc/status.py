"""Errors as gRPC statuses with google.rpc details."""

from __future__ import annotations

import grpc
from google.protobuf.any_pb2 import Any
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo  # type: ignore[import-untyped]
from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]

from pdserve.errors import InvalidRequest, PdserveError, QueueFull
from pdserve.rpc.metadata import DETAILS_KEY, ERROR_KEY, PUSHBACK_KEY

# The text travels three times in one header block, once percent-encoded, and peers refuse blocks of more than 8 KiB.
MAX_MESSAGE_BYTES = 1000

Metadata = tuple[tuple[str, str | bytes], ...]


def status_of(error: PdserveError) -> tuple[grpc.StatusCode, str, Metadata]:
    """Code, message and trailing metadata."""
    code = grpc.StatusCode[error.status]
    text = clipped(error.message)
    status = Status(code=code.value[0], message=text, details=[_packed(detail) for detail in _details(error, text)])
    metadata: Metadata = ((ERROR_KEY, type(error).__name__), (DETAILS_KEY, status.SerializeToString()))
    if isinstance(error, QueueFull):
        # gRPC's own retry policy reads this one and waits as long.
        metadata += ((PUSHBACK_KEY, str(round(error.retry_after_s * 1000))),)
    return code, text, metadata


def clipped(text: str) -> str:
    data = text.encode("utf-8", "backslashreplace")
    return data.decode() if len(data) <= MAX_MESSAGE_BYTES else data[:MAX_MESSAGE_BYTES].decode(errors="ignore") + "..."


def _details(error: PdserveError, text: str) -> list[Message]:
    details: list[Message] = [ErrorInfo(reason=type(error).__name__, domain="pdserve")]
    if isinstance(error, InvalidRequest) and error.field is not None:
        violation = BadRequest.FieldViolation(field=error.field, description=text)
        details.append(BadRequest(field_violations=[violation]))
    if isinstance(error, QueueFull):
        delay = Duration()
        delay.FromMilliseconds(round(error.retry_after_s * 1000))
        details.append(RetryInfo(retry_delay=delay))
    return details


def _packed(message: Message) -> Any:
    packed = Any()
    packed.Pack(message)
    return packed
