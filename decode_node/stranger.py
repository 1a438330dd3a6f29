"""A node in the list of prefill nodes that is none: what it is instead, for whoever wrote the list."""

from __future__ import annotations

from typing import Any, cast

import grpc

from decode_node.words import plain
from pdserve.config import Role
from pdserve.errors import PeerError, PeerMismatch
from pdserve.v1 import inference_pb2, inference_pb2_grpc

ASK_TIMEOUT_S = 5.0
REMEDY = "name prefill nodes in --prefill-peers"


async def what_it_is(channel: grpc.aio.Channel, my_incarnation: str) -> PeerError:
    """Of a node that answers calls and has no Handoff service."""
    stub = cast("inference_pb2_grpc.InferenceAsyncStub", inference_pb2_grpc.InferenceStub(cast(Any, channel)))
    try:
        info = await stub.GetServerInfo(inference_pb2.GetServerInfoRequest(), timeout=ASK_TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return PeerMismatch(f"it is no node of pdserve: {REMEDY}")
        return PeerError(plain(error))
    kind = info.settings.get("role", "")
    if info.settings.get("incarnation") == my_incarnation:
        return PeerMismatch(f"it is this node itself, a {kind} node: {REMEDY}")
    if kind and kind != Role.PREFILL:
        return PeerMismatch(f"it is a {kind} node: {REMEDY}")
    return PeerError("it has no Handoff service")
