"""What callers give and get."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

from pdserve.errors import InvalidRequest
from pdserve.request import FinishReason, TokenLogprobs
from pdserve.rounds import NUM_KEPT


class GenerateOptions(TypedDict, total=False):
    """Everything about a request but its text. What is left out takes the node's default.

    messages, token_ids: instead of a text; a chat's messages carry `role` and `content`.
    constraint fields (regex, json_schema, grammar, choice): at most one.
    """

    messages: Sequence[Mapping[str, str]]
    token_ids: Sequence[int]
    request_id: str
    model: str
    priority: int
    data_parallel_rank: int
    skip_special_tokens: bool
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    max_new_tokens: int
    min_new_tokens: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    seed: int
    logit_bias: Mapping[int, float]
    logprobs: bool
    top_logprobs: int
    prompt_logprobs: int
    regex: str
    json_schema: str
    grammar: str
    choice: Sequence[str]


@dataclass(frozen=True, slots=True)
class Usage:
    """num_completion_tokens: of this sample. num_cached_tokens: prompt tokens that no node had to compute."""

    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of one sample's answer as it streams. The last piece of a sample carries `finish`, and only it."""

    request_id: str
    index: int
    usage: Usage
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    finish: FinishReason | None = None
    matched_stop: str | int | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """One whole sample. placement: where its prompt was prefilled and why, `remote;peer=...` or `local;reason=...`."""

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    finish: FinishReason
    usage: Usage
    matched_stop: str | int | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    placement: str = ""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """settings: as the node was started."""

    version: str
    uptime_s: float
    settings: Mapping[str, str]


class Health(enum.Enum):
    """What a node says of itself (grpc.health.v1)."""

    UNKNOWN = "UNKNOWN"
    SERVING = "SERVING"
    NOT_SERVING = "NOT_SERVING"


def checked_last(last: int) -> int:
    """Rounds of the past. Raises InvalidRequest for what is no count of them."""
    if isinstance(last, bool) or not isinstance(last, int) or not 0 <= last <= NUM_KEPT:
        raise InvalidRequest(f"last is {last!r}, it must be from 0 to {NUM_KEPT}, the rounds that a rank keeps", "last")
    return last
