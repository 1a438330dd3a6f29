"""Types of the gRPC half, written by proto/generate.py."""

from typing import Any

import grpc
import grpc.aio

from pdserve.v1 import inference_pb2

class InferenceStub:
    def __init__(self, channel: grpc.Channel) -> None: ...
    Generate: grpc.UnaryStreamMultiCallable[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]
    Abort: grpc.UnaryUnaryMultiCallable[inference_pb2.AbortRequest, inference_pb2.AbortResponse]
    Tokenize: grpc.UnaryUnaryMultiCallable[inference_pb2.TokenizeRequest, inference_pb2.TokenizeResponse]
    Detokenize: grpc.UnaryUnaryMultiCallable[inference_pb2.DetokenizeRequest, inference_pb2.DetokenizeResponse]
    GetModelInfo: grpc.UnaryUnaryMultiCallable[inference_pb2.GetModelInfoRequest, inference_pb2.GetModelInfoResponse]
    GetServerInfo: grpc.UnaryUnaryMultiCallable[inference_pb2.GetServerInfoRequest, inference_pb2.GetServerInfoResponse]
    GetLoads: grpc.UnaryUnaryMultiCallable[inference_pb2.GetLoadsRequest, inference_pb2.GetLoadsResponse]

class InferenceAsyncStub:
    def __init__(self, channel: grpc.aio.Channel) -> None: ...
    Generate: grpc.aio.UnaryStreamMultiCallable[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]
    Abort: grpc.aio.UnaryUnaryMultiCallable[inference_pb2.AbortRequest, inference_pb2.AbortResponse]
    Tokenize: grpc.aio.UnaryUnaryMultiCallable[inference_pb2.TokenizeRequest, inference_pb2.TokenizeResponse]
    Detokenize: grpc.aio.UnaryUnaryMultiCallable[inference_pb2.DetokenizeRequest, inference_pb2.DetokenizeResponse]
    GetModelInfo: grpc.aio.UnaryUnaryMultiCallable[inference_pb2.GetModelInfoRequest, inference_pb2.GetModelInfoResponse]
    GetServerInfo: grpc.aio.UnaryUnaryMultiCallable[inference_pb2.GetServerInfoRequest, inference_pb2.GetServerInfoResponse]
    GetLoads: grpc.aio.UnaryUnaryMultiCallable[inference_pb2.GetLoadsRequest, inference_pb2.GetLoadsResponse]

class InferenceServicer: ...

def add_InferenceServicer_to_server(servicer: Any, server: grpc.Server | grpc.aio.Server) -> None: ...
