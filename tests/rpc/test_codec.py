import math

import pytest

from pdserve.errors import InvalidRequest
from pdserve.request import GenerateRequest, RankLoad, TokenLogprobs
from pdserve.rpc import codec
from pdserve.rpc.fake import CARD
from pdserve.rpc.limits import Limits
from pdserve.v1 import inference_pb2 as pb

PROMPT = [1, 2, 3]


def decoded(message: pb.GenerateRequest, prompt: list[int] | None = None) -> GenerateRequest:
    return codec.decode_request(message, PROMPT if prompt is None else prompt, CARD, Limits())


def sampling(**values: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(sampling=pb.SamplingParams(**values))  # type: ignore[arg-type]


BAD_SAMPLING = [
    ("temperature", {"temperature": math.nan}, "temperature is nan, it must be in [0, 100]"),
    ("temperature", {"temperature": math.inf}, "inf"),
    ("temperature", {"temperature": -0.1}, "-0.1"),
    ("top_p", {"top_p": 0.0}, "top_p is 0.0, it must be in (0, 1]"),
    ("top_p", {"top_p": 1.5}, "1.5"),
    ("top_k", {"top_k": -1}, "top_k is -1, it must be at least 0"),
    ("min_p", {"min_p": 1.01}, "1.01"),
    ("min_p", {"min_p": math.nan}, "nan"),
    ("frequency_penalty", {"frequency_penalty": 2.5}, "[-2, 2]"),
    ("presence_penalty", {"presence_penalty": -2.5}, "[-2, 2]"),
    ("repetition_penalty", {"repetition_penalty": 0.0}, "(0, 10]"),
    ("max_new_tokens", {"max_new_tokens": 0}, "max_new_tokens is 0, it must be at least 1"),
    ("max_new_tokens", {"max_new_tokens": 8190}, "make 8193, the limit is 8192"),
    ("min_new_tokens", {"min_new_tokens": -1}, "-1"),
    ("min_new_tokens", {"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens is 9, the limit is"),
    ("n", {"n": 0}, "n is 0, it must be in [1, 16]"),
    ("n", {"n": 17}, "17"),
    ("stop", {"stop": ["x"] * 100_000}, "stop has 100000 entries, the limit is 16"),
    ("stop", {"stop": [""]}, "0 characters"),
    ("stop", {"stop": ["x" * 257]}, "257 characters"),
    ("stop_token_ids", {"stop_token_ids": [1] * 65}, "65 entries, the limit is 64"),
    ("stop_token_ids", {"stop_token_ids": [258]}, "stop_token_ids has token id 258, the vocabulary ends at 257"),
    ("logit_bias", {"logit_bias": {258: 1.0}}, "258"),
    ("logit_bias", {"logit_bias": {1: math.nan}}, "nan"),
    ("top_logprobs", {"top_logprobs": 5}, "set logprobs"),
    ("top_logprobs", {"logprobs": True, "top_logprobs": 21}, "top_logprobs is 21, it must be in [0, 20]"),
    ("top_logprobs", {"logprobs": True, "top_logprobs": -1}, "-1"),
    ("prompt_logprobs", {"prompt_logprobs": 21}, "prompt_logprobs is 21"),
    ("regex", {"regex": "a*"}, "regex is not available in this build of pdserve"),
    ("json_schema", {"json_schema": "{}"}, "not available"),
    ("grammar", {"grammar": "root ::= x"}, "not available"),
    ("choice", {"choice": pb.Choice(options=["yes"])}, "not available"),
]


@pytest.mark.parametrize(("field", "values", "text"), BAD_SAMPLING)
def test_bad_sampling_is_refused_with_field_value_and_limit(field: str, values: dict[str, object], text: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        decoded(sampling(**values))
    assert refusal.value.field == field
    assert text in refusal.value.message


def test_too_many_biases_are_refused() -> None:
    message = sampling(logit_bias=dict.fromkeys(range(258), 1.0))
    with pytest.raises(InvalidRequest, match="logit_bias has 258 entries, the limit is 200"):
        codec.decode_request(message, PROMPT, CARD, Limits(max_logit_bias=200))


@pytest.mark.parametrize(
    ("message", "field", "text"),
    [
        (pb.GenerateRequest(model="gpt"), "model", "model is 'gpt', this node serves 'fake'"),
        (pb.GenerateRequest(model="Ü" * 5000), "model", "..."),
        (pb.GenerateRequest(request_id="a#1"), "request_id", "request_id is 'a#1'"),
        (pb.GenerateRequest(request_id="x" * 129), "request_id", "129 characters, the limit is 128"),
    ],
)
def test_bad_request_fields_are_refused_in_ascii(message: pb.GenerateRequest, field: str, text: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        decoded(message)
    assert refusal.value.field == field
    assert text in refusal.value.message
    assert refusal.value.message.isascii()
    assert len(refusal.value.message) < 1000


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ([], "prompt is empty"),
        ([1] * 9000, "prompt has 9000 tokens, the limit is 8191"),
        ([1, 258], "prompt has token id 258, the vocabulary ends at 257"),
    ],
)
def test_bad_prompts_are_refused(prompt: list[int], text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        decoded(pb.GenerateRequest(), prompt)


def test_unset_fields_take_defaults_and_a_seed_of_their_own() -> None:
    first, second = decoded(pb.GenerateRequest()), decoded(pb.GenerateRequest())
    assert first.num_samples == 1
    assert first.skip_special_tokens
    assert first.sampling.temperature == 1.0
    assert first.sampling.max_new_tokens == Limits().default_max_new_tokens
    assert first.sampling.num_logprobs is None
    assert first.request_id != second.request_id
    assert first.sampling.seed != second.sampling.seed


def test_default_max_new_tokens_is_what_the_context_leaves() -> None:
    assert decoded(pb.GenerateRequest(), [1] * 8190).sampling.max_new_tokens == 2


def test_zero_is_a_value() -> None:
    request = decoded(sampling(temperature=0.0, seed=0, prompt_logprobs=0, logprobs=True))
    assert request.sampling.is_greedy
    assert request.sampling.seed == 0
    assert request.sampling.prompt_logprobs == 0
    assert request.sampling.num_logprobs == 0


def test_everything_set_arrives() -> None:
    message = pb.GenerateRequest(request_id="a.b:c-1_", model="fake", priority=-3, skip_special_tokens=False)
    message.sampling.CopyFrom(
        pb.SamplingParams(
            temperature=0.8,
            top_p=0.9,
            top_k=7,
            min_p=0.1,
            frequency_penalty=-2,
            presence_penalty=2,
            repetition_penalty=1.1,
            max_new_tokens=9,
            min_new_tokens=3,
            stop=["\n"],
            stop_token_ids=[5],
            ignore_eos=True,
            n=2,
            seed=-(2**63),
            logit_bias={4: -1.5, 2: 100.0},
            logprobs=True,
            top_logprobs=3,
        )
    )
    request = decoded(message)
    assert request.request_id == "a.b:c-1_"
    assert request.priority == -3
    assert not request.skip_special_tokens
    assert request.stop == ("\n",)
    assert request.num_samples == 2
    params = request.sampling
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.8, 0.9, 7, 0.1)
    assert (params.frequency_penalty, params.presence_penalty, params.repetition_penalty) == (-2, 2, 1.1)
    assert (params.max_new_tokens, params.min_new_tokens, params.seed) == (9, 3, -(2**63))
    assert params.stop_token_ids == (5,)
    assert params.ignore_eos
    assert params.logit_bias == ((2, 100.0), (4, -1.5))
    assert params.num_logprobs == 3


def test_logprobs_loads_and_model_survive_the_wire() -> None:
    entry = TokenLogprobs(3, -0.1, ((3, -0.1), (4, -2.5)))
    assert codec.decode_logprobs(codec.encode_logprobs(entry)) == entry
    loads = (RankLoad(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, {"rounds": 2**40}), RankLoad(1, 0, 0, 0, 4, 0, 0))
    assert codec.decode_loads(codec.encode_loads(loads)) == loads
    assert codec.decode_model(codec.encode_model(CARD)) == CARD


def test_chat_needs_messages_with_a_role() -> None:
    with pytest.raises(InvalidRequest, match="no messages"):
        codec.decode_chat(pb.Chat(), Limits())
    with pytest.raises(InvalidRequest, match="message 0 has no role"):
        codec.decode_chat(pb.Chat(messages=[pb.ChatMessage(content="x")]), Limits())
    with pytest.raises(InvalidRequest, match="3 entries, the limit is 2"):
        codec.decode_chat(pb.Chat(messages=[pb.ChatMessage(role="user")] * 3), Limits(max_chat_messages=2))
