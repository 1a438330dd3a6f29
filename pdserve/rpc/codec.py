"""Between the Inference protos and pdserve's own types. Everything a caller can get wrong is found here."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields

from pdserve.errors import InvalidRequest
from pdserve.request import FinishReason, GenerateRequest, RankLoad, RequestId, TokenLogprobs
from pdserve.rpc.limits import Limits, ModelCard
from pdserve.rpc.sampling import check_count, check_token_id, decode_sampling, quoted
from pdserve.v1 import inference_pb2 as pb

# '#' is kept for the samples of a request, which the engine names `{request_id}#{index}`.
REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]+")

FINISH_REASONS: dict[FinishReason, pb.FinishReason] = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
}
_FINISH_REASONS_BACK = {wire: reason for reason, wire in FINISH_REASONS.items()}

# ---------------------------------------------------------------- requests


def decode_request(
    message: pb.GenerateRequest,
    prompt: Sequence[int],
    model: ModelCard,
    limits: Limits,
    time_left_s: float | None = None,
) -> GenerateRequest:
    """A request ready for the engine. prompt: the message's input as tokens. Raises InvalidRequest."""
    check_model(message.model, model)
    check_prompt(prompt, model)
    sampling = message.sampling
    num_samples = sampling.n if sampling.HasField("n") else 1
    if not 1 <= num_samples <= limits.max_samples:
        raise InvalidRequest(f"n is {num_samples}, it must be in [1, {limits.max_samples}]", "n")
    return GenerateRequest(
        request_id=decode_request_id(message.request_id, limits),
        prompt=tuple(prompt),
        sampling=decode_sampling(sampling, len(prompt), model, limits),
        num_samples=num_samples,
        stop=decode_stop(sampling.stop, limits),
        skip_special_tokens=default_true(message, "skip_special_tokens"),
        priority=message.priority,
        time_left_s=time_left_s,
        data_parallel_rank=message.data_parallel_rank if message.HasField("data_parallel_rank") else None,
    )


def default_true(message: pb.GenerateRequest | pb.TokenizeRequest | pb.DetokenizeRequest, name: str) -> bool:
    """An optional flag that is on unless the caller turned it off."""
    return bool(getattr(message, name)) if message.HasField(name) else True


def check_model(name: str, model: ModelCard) -> None:
    if name not in ("", model.served_name):
        raise InvalidRequest(f"model is {quoted(name)}, this node serves {quoted(model.served_name)}", "model")


def check_prompt(prompt: Sequence[int], model: ModelCard) -> None:
    if not prompt:
        raise InvalidRequest("prompt is empty, it needs at least one token", "prompt")
    if len(prompt) > model.max_prompt_tokens:
        raise InvalidRequest(
            f"prompt has {len(prompt)} tokens, the limit is {model.max_prompt_tokens} "
            f"(a context of {model.max_model_len}, less one for the answer)",
            "prompt",
        )
    check_token_id("prompt", max(prompt), model.vocab_size)


def decode_request_id(text: str, limits: Limits) -> RequestId:
    """The caller's id, or a new one."""
    if not text:
        return RequestId(uuid.uuid4().hex)
    if len(text) > limits.max_request_id_chars:
        raise InvalidRequest(
            f"request_id has {len(text)} characters, the limit is {limits.max_request_id_chars}", "request_id"
        )
    if REQUEST_ID.fullmatch(text) is None:
        raise InvalidRequest(
            f"request_id is {quoted(text)}, it must consist of ASCII letters, digits and ._:-", "request_id"
        )
    return RequestId(text)


def decode_stop(strings: Sequence[str], limits: Limits) -> tuple[str, ...]:
    check_count("stop", len(strings), limits.max_stop_strings)
    for text in strings:
        if not 1 <= len(text) <= limits.max_stop_chars:
            raise InvalidRequest(
                f"stop has a string of {len(text)} characters, it must have 1 to {limits.max_stop_chars}", "stop"
            )
    return tuple(strings)


def decode_chat(chat: pb.Chat, limits: Limits) -> list[dict[str, str]]:
    """Messages as the chat template takes them."""
    if not chat.messages:
        raise InvalidRequest("chat has no messages, it needs at least one", "chat")
    check_count("chat", len(chat.messages), limits.max_chat_messages)
    for position, message in enumerate(chat.messages):
        if not message.role:
            raise InvalidRequest(f"chat message {position} has no role; 'user' is the usual one", "chat")
    return [{"role": message.role, "content": message.content} for message in chat.messages]


def decode_token_ids(token_ids: Sequence[int], model: ModelCard) -> list[int]:
    if token_ids:
        check_token_id("token_ids", max(token_ids), model.vocab_size)
    return list(token_ids)


# ---------------------------------------------------------------- answers


def encode_finish(reason: FinishReason | None) -> pb.FinishReason:
    return pb.FINISH_REASON_UNSPECIFIED if reason is None else FINISH_REASONS[reason]


def decode_finish(reason: pb.FinishReason) -> FinishReason | None:
    """None for unspecified and for reasons of a newer peer."""
    return _FINISH_REASONS_BACK.get(reason)


def encode_logprobs(entry: TokenLogprobs) -> pb.PositionLogprobs:
    return pb.PositionLogprobs(
        token_id=entry.token_id,
        logprob=entry.logprob,
        top=[pb.TokenLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in entry.top],
    )


def decode_logprobs(message: pb.PositionLogprobs) -> TokenLogprobs:
    return TokenLogprobs(message.token_id, message.logprob, tuple((t.token_id, t.logprob) for t in message.top))


def encode_prompt_logprobs(entries: Iterable[TokenLogprobs]) -> pb.PromptLogprobs:
    return pb.PromptLogprobs(positions=[encode_logprobs(entry) for entry in entries])


def decode_prompt_logprobs(message: pb.PromptLogprobs) -> tuple[TokenLogprobs, ...]:
    return tuple(decode_logprobs(position) for position in message.positions)


# ---------------------------------------------------------------- the node


def encode_model(model: ModelCard) -> pb.GetModelInfoResponse:
    return pb.GetModelInfoResponse(
        served_model_name=model.served_name,
        architecture=model.architecture,
        revision=model.revision,
        dtype=model.dtype,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
    )


def decode_model(message: pb.GetModelInfoResponse) -> ModelCard:
    return ModelCard(
        served_name=message.served_model_name,
        architecture=message.architecture,
        max_model_len=message.max_model_len,
        vocab_size=message.vocab_size,
        eos_token_ids=tuple(message.eos_token_ids),
        revision=message.revision,
        dtype=message.dtype,
    )


def encode_loads(loads: Iterable[RankLoad]) -> pb.GetLoadsResponse:
    return pb.GetLoadsResponse(ranks=[pb.RankLoad(**asdict(load)) for load in loads])


def decode_loads(message: pb.GetLoadsResponse) -> tuple[RankLoad, ...]:
    return tuple(_decode_load(rank) for rank in message.ranks)


def _decode_load(message: pb.RankLoad) -> RankLoad:
    values = {f.name: getattr(message, f.name) for f in fields(RankLoad)}
    counters: Mapping[str, int] = values.pop("counters")
    return RankLoad(**values, counters=dict(counters))
