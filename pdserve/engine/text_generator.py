"""From token streams to a caller's answer: n samples, their text, their stop strings.

    GenerateRequest ─► n TokenRequests ─► TokenSource ─► n streams of TokenDelta ─► one stream of GenerateChunk

What computes the tokens is a TokenSource: the ranks of this node, or a prefill peer and the ranks of this node.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from pdserve.engine.text import TextStream, TokenDecoder
from pdserve.errors import InternalError, RequestIdInUse
from pdserve.request import (
    FinishReason,
    GenerateChunk,
    GenerateRequest,
    RankLoad,
    RequestId,
    TokenDelta,
    TokenRequest,
)

# Chunks of a request with several samples that wait for its reader; past it the streams are read no further.
MAX_BUFFERED_CHUNKS = 64


class TokenSource(Protocol):
    """Computes single answers, token by token. Used from the event loop's thread."""

    def stream(self, request: TokenRequest) -> AsyncIterator[TokenDelta]:
        """The answer's deltas, an async generator; the last one carries `finish`.

        The request is live from the first step of the iterator to its end; closing it earlier aborts the request.
        Raises a PdserveError where the request fails.
        """

    async def abort(self, request_id: RequestId) -> bool:
        """Let a live request's stream end with finish reason `abort`; False if no such request lives."""

    async def loads(self, *, check_integrity: bool = False) -> Sequence[RankLoad]:
        """What each rank has on its hands now. check_integrity: InternalError where a rank's own tables disagree."""


@dataclass(slots=True)
class _Answer:
    """A live request. may_fan_out: set once the first sample has tokens. is_aborted: start no sample any more."""

    request: GenerateRequest
    token_requests: tuple[TokenRequest, ...]
    may_fan_out: asyncio.Event = field(default_factory=asyncio.Event)
    is_aborted: bool = False

    @property
    def ids(self) -> set[RequestId]:
        return {self.request.request_id, *(r.request_id for r in self.token_requests)}


class TextGenerator:
    """rpc.generator.Generator over a TokenSource. Used from the event loop's thread."""

    def __init__(self, source: TokenSource, tokenizer: TokenDecoder) -> None:
        self._source = source
        self._tokenizer = tokenizer
        self._answers: dict[RequestId, _Answer] = {}
        # The ids of _answers and those of their samples, which are names of requests too.
        self._ids_in_use: set[RequestId] = set()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]:
        """The samples' chunks as they come; see rpc.generator.Generator.

        A chunk is passed on at once. A reader that is slow holds the source: a single sample's stream is read only when
        the next chunk is asked for, several samples' until MAX_BUFFERED_CHUNKS wait. An error in one sample ends the
        request. Raises RequestIdInUse, and what the source raises.
        """
        answer = _Answer(request, split_samples(request))
        if not self._ids_in_use.isdisjoint(answer.ids):
            raise RequestIdInUse(f"request_id {request.request_id!r} is in use; choose another or wait for its end")
        self._ids_in_use |= answer.ids
        self._answers[request.request_id] = answer
        samples = [self._sample(answer, index) for index in range(request.num_samples)]
        try:
            async with contextlib.aclosing(samples[0] if len(samples) == 1 else merge(samples)) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:
            del self._answers[request.request_id]
            self._ids_in_use -= answer.ids

    async def abort(self, request_id: RequestId) -> bool:
        """End all samples of a live request with finish reason `abort`; False if no such request lives."""
        answer = self._answers.get(request_id)
        if answer is None:
            return False
        answer.is_aborted = True
        answer.may_fan_out.set()
        for token_request in answer.token_requests:
            await self._source.abort(token_request.request_id)
        return True

    async def loads(self, *, check_integrity: bool = False) -> Sequence[RankLoad]:
        """What each rank has on its hands now."""
        return await self._source.loads(check_integrity=check_integrity)

    async def _sample(self, answer: _Answer, index: int) -> AsyncGenerator[GenerateChunk, None]:
        """One sample's chunks, up to its finish; its token stream is closed before the last of them."""
        if index > 0:
            # The prompt's blocks are in the prefix cache by then, and are computed once for all samples.
            await answer.may_fan_out.wait()
        if answer.is_aborted:
            yield GenerateChunk(index, TokenDelta((), finish=FinishReason.ABORT), "", 0)
            return
        text = TextStream(
            self._tokenizer,
            answer.request.stop,
            answer.request.skip_special_tokens,
            answer.request.sampling.min_new_tokens,
        )
        num_output_tokens = 0
        stream = self._source.stream(answer.token_requests[index])
        try:
            async for delta in stream:
                answer.may_fan_out.set()
                num_output_tokens += len(delta.token_ids)
                chunk = to_chunk(index, delta, text, num_output_tokens)
                if chunk.delta.finish is not None:
                    await _close(stream)
                    yield chunk
                    return
                yield chunk
        finally:
            await _close(stream)
        raise InternalError(f"the tokens of {answer.token_requests[index].request_id!r} ended without a finish reason")


