import math

import pytest

from pdserve.client import wire
from pdserve.client.channel import joined, service_config
from pdserve.client.types import GenerateOptions
from pdserve.errors import InternalError, InvalidRequest
from pdserve.v1 import inference_pb2 as pb


def encoded(prompt: str | None = None, options: GenerateOptions | None = None) -> pb.GenerateRequest:
    return wire.encode_generate(prompt, options or {}, num_samples=1, is_streamed=False, max_message_bytes=16 * 2**20)


def test_options_that_were_not_given_are_not_sent() -> None:
    assert encoded("hi") == pb.GenerateRequest(text="hi", sampling=pb.SamplingParams(n=1))


def test_every_sampling_field_of_the_protocol_is_an_option() -> None:
    on_the_wire = {field.name for field in pb.SamplingParams.DESCRIPTOR.fields} - {"n"}
    assert on_the_wire <= set(GenerateOptions.__annotations__)


def test_options_arrive_as_given() -> None:
    options: GenerateOptions = {
        "messages": [{"role": "user", "content": "hi"}],
        "temperature": 0.0,
        "stop": "\n",
        "stop_token_ids": (1, 2),
        "logit_bias": {3: -math.inf},
        "choice": ["yes", "no"],
        "request_id": "r",
        "skip_special_tokens": False,
    }
    message = encoded(None, options)
    assert message.chat == pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])
    assert message.sampling.HasField("temperature")
    assert list(message.sampling.stop) == ["\n"]
    assert list(message.sampling.stop_token_ids) == [1, 2]
    assert dict(message.sampling.logit_bias) == {3: -math.inf}
    assert list(message.sampling.choice.options) == ["yes", "no"]
    assert message.request_id == "r"
    assert message.HasField("skip_special_tokens")


@pytest.mark.parametrize(
    ("prompt", "options", "text"),
    [
        (None, {}, "exactly one"),
        ("hi", {"token_ids": [1]}, "exactly one"),
        ("hi", {"top_k": 2**40}, "top_k cannot be sent"),
        ("hi", {"temperature": "hot"}, "temperature cannot be sent"),
        ("hi", {"stop": [3]}, "stop cannot be sent"),
        ("hi", {"logit_bias": {-1: 0.5}}, "logit_bias cannot be sent"),
        ("\ud800", {}, "text cannot be sent"),
        (None, {"token_ids": [-1]}, "token_ids cannot be sent"),
        (None, {"messages": [{"role": "user", "image": "x"}]}, "the keys"),
        ("x" * (17 * 2**20), {}, "the limit is 16777216"),
    ],
)
def test_what_cannot_be_sent_is_refused_here(prompt: str | None, options: GenerateOptions, text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        encoded(prompt, options)


def test_token_ids_that_cannot_be_sent_are_refused_here() -> None:
    with pytest.raises(InvalidRequest, match="token_ids cannot be sent"):
        wire.encode_detokenize([-1], None)


def test_unknown_options_are_type_errors() -> None:
    for name in ("temprature", "n"):
        with pytest.raises(TypeError, match=f"no such option: {name}"):
            encoded("hi", {name: 1})  # type: ignore[misc]


def test_an_incomplete_answer_is_not_passed_on() -> None:
    with pytest.raises(InternalError, match="samples"):
        wire.gathered([], (), 1)


def test_several_targets_are_addresses_of_one_kind() -> None:
    assert joined("dns:///node:1") == "dns:///node:1"
    assert joined(["node:1"]) == "node:1"
    assert joined(["127.0.0.1:1", "127.0.0.2:2"]) == "ipv4:127.0.0.1:1,127.0.0.2:2"
    assert joined(["[::1]:1", "[::1]:2"]) == "ipv6:[::1]:1,[::1]:2"
    for targets in ([], ["127.0.0.1:1", "[::1]:1"], ["node-a:1", "node-b:1"]):
        with pytest.raises(InvalidRequest, match="target"):
            joined(targets)


def test_one_attempt_means_no_retries() -> None:
    assert "retryPolicy" not in service_config(1, max_attempts=1)["methodConfig"][0]
