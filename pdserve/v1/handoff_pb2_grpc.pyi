"""Types of the gRPC half, written by proto/generate.py."""

from typing import Any

import grpc
import grpc.aio

from pdserve.v1 import handoff_pb2

class HandoffStub:
    def __init__(self, channel: grpc.Channel) -> None: ...
    Describe: grpc.UnaryUnaryMultiCallable[handoff_pb2.DescribeRequest, handoff_pb2.DescribeResponse]
    Prefill: grpc.StreamStreamMultiCallable[handoff_pb2.PrefillRequest, handoff_pb2.PrefillResponse]

class HandoffAsyncStub:
    def __init__(self, channel: grpc.aio.Channel) -> None: ...
    Describe: grpc.aio.UnaryUnaryMultiCallable[handoff_pb2.DescribeRequest, handoff_pb2.DescribeResponse]
    Prefill: grpc.aio.StreamStreamMultiCallable[handoff_pb2.PrefillRequest, handoff_pb2.PrefillResponse]

class HandoffServicer: ...

def add_HandoffServicer_to_server(servicer: Any, server: grpc.Server | grpc.aio.Server) -> None: ...
