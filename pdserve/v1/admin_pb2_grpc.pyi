"""Types of the gRPC half, written by proto/generate.py."""

from typing import Any

import grpc
import grpc.aio

from pdserve.v1 import admin_pb2

class AdminStub:
    def __init__(self, channel: grpc.Channel) -> None: ...
    StreamRounds: grpc.UnaryStreamMultiCallable[admin_pb2.StreamRoundsRequest, admin_pb2.StreamRoundsResponse]

class AdminAsyncStub:
    def __init__(self, channel: grpc.aio.Channel) -> None: ...
    StreamRounds: grpc.aio.UnaryStreamMultiCallable[admin_pb2.StreamRoundsRequest, admin_pb2.StreamRoundsResponse]

class AdminServicer: ...

def add_AdminServicer_to_server(servicer: Any, server: grpc.Server | grpc.aio.Server) -> None: ...
