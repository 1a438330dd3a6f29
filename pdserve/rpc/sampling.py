"""Sampling parameters as a caller writes them: defaults, ranges, and the limits of model and node."""

from __future__ import annotations

import math
import secrets
from typing import Any, NamedTuple

from pdserve.errors import InvalidRequest
from pdserve.request import SamplingParams
from pdserve.rpc.limits import Limits, ModelCard
from pdserve.v1 import inference_pb2 as pb

QUOTED_CHARS = 64


class Range(NamedTuple):
    """Finite values from low to high; low itself is left out when is_open."""

    low: float
    high: float = math.inf
    is_open: bool = False

    def holds(self, value: float) -> bool:
        is_above = value > self.low if self.is_open else value >= self.low
        return math.isfinite(value) and is_above and value <= self.high

    def __str__(self) -> str:
        if math.isinf(self.high):
            return f"at least {self.low:g}"
        return f"in {'(' if self.is_open else '['}{self.low:g}, {self.high:g}]"


RANGES = {
    "temperature": Range(0, 100),
    "top_p": Range(0, 1, is_open=True),
    "top_k": Range(0),
    "min_p": Range(0, 1),
    "frequency_penalty": Range(-2, 2),
    "presence_penalty": Range(-2, 2),
    "repetition_penalty": Range(0, 10, is_open=True),
    "min_new_tokens": Range(0),
    "max_new_tokens": Range(1),
}

# Fields that go over as they are, when set.
SCALARS = (*RANGES, "ignore_eos", "seed", "prompt_logprobs")


def decode_sampling(
    message: pb.SamplingParams, num_prompt_tokens: int, model: ModelCard, limits: Limits
) -> SamplingParams:
    """Complete parameters for one request; a seed is drawn when the caller gave none. Raises InvalidRequest."""
    refuse_constraint(message)
    given: dict[str, Any] = {name: getattr(message, name) for name in SCALARS if message.HasField(name)}
    given.setdefault("seed", secrets.randbits(63))
    room = model.max_model_len - num_prompt_tokens
    given.setdefault("max_new_tokens", min(room, max(limits.default_max_new_tokens, given.get("min_new_tokens", 0))))
    params = SamplingParams(
        **given,
        stop_token_ids=tuple(message.stop_token_ids),
        logit_bias=tuple(sorted(message.logit_bias.items())),
        num_logprobs=decode_num_logprobs(message),
    )
    check_ranges(params)
    check_length(params, num_prompt_tokens, model)
    check_lists(params, limits)
    check_vocabulary(params, model.vocab_size)
    return params


def refuse_constraint(message: pb.SamplingParams) -> None:
    constraint = message.WhichOneof("constraint")
    if constraint is not None:
        raise InvalidRequest(f"{constraint} is not available in this build of pdserve; leave it unset", constraint)


def decode_num_logprobs(message: pb.SamplingParams) -> int | None:
    """None, or how many alternatives beside the chosen token."""
    if message.logprobs:
        return message.top_logprobs
    if message.top_logprobs != 0:
        raise InvalidRequest(
            f"top_logprobs is {message.top_logprobs} without logprobs; set logprobs to true", "top_logprobs"
        )
    return None


def check_ranges(params: SamplingParams) -> None:
    for name, allowed in RANGES.items():
        value = getattr(params, name)
        if not allowed.holds(value):
            raise InvalidRequest(f"{name} is {value}, it must be {allowed}", name)
    for token_id, bias in params.logit_bias:
        if not math.isfinite(bias):
            raise InvalidRequest(f"logit_bias of token {token_id} is {bias}, it must be finite", "logit_bias")


def check_length(params: SamplingParams, num_prompt_tokens: int, model: ModelCard) -> None:
    total = num_prompt_tokens + params.max_new_tokens
    if total > model.max_model_len:
        raise InvalidRequest(
            f"prompt of {num_prompt_tokens} tokens and max_new_tokens of {params.max_new_tokens} make {total}, "
            f"the limit is {model.max_model_len}",
            "max_new_tokens",
        )
    if params.min_new_tokens > params.max_new_tokens:
        raise InvalidRequest(
            f"min_new_tokens is {params.min_new_tokens}, the limit is max_new_tokens, {params.max_new_tokens}",
            "min_new_tokens",
        )


def check_lists(params: SamplingParams, limits: Limits) -> None:
    check_count("stop_token_ids", len(params.stop_token_ids), limits.max_stop_token_ids)
    check_count("logit_bias", len(params.logit_bias), limits.max_logit_bias)
    allowed = Range(0, limits.max_top_logprobs)
    for name, value in (("top_logprobs", params.num_logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if value is not None and not allowed.holds(value):
            raise InvalidRequest(f"{name} is {value}, it must be {allowed}", name)


def check_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    for token_id in params.stop_token_ids:
        check_token_id("stop_token_ids", token_id, vocab_size)
    for token_id, _ in params.logit_bias:
        check_token_id("logit_bias", token_id, vocab_size)


def check_token_id(name: str, token_id: int, vocab_size: int) -> None:
    if not 0 <= token_id < vocab_size:
        raise InvalidRequest(f"{name} has token id {token_id}, the vocabulary ends at {vocab_size - 1}", name)


def check_count(name: str, count: int, limit: int) -> None:
    if count > limit:
        raise InvalidRequest(f"{name} has {count} entries, the limit is {limit}", name)


def quoted(text: str) -> str:
    """A caller's text, short and in ASCII, for a message that travels in a header."""
    return ascii(text) if len(text) <= QUOTED_CHARS else f"{text[:QUOTED_CHARS]!a}..."
