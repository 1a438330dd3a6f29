"""The service over real sockets, through a bare channel where the SDK would step in."""

import asyncio
import logging
import math
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from pdserve.errors import (
    InternalError,
    InvalidRequest,
    NotReady,
    PdserveError,
    PeerError,
    PeerMismatch,
    QueueFull,
    RequestIdInUse,
    TransferFailed,
    WrongRole,
)
from pdserve.request import RequestId
from pdserve.rpc.fake import BOS, EchoGenerator, fake_node
from pdserve.rpc.limits import Limits
from pdserve.v1 import inference_pb2 as pb
from pdserve.v1.inference_pb2_grpc import InferenceStub

GENERATE = "/pdserve.v1.Inference/Generate"
Call = Any  # grpc.aio's, of any messages


def asked(text: str = "hi", max_new_tokens: int = 3, **fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=text, sampling=pb.SamplingParams(max_new_tokens=max_new_tokens), **fields)


async def read(call: Call) -> list[pb.GenerateResponse]:
    """The responses from here on."""
    return [response async for response in call]


async def read_one(call: Call) -> Call:
    """The rest, after one response: a call can't be read from and then iterated over."""
    responses = call.__aiter__()
    await anext(responses)
    return responses


async def refused(call: Call) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await read(call)
    return failure.value


async def check_next_request_is_answered(channel: grpc.aio.Channel) -> None:
    responses = await read(InferenceStub(channel).Generate(asked()))
    assert [response.complete.output.text for response in responses] == ["hi"]


def details(error: grpc.aio.AioRpcError) -> dict[str, Any]:
    """google.rpc details by the name of their type."""
    metadata = dict(error.trailing_metadata())
    status = Status.FromString(metadata["grpc-status-details-bin"])
    assert status.message == error.details()
    found: dict[str, Any] = {}
    for packed in status.details:
        for kind in (BadRequest, ErrorInfo, RetryInfo):
            if packed.Is(kind.DESCRIPTOR):
                found[kind.__name__] = kind.FromString(packed.value)
    return found


# ---------------------------------------------------------------- answers


async def test_a_streamed_answer_is_chunks_and_one_complete(channel: grpc.aio.Channel) -> None:
    request = asked(stream=True, request_id="r1")
    request.sampling.logprobs = True
    request.sampling.prompt_logprobs = 0
    call = InferenceStub(channel).Generate(request)
    *chunks, end = await read(call)
    assert {response.request_id for response in (*chunks, end)} == {"r1"}
    assert [list(response.chunk.output.token_ids) for response in chunks] == [[BOS], [ord("h")], [ord("i")]]
    assert "".join(response.chunk.output.text for response in chunks) == "hi"
    assert [len(response.chunk.output.logprobs) for response in chunks] == [1, 1, 1]
    assert [response.chunk.output.HasField("prompt_logprobs") for response in chunks] == [True, False, False]
    assert [response.chunk.usage.completion_tokens for response in chunks] == [1, 2, 3]
    assert end.complete.finish_reason == pb.FINISH_REASON_LENGTH
    assert end.complete.usage == pb.Usage(prompt_tokens=3, completion_tokens=3, cached_tokens=1)
    assert not end.complete.HasField("output")
    assert ("pdserve-prefill", "local;reason=fused") in tuple(await call.trailing_metadata())


async def test_an_answer_that_is_not_streamed_is_one_complete_a_sample(channel: grpc.aio.Channel) -> None:
    request = asked()
    request.sampling.n = 3
    call = InferenceStub(channel).Generate(request)
    responses = await read(call)
    assert [response.complete.index for response in responses] == [0, 1, 2]
    assert {response.complete.output.text for response in responses} == {"hi"}
    placements = [value for key, value in tuple(await call.trailing_metadata()) if key == "pdserve-prefill"]
    assert placements == ["local;reason=fused"] * 3


async def test_input_may_be_tokens_or_a_chat(channel: grpc.aio.Channel, generator: EchoGenerator) -> None:
    stub = InferenceStub(channel)
    await read(stub.Generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[7, 8]))))
    message = pb.ChatMessage(role="user", content="x" * 5000)
    await read(stub.Generate(pb.GenerateRequest(chat=pb.Chat(messages=[message]))))
    assert generator.requests[0].prompt == (7, 8)
    assert bytes(generator.requests[1].prompt).decode() == f"user: {'x' * 5000}\n"


async def test_the_deadline_travels_as_time_left(channel: grpc.aio.Channel, generator: EchoGenerator) -> None:
    stub = InferenceStub(channel)
    await read(stub.Generate(asked()))
    await read(stub.Generate(asked(), timeout=60))
    assert generator.requests[0].time_left_s is None
    time_left_s = generator.requests[1].time_left_s
    assert time_left_s is not None
    assert 0 < time_left_s < 61  # gRPC rounds a timeout up on the wire


# ---------------------------------------------------------------- ends


