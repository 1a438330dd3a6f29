"""The Inference service, over any Generator."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import aclosing
from functools import partial
from typing import Any

import grpc

from pdserve import __version__
from pdserve.errors import Cancelled, InvalidRequest
from pdserve.request import RequestId
from pdserve.rpc import codec
from pdserve.rpc.answer import AnswerEncoder
from pdserve.rpc.generator import Generator, Tokenizer
from pdserve.rpc.limits import Limits, ModelCard
from pdserve.rpc.metadata import PLACEMENT_KEY
from pdserve.rpc.server import Service
from pdserve.v1 import inference_pb2 as pb
from pdserve.v1.inference_pb2_grpc import add_InferenceServicer_to_server

SERVICE_NAME = "pdserve.v1.Inference"

# A tokenizer takes about a millisecond for this much; longer texts would hold every other stream up.
MAX_INLINE_CHARS = 4096
MAX_INLINE_TOKENS = 1024

Context = grpc.aio.ServicerContext[Any, Any]


def inference_service(servicer: InferenceServicer) -> Service:
    return Service(SERVICE_NAME, partial(add_InferenceServicer_to_server, servicer))


class InferenceServicer:
    """Raises PdserveErrors, which the server's boundary turns into statuses. Runs in the server's event loop.

    settings: what GetServerInfo tells of how the node was started.
    """

    def __init__(
        self,
        generator: Generator,
        tokenizer: Tokenizer,
        model: ModelCard,
        limits: Limits | None = None,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self._generator = generator
        self._tokenizer = tokenizer
        self._model = model
        self._limits = limits or Limits()
        self._settings = dict(settings or {})
        self._started_at = time.monotonic()

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        """A cancelled call or a passed deadline cancels this coroutine, and leaving the loop closes the generator."""
        prompt = await self._prompt(request)
        wanted = codec.decode_request(request, prompt, self._model, self._limits, context.time_remaining())
        answer = AnswerEncoder(wanted, is_streamed=request.stream)
        is_begun = False
        try:
            async with aclosing(self._generator.generate(wanted)) as chunks:
                async for chunk in chunks:
                    if not is_begun:
                        # Headers tell gRPC's retries that the answer exists: from here on nobody asks for it again.
                        await context.send_initial_metadata(())
                        is_begun = True
                    for response in answer.responses(chunk):
                        await self._write(context, response)
            answer.check_complete()
        finally:  # an answer that broke off was prefilled somewhere too
            context.set_trailing_metadata(tuple((PLACEMENT_KEY, placement) for placement in answer.placements))

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        if not request.request_id:
            raise InvalidRequest("request_id is empty, it must name the request to abort", "request_id")
        request_id = codec.decode_request_id(request.request_id, self._limits)
        return pb.AbortResponse(found=await self._generator.abort(RequestId(request_id)))

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        match request.WhichOneof("input"):
            case "text":
                add_special_tokens = codec.default_true(request, "add_special_tokens")
                tokens = await self._encode(request.text, add_special_tokens=add_special_tokens)
            case "chat":
                tokens = await self._encode_chat(request.chat)
            case _:
                raise InvalidRequest("input is not set, it must be text or chat", "input")
        return pb.TokenizeResponse(token_ids=tokens)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        tokens = codec.decode_token_ids(request.token_ids, self._model)
        skip_special_tokens = codec.default_true(request, "skip_special_tokens")
        decode = partial(self._tokenizer.decode, tokens, skip_special_tokens=skip_special_tokens)
        text = decode() if len(tokens) <= MAX_INLINE_TOKENS else await asyncio.to_thread(decode)
        return pb.DetokenizeResponse(text=text)

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Context) -> pb.GetModelInfoResponse:
        return codec.encode_model(self._model)

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Context) -> pb.GetServerInfoResponse:
        uptime_s = time.monotonic() - self._started_at
        return pb.GetServerInfoResponse(version=__version__, uptime_s=uptime_s, settings=self._settings)

    async def GetLoads(self, request: pb.GetLoadsRequest, context: Context) -> pb.GetLoadsResponse:
        return codec.encode_loads(await self._generator.loads(check_integrity=request.check_integrity))

    async def _prompt(self, request: pb.GenerateRequest) -> list[int]:
        match request.WhichOneof("input"):
            case "text":
                return await self._encode(request.text, add_special_tokens=True) if request.text else []
            case "token_ids":
                return list(request.token_ids.ids)
            case "chat":
                return await self._encode_chat(request.chat)
            case _:
                raise InvalidRequest("input is not set, it must be text, token_ids or chat", "input")

    async def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        limit = self._limits.max_chars_per_token * self._model.max_model_len
        if len(text) > limit:
            raise InvalidRequest(
                f"text has {len(text)} characters, the limit is {limit} for a context of {self._model.max_model_len} "
                "tokens; shorten it, or send token_ids",
                "text",
            )
        encode = partial(self._tokenizer.encode, text, add_special_tokens=add_special_tokens)
        return encode() if len(text) <= MAX_INLINE_CHARS else await asyncio.to_thread(encode)

    async def _encode_chat(self, chat: pb.Chat) -> list[int]:
        messages = codec.decode_chat(chat, self._limits)
        num_chars = sum(len(message["content"]) for message in messages)
        render = partial(self._tokenizer.apply_chat_template, messages)
        text = render() if num_chars <= MAX_INLINE_CHARS else await asyncio.to_thread(render)
        return await self._encode(text, add_special_tokens=False)

    async def _write(self, context: Context, response: pb.GenerateResponse) -> None:
        """Returns when the transport took the message; a reader that takes nothing for too long is given up."""
        limit_s = self._limits.stalled_write_s
        try:
            async with asyncio.timeout(limit_s):
                await context.write(response)
        except TimeoutError:
            raise Cancelled(f"the caller took none of its answer for {limit_s:g} s, the limit; aborted") from None
