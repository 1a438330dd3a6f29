"""Bad requests over the wire: the status, a message that names the field, and the next good request unharmed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import grpc
import pytest

from pdserve.v1 import inference_pb2 as pb
from pdserve.v1.inference_pb2_grpc import InferenceStub
from tests.system.nodes import PATIENCE_S, Node

pytestmark = pytest.mark.system

METHOD = "/pdserve.v1.Inference/Generate"
# Above any limit of a node, so that it is the node that refuses.
UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
INVALID, EXHAUSTED = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED


def good(**changes: object) -> pb.GenerateRequest:
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2, 3]), sampling=sampling())
    request.MergeFrom(pb.GenerateRequest(**changes))  # type: ignore[arg-type]
    return request


def sampling(**changes: object) -> pb.SamplingParams:
    # Drawn at random, but always two tokens: the end-of-text token is one like the others.
    return pb.SamplingParams(**{"max_new_tokens": 2, "ignore_eos": True, **changes})  # type: ignore[arg-type]


def raw_text(text: bytes) -> bytes:
    """A GenerateRequest whose `text` (field 3) is these bytes, which protobuf itself would not write."""
    assert len(text) < 128
    return bytes([3 << 3 | 2, len(text)]) + text


@dataclass(frozen=True)
class Bad:
    """message: of the call, or its bytes. told: parts of the answer."""

    message: pb.GenerateRequest | bytes
    told: tuple[str, ...]
    code: grpc.StatusCode = INVALID


BAD: dict[str, Callable[[], Bad]] = {
    "prompt too long": lambda: Bad(
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5] * 20_000), sampling=sampling()),
        ("prompt has 20000 tokens", "16383"),
    ),
    "prompt and answer too long": lambda: Bad(good(sampling=sampling(max_new_tokens=16_384)), ("16387", "16384")),
    "unknown model": lambda: Bad(good(model="gpt-9"), ("model is 'gpt-9'", "serves")),
    "token outside the vocabulary": lambda: Bad(
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=[99_999])), ("prompt has token id 99999",)
    ),
    "NaN temperature": lambda: Bad(good(sampling=sampling(temperature=math.nan)), ("temperature is nan",)),
    "infinite bias": lambda: Bad(good(sampling=sampling(logit_bias={4: math.inf})), ("logit_bias of token 4",)),
    "top_p of 0": lambda: Bad(good(sampling=sampling(top_p=0.0)), ("top_p is 0.0", "(0, 1]")),
    "no samples": lambda: Bad(good(sampling=sampling(n=0)), ("n is 0",)),
    "empty text": lambda: Bad(pb.GenerateRequest(text=""), ("prompt is empty",)),
    "no tokens": lambda: Bad(pb.GenerateRequest(token_ids=pb.TokenIds()), ("prompt is empty",)),
    "no input": lambda: Bad(pb.GenerateRequest(), ("input is not set",)),
    "a chat for a model without a template": lambda: Bad(
        pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])), ("chat template",)
    ),
    "a hundred thousand stop strings": lambda: Bad(
        good(sampling=sampling(stop=["x"] * 100_000)), ("stop has 100000 entries", "16")
    ),
    "a constraint that is not built": lambda: Bad(good(sampling=sampling(regex="a*")), ("regex is not available",)),
    "a request id with a space": lambda: Bad(good(request_id="a b"), ("request_id is 'a b'",)),
    "bytes that are no UTF-8": lambda: Bad(raw_text(b"\xff\xfe caf\xe9"), ("not a message of this call",)),
    "bytes that are no message": lambda: Bad(b"\x07\xff\xff", ("not a message of this call",)),
    "a message over the size limit": lambda: Bad(
        pb.GenerateRequest(text="a" * (17 * 2**20)), (str(16 * 2**20),), EXHAUSTED
    ),
}


@pytest.fixture(params=["fused", "decode"])
def channel(request: pytest.FixtureRequest) -> Iterator[grpc.Channel]:
    node: Node = (
        request.getfixturevalue("fused") if request.param == "fused" else request.getfixturevalue("pair_by_default")[1]
    )
    with grpc.insecure_channel(node.address, options=UNLIMITED) as channel:
        yield channel


def answer_of(channel: grpc.Channel) -> list[int]:
    responses = InferenceStub(channel).Generate(good(), timeout=PATIENCE_S)
    return [token for response in responses for token in response.complete.output.token_ids]


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_request_is_told_what_is_wrong_and_the_next_one_is_answered(channel: grpc.Channel, kind: str) -> None:
    bad = BAD[kind]()
    call = channel.unary_stream(
        METHOD,
        request_serializer=lambda message: message if isinstance(message, bytes) else message.SerializeToString(),
        response_deserializer=pb.GenerateResponse.FromString,
    )
    with pytest.raises(grpc.RpcError) as raised:
        list(call(bad.message, timeout=PATIENCE_S))
    assert raised.value.code() is bad.code, raised.value.details()
    for part in bad.told:
        assert part in raised.value.details()
    assert len(answer_of(channel)) == 2