async def test_cancelling_closes_the_generator(channel: grpc.aio.Channel, generator: EchoGenerator) -> None:
    generator.hold_after = 1
    call = InferenceStub(channel).Generate(asked(stream=True, request_id="c"))
    await call.read()
    call.cancel()
    assert await generator.closed.get() == "c"
    assert await call.code() == grpc.StatusCode.CANCELLED


async def test_a_passed_deadline_closes_the_generator(channel: grpc.aio.Channel, generator: EchoGenerator) -> None:
    generator.hold_after = 1
    error = await refused(InferenceStub(channel).Generate(asked(request_id="d"), timeout=0.2))
    assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert await generator.closed.get() == "d"


async def test_somebody_elses_abort_is_a_finish_reason(channel: grpc.aio.Channel, generator: EchoGenerator) -> None:
    generator.hold_after = 1
    stub = InferenceStub(channel)
    call = stub.Generate(asked(stream=True, request_id="a"))
    rest = await read_one(call)
    assert (await stub.Abort(pb.AbortRequest(request_id="a"))).found
    (end,) = await read(rest)
    assert end.complete.finish_reason == pb.FINISH_REASON_ABORT
    assert await call.code() == grpc.StatusCode.OK
    assert not (await stub.Abort(pb.AbortRequest(request_id="a"))).found


async def test_a_live_request_id_is_refused(channel: grpc.aio.Channel, generator: EchoGenerator) -> None:
    generator.hold_after = 1
    stub = InferenceStub(channel)
    rest = await read_one(stub.Generate(asked(stream=True, request_id="a")))
    assert (await refused(stub.Generate(asked(request_id="a")))).code() == grpc.StatusCode.ALREADY_EXISTS
    await generator.abort(RequestId("a"))
    assert len(await read(rest)) == 1


async def test_a_reader_that_takes_nothing_is_given_up(generator: EchoGenerator) -> None:
    async with (
        fake_node(generator, Limits(stalled_write_s=0.2)) as address,
        grpc.aio.insecure_channel(address, options=[("grpc.http2.bdp_probe", 0)]) as channel,
    ):
        call = InferenceStub(channel).Generate(asked("y" * 4000, 4000, stream=True, request_id="slow"))
        rest = await read_one(call)
        assert await generator.closed.get() == "slow"
        error = await refused(rest)
        assert error.code() == grpc.StatusCode.CANCELLED
        assert "took none of its answer for 0.2 s" in str(error.details())


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (InvalidRequest("x is 1, the limit is 0", "x"), grpc.StatusCode.INVALID_ARGUMENT),
        (RequestIdInUse("taken"), grpc.StatusCode.ALREADY_EXISTS),
        (QueueFull("full", 2.5), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (WrongRole("this node only prefills"), grpc.StatusCode.FAILED_PRECONDITION),
        (PeerError("no peer"), grpc.StatusCode.UNAVAILABLE),
        (PeerMismatch("dtype: 'a' here, 'b' there"), grpc.StatusCode.FAILED_PRECONDITION),
        (TransferFailed("lost"), grpc.StatusCode.UNAVAILABLE),
        (NotReady("starting"), grpc.StatusCode.UNAVAILABLE),
        (InternalError("broken promise"), grpc.StatusCode.INTERNAL),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, PdserveError) else value.name,
)
@pytest.mark.parametrize("fail_after", [0, 1])
async def test_each_error_has_its_status_and_the_next_request_is_answered(
    channel: grpc.aio.Channel, generator: EchoGenerator, failure: PdserveError, code: grpc.StatusCode, fail_after: int
) -> None:
    generator.failure, generator.fail_after = failure, fail_after
    error = await refused(InferenceStub(channel).Generate(asked(stream=True)))
    assert (error.code(), error.details()) == (code, failure.message)
    assert details(error)["ErrorInfo"].reason == type(failure).__name__
    if isinstance(failure, QueueFull):
        assert details(error)["RetryInfo"].retry_delay.ToMilliseconds() == 2500
    if isinstance(failure, InvalidRequest):
        (violation,) = details(error)["BadRequest"].field_violations
        assert (violation.field, violation.description) == ("x", failure.message)
    generator.failure = None
    await check_next_request_is_answered(channel)


async def test_an_unexpected_exception_is_logged_and_not_told(
    channel: grpc.aio.Channel, generator: EchoGenerator, caplog: pytest.LogCaptureFixture
) -> None:
    generator.failure = RuntimeError("secret")
    with caplog.at_level(logging.ERROR, "pdserve"):
        error = await refused(InferenceStub(channel).Generate(asked()))
    assert error.code() == grpc.StatusCode.INTERNAL
    assert "secret" not in str(error.details())
    assert "secret" in caplog.text
    generator.failure = None
    await check_next_request_is_answered(channel)


