"""The Python SDK: `Client` and `AsyncClient`. Needs grpcio and protobuf, nothing else of a node."""

from pdserve.client.aio import AsyncClient, AsyncResponses, AsyncStream
from pdserve.client.sync import Client, Responses, Stream
from pdserve.client.types import Answer, GenerateOptions, Health, Piece, ServerInfo, Usage
from pdserve.rounds import GateDecision, RankRounds, Round

__all__ = [
    "Answer",
    "AsyncClient",
    "AsyncResponses",
    "AsyncStream",
    "Client",
    "GateDecision",
    "GenerateOptions",
    "Health",
    "Piece",
    "RankRounds",
    "Responses",
    "Round",
    "ServerInfo",
    "Stream",
    "Usage",
]