def split_samples(request: GenerateRequest) -> tuple[TokenRequest, ...]:
    """One TokenRequest a sample. The prompt's logprobs are the same for all, so only sample 0 computes them."""
    assert request.num_samples >= 1
    token_requests = []
    for index in range(request.num_samples):
        request_id = request.request_id if request.num_samples == 1 else RequestId(f"{request.request_id}#{index}")
        sampling = replace(request.sampling, sample_index=index)
        if index > 0:
            sampling = replace(sampling, prompt_logprobs=None)
        token_requests.append(
            TokenRequest(
                request_id,
                request.prompt,
                sampling,
                request.priority,
                request.time_left_s,
                request.data_parallel_rank,
            )
        )
    return tuple(token_requests)


def to_chunk(index: int, delta: TokenDelta, text: TextStream, num_output_tokens: int) -> GenerateChunk:
    """The delta with the text it adds. A stop string turns it into the last one; its tokens are all reported."""
    words = delta.token_ids
    if delta.matched_stop_token is not None and words[-1:] == (delta.matched_stop_token,):
        # The token that ends an answer is reported, but is no part of its text.
        words = words[:-1]
    piece = text.push(words, is_last=delta.finish is not None)
    matched_stop: str | int | None = delta.matched_stop_token
    if piece.matched_stop is not None:
        matched_stop = piece.matched_stop
        delta = replace(delta, finish=FinishReason.STOP, matched_stop_token=None)
    return GenerateChunk(index, delta, piece.text, num_output_tokens, matched_stop)


async def merge(samples: Sequence[AsyncGenerator[GenerateChunk, None]]) -> AsyncGenerator[GenerateChunk, None]:
    """Chunks of all samples in the order in which they come. Closing it, or an error in one, closes all of them."""
    # None: one of the samples is over.
    buffer: asyncio.Queue[GenerateChunk | Exception | None] = asyncio.Queue(MAX_BUFFERED_CHUNKS)
    tasks = [asyncio.create_task(_pump(sample, buffer)) for sample in samples]
    num_running = len(tasks)
    try:
        while num_running:
            item = await buffer.get()
            if item is None:
                num_running -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    sample: AsyncGenerator[GenerateChunk, None], buffer: asyncio.Queue[GenerateChunk | Exception | None]
) -> None:
    try:
        async with contextlib.aclosing(sample):
            async for chunk in sample:
                await buffer.put(chunk)
    except Exception as error:
        # Raised in the reader, where the request fails as a whole.
        await buffer.put(error)
    else:
        await buffer.put(None)


async def _close(stream: AsyncIterator[TokenDelta]) -> None:
    """Close the stream, which aborts a request that is not over; nothing happens the second time."""
    # AsyncIterator does not promise aclose; async generators have it, and an iterator without holds nothing to close.
    aclose = getattr(stream, "aclose", None)
    if aclose is not None:
        await aclose()
