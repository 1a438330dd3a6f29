"""The Python SDK: `Client` and `AsyncClient`. Needs grpcio and protobuf, nothing else of a node."""

from pdserve.client.aio import AsyncClient, AsyncStream
from pdserve.client.sync import Client, Stream
from pdserve.client.types import Answer, GenerateOptions, Health, Piece, ServerInfo, Usage

__all__ = [
    "Answer",
    "AsyncClient",
    "AsyncStream",
    "Client",
    "GenerateOptions",
    "Health",
    "Piece",
    "ServerInfo",
    "Stream",
    "Usage",
]
