"""The blocking client."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, Unpack

import grpc
import grpc.experimental

from pdserve.client import wire
from pdserve.client.channel import DEFAULT_TARGET, MAX_ATTEMPTS, checked_timeout, client_options, joined, shown
from pdserve.client.failure import error_from, placements_in
from pdserve.client.health import HEALTH_METHOD, decode_health
from pdserve.client.types import Answer, GenerateOptions, Health, Piece, ServerInfo, checked_last
from pdserve.errors import PdserveError
from pdserve.request import RankLoad
from pdserve.rounds import RankRounds
from pdserve.rpc.codec import decode_loads, decode_model
from pdserve.rpc.limits import MAX_MESSAGE_BYTES, ModelCard
from pdserve.rpc.rounds_codec import DEFAULT_LAST, decode_rounds
from pdserve.v1 import admin_pb2
from pdserve.v1 import inference_pb2 as pb
from pdserve.v1.admin_pb2_grpc import AdminStub
from pdserve.v1.inference_pb2_grpc import InferenceStub

T = TypeVar("T")
Response = TypeVar("Response")


class Client:
    """One connection to a node, or to several by round robin. Thread safe; close it, or use `with`.

    timeout_s: of every call that names none; None waits as long as it takes. A call is tried up to max_attempts
    times while nothing of its answer has arrived. Calls raise the errors of `pdserve.errors`.
    """

    def __init__(
        self,
        targets: str | Sequence[str] = DEFAULT_TARGET,
        *,
        timeout_s: float | None = None,
        max_attempts: int = MAX_ATTEMPTS,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        num_targets = 1 if isinstance(targets, str) else len(targets)
        self._where = shown(targets)
        self._timeout_s = timeout_s
        self._max_message_bytes = max_message_bytes
        # With gRPC's default reader, a retried stream whose node is killed never ends, whatever its deadline.
        single_threaded = (grpc.experimental.ChannelOptions.SingleThreadedUnaryStream, 1)
        options = [*client_options(num_targets, max_attempts, max_message_bytes), single_threaded]
        self._channel = grpc.insecure_channel(joined(targets), options=options)
        self._stub = InferenceStub(self._channel)
        self._admin = AdminStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Ends every open call too."""
        self._channel.close()

    def generate(
        self, prompt: str | None = None, *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Answer:
        """One whole answer to a prompt, to `messages` or to `token_ids`."""
        return self.generate_samples(prompt, num_samples=1, timeout_s=timeout_s, **options)[0]

    def generate_samples(
        self,
        prompt: str | None = None,
        *,
        num_samples: int,
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> tuple[Answer, ...]:
        """Several whole answers to one prompt."""
        with self._start(prompt, options, num_samples, False, timeout_s) as stream:
            pieces = list(stream)
            return wire.gathered(pieces, stream.placements, num_samples)

    def stream(
        self,
        prompt: str | None = None,
        *,
        num_samples: int = 1,
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Stream:
        """The answer as it comes. Closing the stream, or dropping it, aborts the request."""
        return self._start(prompt, options, num_samples, True, timeout_s)

    def abort(self, request_id: str, *, timeout_s: float | None = None) -> bool:
        """End somebody's live request with finish reason `abort`; False if no such request lives."""
        return self._call(self._stub.Abort, pb.AbortRequest(request_id=request_id), timeout_s).found

    def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Sequence[Mapping[str, str]] | None = None,
        add_special_tokens: bool | None = None,
        timeout_s: float | None = None,
    ) -> tuple[int, ...]:
        request = wire.encode_tokenize(text, messages, add_special_tokens)
        return tuple(self._call(self._stub.Tokenize, request, timeout_s).token_ids)

    def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool | None = None, timeout_s: float | None = None
    ) -> str:
        request = wire.encode_detokenize(token_ids, skip_special_tokens)
        return self._call(self._stub.Detokenize, request, timeout_s).text

    def model_info(self, *, timeout_s: float | None = None) -> ModelCard:
        return decode_model(self._call(self._stub.GetModelInfo, pb.GetModelInfoRequest(), timeout_s))

    def server_info(self, *, timeout_s: float | None = None) -> ServerInfo:
        return wire.decode_server(self._call(self._stub.GetServerInfo, pb.GetServerInfoRequest(), timeout_s))

    def loads(self, *, check_integrity: bool = False, timeout_s: float | None = None) -> tuple[RankLoad, ...]:
        """What each rank of the node has on its hands. check_integrity: InternalError where its tables disagree."""
        request = pb.GetLoadsRequest(check_integrity=check_integrity)
        return decode_loads(self._call(self._stub.GetLoads, request, timeout_s))

    def rounds(
        self, *, last: int = DEFAULT_LAST, follow: bool = False, timeout_s: float | None = None
    ) -> Responses[RankRounds]:
        """The last rounds of each rank of a node of any kind, and, if follow, those to come, until it is closed.

        Each batch is of one rank, in order. A caller that reads too slowly finds in `num_lost` what it missed.
        """
        request = admin_pb2.StreamRoundsRequest(last=checked_last(last), follow=follow)
        call = self._admin.StreamRounds(request, timeout=self._deadline(timeout_s))
        return Responses(call, self._where, decode_rounds)

    def health(self, *, timeout_s: float | None = None) -> Health:
        """What the node says of itself as a whole, by grpc.health.v1. Raises NotReady where nobody answers."""
        check = self._channel.unary_unary(HEALTH_METHOD, bytes, decode_health)
        return self._call(check, b"", timeout_s)

    def _start(
        self,
        prompt: str | None,
        options: GenerateOptions,
        num_samples: int,
        is_streamed: bool,
        timeout_s: float | None,
    ) -> Stream:
        request = wire.encode_generate(
            prompt,
            options,
            num_samples=num_samples,
            is_streamed=is_streamed,
            max_message_bytes=self._max_message_bytes,
        )
        call = self._stub.Generate(request, timeout=self._deadline(timeout_s))
        return Stream(call, self._where, wire.decode_piece)

    def _call(self, method: Callable[..., T], request: Any, timeout_s: float | None) -> T:
        try:
            return method(request, timeout=self._deadline(timeout_s))
        except grpc.RpcError as error:
            raise _error_of(error, self._where) from None

    def _deadline(self, timeout_s: float | None) -> float | None:
        return checked_timeout(self._timeout_s if timeout_s is None else timeout_s)


class Responses(Generic[Response]):
    """What a node says as it comes: iterate over it, once. Leaving a `with`, closing or dropping it ends the call."""

    def __init__(self, call: Any, where: str, decode: Callable[[Any], Response]) -> None:
        """where: the targets, for what is told of a call that fails."""
        self._call = call  # grpc's: an iterator of responses and an RpcContext in one
        self._where = where
        self._decode = decode
        self._is_answering = False
        self._is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __iter__(self) -> Iterator[Response]:
        return self

    def __next__(self) -> Response:
        try:
            response = next(self._call)
        except grpc.RpcError as error:
            if self._is_closed:
                raise StopIteration from None
            raise _error_of(error, self._where, self._is_answering) from None
        self._is_answering = True
        return self._decode(response)

    def close(self) -> None:
        self._is_closed = True
        self._call.cancel()


class Stream(Responses[Piece]):
    """An answer as it comes. Ending the call aborts what is left of it."""

    @property
    def placements(self) -> tuple[str, ...]:
        """Where each sample's prompt was prefilled, in index order. Waits for the end of the stream."""
        return placements_in(self._call.trailing_metadata())


def _error_of(error: Any, where: str, is_answering: bool = False) -> PdserveError:
    """An RpcError is the call itself, and knows its status."""
    return error_from(error.code(), error.details(), error.trailing_metadata(), where, is_answering)
