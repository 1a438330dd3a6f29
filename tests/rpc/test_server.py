import asyncio

import grpc
import grpc.aio
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub

from pdserve.errors import ProtocolError, StartupError
from pdserve.request import RequestId
from pdserve.rpc.fake import CARD, ByteTokenizer, EchoGenerator
from pdserve.rpc.inference import SERVICE_NAME, InferenceServicer, inference_service
from pdserve.rpc.server import RpcServer, Service
from pdserve.v1 import handoff_pb2 as handoff
from pdserve.v1 import inference_pb2 as pb
from pdserve.v1.handoff_pb2_grpc import HandoffStub, add_HandoffServicer_to_server
from pdserve.v1.inference_pb2_grpc import InferenceStub

SERVING, NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING


def server_of(generator: EchoGenerator, port: int = 0) -> RpcServer:
    return RpcServer([inference_service(InferenceServicer(generator, ByteTokenizer(), CARD))], port=port)


async def status(channel: grpc.aio.Channel, service: str) -> int:
    return (await HealthStub(channel).Check(HealthCheckRequest(service=service))).status


async def test_a_node_is_red_and_takes_no_streams_until_it_serves(generator: EchoGenerator) -> None:
    server = server_of(generator)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{await server.start()}") as channel:
        assert [await status(channel, name) for name in ("", SERVICE_NAME)] == [NOT_SERVING, NOT_SERVING]
        with pytest.raises(grpc.aio.AioRpcError, match="starting") as failure:
            await InferenceStub(channel).Generate(pb.GenerateRequest(text="hi")).read()
        assert failure.value.code() == grpc.StatusCode.UNAVAILABLE
        assert (await InferenceStub(channel).GetModelInfo(pb.GetModelInfoRequest())).served_model_name == "fake"
        await server.set_serving(True)
        assert [await status(channel, name) for name in ("", SERVICE_NAME)] == [SERVING, SERVING]
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await status(channel, "pdserve.v1.Unknown")
        assert failure.value.code() == grpc.StatusCode.NOT_FOUND
    await server.stop(grace_s=0)


async def test_stop_lets_open_calls_end_and_takes_no_new_ones(generator: EchoGenerator) -> None:
    generator.hold_after = 1
    server = server_of(generator)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{await server.start()}") as channel:
        await server.set_serving(True)
        watch = HealthStub(channel).Watch(HealthCheckRequest(service=""))
        assert (await watch.read()).status == SERVING
        stub = InferenceStub(channel)
        call = stub.Generate(pb.GenerateRequest(text="hi", request_id="a", stream=True))
        await call.read()
        stopping = asyncio.create_task(server.stop(grace_s=60))
        assert (await watch.read()).status == NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError, match="draining"):
            await stub.Generate(pb.GenerateRequest(text="hi")).read()
        assert (await stub.Abort(pb.AbortRequest(request_id="a"))).found
        assert (await call.read()).complete.finish_reason == pb.FINISH_REASON_ABORT
        await stopping
        assert await call.code() == grpc.StatusCode.OK


async def test_calls_that_outlast_the_grace_end_with_unavailable(generator: EchoGenerator) -> None:
    generator.hold_after = 1
    server = server_of(generator)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{await server.start()}") as channel:
        await server.set_serving(True)
        call = InferenceStub(channel).Generate(pb.GenerateRequest(text="hi", request_id="a", stream=True))
        await call.read()
        await server.stop(grace_s=0)
        with pytest.raises(grpc.aio.AioRpcError, match="node stopped"):
            await call.read()
        assert await call.code() == grpc.StatusCode.UNAVAILABLE
        assert await generator.closed.get() == "a"


async def test_a_port_in_use_is_refused_with_the_remedy(generator: EchoGenerator) -> None:
    first = server_of(generator)
    port = await first.start()
    with pytest.raises(StartupError, match=f"port {port}: Address already in use; choose others with --host"):
        await server_of(generator, port).start()
    await first.stop(grace_s=0)


async def test_reflection_names_the_services(generator: EchoGenerator) -> None:
    server = server_of(generator)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{await server.start()}") as channel:
        asked = iter([ServerReflectionRequest(list_services="")])
        call = ServerReflectionStub(channel).ServerReflectionInfo(asked)
        names = {service.name for service in (await call.read()).list_services_response.service}
        assert names == {SERVICE_NAME, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
        call.cancel()
    await server.stop(grace_s=0)


class _Handoff:
    """Bidirectional, as an async generator: says one thing, then fails or waits."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()

    async def Describe(self, request, context):  # type: ignore[no-untyped-def]
        return handoff.DescribeResponse()

    async def Prefill(self, requests, context):  # type: ignore[no-untyped-def]
        try:
            async for request in requests:
                if request.WhichOneof("kind") == "renew":
                    raise ProtocolError("a Renew before Accepted")
                yield handoff.PrefillResponse(released=handoff.Released(valid=True))
        finally:
            self.closed.set()


async def test_a_generator_handler_is_closed_when_its_caller_goes_and_its_errors_have_their_status() -> None:
    servicer = _Handoff()
    service = Service("pdserve.v1.Handoff", lambda server: add_HandoffServicer_to_server(servicer, server))
    server = RpcServer([service], port=0)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{await server.start()}") as channel:
        await server.set_serving(True)
        call = HandoffStub(channel).Prefill()
        await call.write(handoff.PrefillRequest(release=handoff.Release(lease_id="l")))
        assert (await call.read()).released.valid
        call.cancel()
        await servicer.closed.wait()
        call = HandoffStub(channel).Prefill()
        await call.write(handoff.PrefillRequest(renew=handoff.Renew(lease_id="l")))
        with pytest.raises(grpc.aio.AioRpcError, match="a Renew before Accepted") as failure:
            await call.read()
        assert failure.value.code() == grpc.StatusCode.UNAVAILABLE
        raw = channel.stream_stream("/pdserve.v1.Handoff/Prefill")()
        await raw.write(b"\xff")
        with pytest.raises(grpc.aio.AioRpcError, match="not a message of this call") as failure:
            await raw.read()
        assert failure.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    await server.stop(grace_s=0)


async def test_new_calls_go_to_the_services_of_the_moment_and_open_ones_stay_with_theirs(
    generator: EchoGenerator,
) -> None:
    generator.hold_after = 1
    server = server_of(generator)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{await server.start()}") as channel:
        await server.set_serving(True)
        stub = InferenceStub(channel)
        open_call = stub.Generate(pb.GenerateRequest(text="old", request_id="old", stream=True))
        await open_call.read()
        server.use([inference_service(InferenceServicer(EchoGenerator(), ByteTokenizer(), CARD))])
        answer = await stub.Generate(pb.GenerateRequest(text="new")).read()
        assert answer.complete.output.text.startswith("new")
        assert not (await stub.Abort(pb.AbortRequest(request_id="old"))).found
        assert await generator.abort(RequestId("old"))
        assert (await open_call.read()).complete.finish_reason == pb.FINISH_REASON_ABORT
    await server.stop(grace_s=0)
