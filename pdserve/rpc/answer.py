"""One request's chunks turned into Generate responses, streamed or gathered."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from pdserve.errors import InternalError
from pdserve.request import GenerateChunk, GenerateRequest, TokenLogprobs
from pdserve.rpc.codec import encode_finish, encode_logprobs, encode_prompt_logprobs
from pdserve.v1 import inference_pb2 as pb


@dataclass(slots=True)
class _Sample:
    """What one sample has said so far. The lists stay empty while the caller streams."""

    token_ids: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    num_cached_tokens: int = 0
    placement: str = ""
    is_finished: bool = False


class AnswerEncoder:
    """Owned by the call that answers `request`."""

    def __init__(self, request: GenerateRequest, *, is_streamed: bool) -> None:
        self._request = request
        self._is_streamed = is_streamed
        self._samples = [_Sample() for _ in range(request.num_samples)]

    def responses(self, chunk: GenerateChunk) -> Iterator[pb.GenerateResponse]:
        """What the caller is sent for this chunk."""
        sample = self._samples[chunk.index]
        assert not sample.is_finished, f"sample {chunk.index} of {self._request.request_id} went on after its end"
        delta = chunk.delta
        sample.num_cached_tokens = max(sample.num_cached_tokens, delta.num_cached_tokens)
        # The latest counts: a transfer may fail after the peer's first token.
        sample.placement = delta.placement or sample.placement
        if not self._is_streamed:
            _gather(sample, chunk)
        elif delta.token_ids or chunk.text or delta.prompt_logprobs is not None:
            output = _output(list(delta.token_ids), chunk.text, list(delta.logprobs), delta.prompt_logprobs)
            message = pb.Chunk(index=chunk.index, output=output, usage=self._usage(sample, chunk))
            yield pb.GenerateResponse(request_id=self._request.request_id, chunk=message)
        if delta.finish is not None:
            sample.is_finished = True
            yield pb.GenerateResponse(request_id=self._request.request_id, complete=self._complete(sample, chunk))

    def check_complete(self) -> None:
        """Raises InternalError unless every sample had its end."""
        missing = [index for index, sample in enumerate(self._samples) if not sample.is_finished]
        if missing:
            raise InternalError(f"request {self._request.request_id} ended without the end of samples {missing}")

    @property
    def placements(self) -> tuple[str, ...]:
        """Where each sample's prompt was prefilled, in index order; empty when the engine does not say."""
        placements = tuple(sample.placement for sample in self._samples)
        return placements if any(placements) else ()

    def _complete(self, sample: _Sample, chunk: GenerateChunk) -> pb.Complete:
        message = pb.Complete(
            index=chunk.index, finish_reason=encode_finish(chunk.delta.finish), usage=self._usage(sample, chunk)
        )
        if isinstance(chunk.matched_stop, str):
            message.matched_stop_string = chunk.matched_stop
        elif chunk.matched_stop is not None:
            message.matched_stop_token_id = chunk.matched_stop
        if not self._is_streamed:
            text = "".join(sample.text)
            message.output.CopyFrom(_output(sample.token_ids, text, sample.logprobs, sample.prompt_logprobs))
        return message

    def _usage(self, sample: _Sample, chunk: GenerateChunk) -> pb.Usage:
        return pb.Usage(
            prompt_tokens=len(self._request.prompt),
            completion_tokens=chunk.num_output_tokens,
            cached_tokens=sample.num_cached_tokens,
        )


def _gather(sample: _Sample, chunk: GenerateChunk) -> None:
    sample.token_ids.extend(chunk.delta.token_ids)
    sample.text.append(chunk.text)
    sample.logprobs.extend(chunk.delta.logprobs)
    if chunk.delta.prompt_logprobs is not None:
        sample.prompt_logprobs = chunk.delta.prompt_logprobs


def _output(
    token_ids: list[int],
    text: str,
    logprobs: list[TokenLogprobs],
    prompt_logprobs: tuple[TokenLogprobs, ...] | None,
) -> pb.Output:
    return pb.Output(
        token_ids=token_ids,
        text=text,
        logprobs=[encode_logprobs(entry) for entry in logprobs],
        prompt_logprobs=None if prompt_logprobs is None else encode_prompt_logprobs(prompt_logprobs),
    )
