"""Between the callers' types and the Inference protos."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pdserve.client.types import Answer, GenerateOptions, Piece, ServerInfo, Usage
from pdserve.errors import InternalError, InvalidRequest
from pdserve.rpc.codec import decode_finish, decode_logprobs, decode_prompt_logprobs
from pdserve.v1 import inference_pb2 as pb

# Options that are fields of the request itself; all others but the input are sampling parameters.
REQUEST_FIELDS = frozenset({"request_id", "model", "priority", "data_parallel_rank", "skip_special_tokens"})
INPUT_FIELDS = frozenset({"messages", "token_ids"})


def encode_generate(
    prompt: str | None, options: GenerateOptions, *, num_samples: int, is_streamed: bool, max_message_bytes: int
) -> pb.GenerateRequest:
    """Raises InvalidRequest for what cannot be sent at all, TypeError for an option that does not exist."""
    message = pb.GenerateRequest(stream=is_streamed)
    _set_input(message, prompt, options)
    for name, value in options.items():
        if name in REQUEST_FIELDS:
            _set(message, name, value)
        elif name not in INPUT_FIELDS:
            _set_sampling(message.sampling, name, value)
    _set(message.sampling, "n", num_samples)
    check_size(message, max_message_bytes)
    return message


def check_size(message: pb.GenerateRequest, max_message_bytes: int) -> None:
    """Here rather than in gRPC, whose answer would be RESOURCE_EXHAUSTED and look worth a retry."""
    if message.ByteSize() > max_message_bytes:
        raise InvalidRequest(f"request has {message.ByteSize()} bytes, the limit is {max_message_bytes}")


def encode_tokenize(
    text: str | None, messages: Sequence[Mapping[str, str]] | None, add_special_tokens: bool | None
) -> pb.TokenizeRequest:
    if (text is None) == (messages is None):
        raise InvalidRequest("give a text or messages, one of them", "input")
    message = pb.TokenizeRequest(add_special_tokens=add_special_tokens)
    if messages is None:
        _set(message, "text", text)
    else:
        message.chat.CopyFrom(_encode_chat(messages))
    return message


def encode_detokenize(token_ids: Sequence[int], skip_special_tokens: bool | None) -> pb.DetokenizeRequest:
    message = pb.DetokenizeRequest(skip_special_tokens=skip_special_tokens)
    _extend(message.token_ids, "token_ids", token_ids)
    return message


def decode_piece(message: pb.GenerateResponse) -> Piece:
    """A chunk, or the end of a sample with its whole output if there is one."""
    kind = message.WhichOneof("kind")
    if kind == "chunk":
        return _piece(message.request_id, message.chunk.index, message.chunk.usage, message.chunk.output)
    if kind == "complete":
        complete = message.complete
        matched = complete.WhichOneof("matched_stop")
        return _piece(
            message.request_id,
            complete.index,
            complete.usage,
            complete.output,
            finish=decode_finish(complete.finish_reason),
            matched_stop=None if matched is None else getattr(complete, matched),
        )
    raise InternalError("the node sent a response of no known kind; client and node need the same version")


def gathered(pieces: Iterable[Piece], placements: Sequence[str], num_samples: int) -> tuple[Answer, ...]:
    """Whole answers in index order. pieces: one Complete with output a sample, in any order."""
    answers: dict[int, Answer] = {}
    for piece in pieces:
        if piece.finish is None:
            raise InternalError(f"the node sent sample {piece.index} without its end")
        answers[piece.index] = Answer(
            request_id=piece.request_id,
            index=piece.index,
            text=piece.text,
            token_ids=piece.token_ids,
            finish=piece.finish,
            usage=piece.usage,
            matched_stop=piece.matched_stop,
            logprobs=piece.logprobs,
            prompt_logprobs=piece.prompt_logprobs,
            placement=placements[piece.index] if piece.index < len(placements) else "",
        )
    if sorted(answers) != list(range(num_samples)):
        raise InternalError(f"the node answered samples {sorted(answers)} of {num_samples}")
    return tuple(answers[index] for index in range(num_samples))


def decode_server(message: pb.GetServerInfoResponse) -> ServerInfo:
    return ServerInfo(message.version, message.uptime_s, dict(message.settings))


def _set_input(message: pb.GenerateRequest, prompt: str | None, options: GenerateOptions) -> None:
    messages, token_ids = options.get("messages"), options.get("token_ids")
    if sum(given is not None for given in (prompt, messages, token_ids)) != 1:
        raise InvalidRequest("give a prompt, messages or token_ids, exactly one of them", "input")
    if prompt is not None:
        _set(message, "text", prompt)
    elif messages is not None:
        message.chat.CopyFrom(_encode_chat(messages))
    elif token_ids is not None:
        message.token_ids.SetInParent()
        _extend(message.token_ids.ids, "token_ids", token_ids)


def _encode_chat(messages: Sequence[Mapping[str, str]]) -> pb.Chat:
    chat = pb.Chat()
    for given in messages:
        unknown = set(given) - {"role", "content"}
        if unknown:
            raise InvalidRequest(f"a message has the keys {sorted(unknown)}, it takes role and content", "chat")
        message = chat.messages.add()
        for name, value in given.items():
            _set(message, name, value)
    return chat


def _set_sampling(sampling: pb.SamplingParams, name: str, value: Any) -> None:
    match name:
        case "stop":
            _extend(sampling.stop, name, [value] if isinstance(value, str) else value)
        case "stop_token_ids":
            _extend(sampling.stop_token_ids, name, value)
        case "logit_bias":
            for token_id, bias in value.items():
                _set_item(sampling.logit_bias, name, token_id, bias)
        case "choice":
            _extend(sampling.choice.options, name, value)
        case _ if name in pb.SamplingParams.DESCRIPTOR.fields_by_name and name != "n":
            _set(sampling, name, value)
        case _:
            raise TypeError(f"no such option: {name}")


def _set(message: Any, name: str, value: Any) -> None:
    try:
        setattr(message, name, value)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"{name} cannot be sent: {error}", name) from error


def _set_item(mapping: Any, name: str, key: Any, value: Any) -> None:
    try:
        mapping[key] = value
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"{name} cannot be sent: {error}", name) from error


def _extend(repeated: Any, name: str, values: Iterable[Any]) -> None:
    try:
        repeated.extend(values)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"{name} cannot be sent: {error}", name) from error


def _piece(request_id: str, index: int, usage: pb.Usage, output: pb.Output, **end: Any) -> Piece:
    has_prompt_logprobs = output.HasField("prompt_logprobs")
    return Piece(
        request_id=request_id,
        index=index,
        usage=Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens),
        text=output.text,
        token_ids=tuple(output.token_ids),
        logprobs=tuple(decode_logprobs(entry) for entry in output.logprobs),
        prompt_logprobs=decode_prompt_logprobs(output.prompt_logprobs) if has_prompt_logprobs else None,
        **end,
    )