BAD_REQUESTS = {
    "over-long prompt": (asked("x" * 9000), "prompt has 9001 tokens, the limit is 8191"),
    "text not worth tokenizing": (asked("x" * 200_000), "text has 200000 characters, the limit is 131072"),
    "empty prompt": (asked(""), "prompt is empty"),
    "no input": (pb.GenerateRequest(), "input is not set"),
    "empty chat": (pb.GenerateRequest(chat=pb.Chat()), "chat has no messages"),
    "unknown model": (asked(model="gpt"), "model is 'gpt', this node serves 'fake'"),
    "NaN temperature": (
        pb.GenerateRequest(text="hi", sampling=pb.SamplingParams(temperature=math.nan)),
        "temperature is nan",
    ),
    "100k stop strings": (
        pb.GenerateRequest(text="hi", sampling=pb.SamplingParams(stop=["x"] * 100_000)),
        "stop has 100000 entries, the limit is 16",
    ),
    "a constraint": (
        pb.GenerateRequest(text="hi", sampling=pb.SamplingParams(regex="a+")),
        "regex is not available in this build of pdserve",
    ),
}


@pytest.mark.parametrize("kind", BAD_REQUESTS)
async def test_a_bad_request_is_refused_and_the_next_one_answered(
    channel: grpc.aio.Channel, generator: EchoGenerator, kind: str
) -> None:
    request, text = BAD_REQUESTS[kind]
    error = await refused(InferenceStub(channel).Generate(request))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert text in str(error.details())
    assert details(error)["BadRequest"].field_violations
    assert not generator.requests, "a refused request must not reach the engine"
    await check_next_request_is_answered(channel)


async def test_invalid_utf8_is_an_invalid_argument(channel: grpc.aio.Channel) -> None:
    text_of_two_bad_bytes = b"\x1a\x02\xff\xfe"
    error = await refused(channel.unary_stream(GENERATE)(text_of_two_bad_bytes))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "UTF-8" in str(error.details())
    await check_next_request_is_answered(channel)


async def test_an_oversized_message_is_refused(channel: grpc.aio.Channel) -> None:
    error = await refused(channel.unary_stream(GENERATE)(bytes(17 * 2**20)))
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "larger than max" in str(error.details())
    await check_next_request_is_answered(channel)


async def test_a_long_error_fits_into_the_headers(channel: grpc.aio.Channel, generator: EchoGenerator) -> None:
    generator.failure = InternalError("ü" * 100_000)
    error = await refused(InferenceStub(channel).Generate(asked()))
    assert error.code() == grpc.StatusCode.INTERNAL
    assert str(error.details()).endswith("ü...")


# ---------------------------------------------------------------- the rest of the service


async def test_tokenize_and_detokenize(channel: grpc.aio.Channel) -> None:
    stub = InferenceStub(channel)
    with_bos = await stub.Tokenize(pb.TokenizeRequest(text="hi"))
    assert list(with_bos.token_ids) == [BOS, 104, 105]
    assert list((await stub.Tokenize(pb.TokenizeRequest(text="hi", add_special_tokens=False))).token_ids) == [104, 105]
    chat = pb.Chat(messages=[pb.ChatMessage(role="u", content="h")])
    assert bytes((await stub.Tokenize(pb.TokenizeRequest(chat=chat))).token_ids) == b"u: h\n"
    assert (await stub.Detokenize(pb.DetokenizeRequest(token_ids=with_bos.token_ids))).text == "hi"
    kept = await stub.Detokenize(pb.DetokenizeRequest(token_ids=[BOS, 104] * 1000, skip_special_tokens=False))
    assert kept.text == "<s>h" * 1000


@pytest.mark.parametrize(
    ("method", "request_message"),
    [
        ("Tokenize", pb.TokenizeRequest()),
        ("Detokenize", pb.DetokenizeRequest(token_ids=[258])),
        ("Abort", pb.AbortRequest()),
        ("Abort", pb.AbortRequest(request_id="a#0")),
    ],
)
async def test_bad_unary_calls_are_invalid_arguments(
    channel: grpc.aio.Channel, method: str, request_message: Message
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await getattr(InferenceStub(channel), method)(request_message)
    assert failure.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_the_node_tells_what_it_is(channel: grpc.aio.Channel) -> None:
    stub = InferenceStub(channel)
    model = await stub.GetModelInfo(pb.GetModelInfoRequest())
    assert (model.served_model_name, model.max_model_len, list(model.eos_token_ids)) == ("fake", 8192, [256])
    server = await stub.GetServerInfo(pb.GetServerInfoRequest())
    assert server.settings == {"max_num_seqs": "4"}
    assert server.uptime_s >= 0
    loads = await stub.GetLoads(pb.GetLoadsRequest())
    assert [rank.num_held_blocks for rank in loads.ranks] == [3]


async def test_many_streams_at_once_get_their_own_answers(channel: grpc.aio.Channel) -> None:
    stub = InferenceStub(channel)
    texts = [f"prompt {number}" for number in range(64)]
    answers = await asyncio.gather(*(read(stub.Generate(asked(text, len(text) + 1))) for text in texts))
    assert [answer[0].complete.output.text for answer in answers] == texts
