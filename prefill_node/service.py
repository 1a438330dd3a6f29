"""The Handoff service of a prefill node: one stream a prompt, from Start to Released."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any

import grpc

from pdserve.engine.front import Inbox, Rank
from pdserve.engine.messages import (
    ChunkAnnounced,
    ExpectPeer,
    FromTransport,
    LeaseAnswer,
    LeaseGone,
    LeaseOpened,
    Output,
    ReleaseLease,
    RenewLease,
    RevokeLease,
)
from pdserve.errors import (
    DeadlineExceeded,
    InvalidRequest,
    NotReady,
    PdserveError,
    PeerMismatch,
    PeerReplaced,
    ProtocolError,
    TransferFailed,
    named,
)
from pdserve.node.seldom import Seldom
from pdserve.request import PREFILL_ONLY, LeaseId, RequestId, TokenRequest
from pdserve.rpc.handoff import (
    Accepted,
    ChunkReady,
    Computing,
    Description,
    FirstToken,
    HandoffAbort,
    Queued,
    Release,
    Released,
    Renew,
    RequestKey,
    Start,
    ToDecode,
    life_s,
)
from pdserve.rpc.handoff_codec import (
    check_protocol,
    decode_to_prefill,
    encode_description,
    encode_load,
    encode_to_decode,
)
from pdserve.v1 import handoff_pb2 as pb
from pdserve.v1 import handoff_pb2_grpc
from prefill_node.workload import Workload

log = logging.getLogger(__name__)

# How often D hears of a prompt that is queued or computing, when nothing else is said. The protocol says 2 at most.
PROGRESS_S = 1.0

Context = grpc.aio.ServicerContext[Any, Any]


class StreamClosed:
    """D's side of the stream has ended."""


@dataclass(slots=True)
class Handoff:
    """One prompt on its way: what D was told so far.

    early_token: drawn before the lease was known here. The loop says the one and the transport thread the other, so
    either may come first; D hears of the lease first. is_left: D has not been told how it ended; if it goes now, it
    leaves the prompt behind.
    """

    lease_id: LeaseId
    is_accepted: bool = False
    num_chunks: int = 0
    num_tokens_done: int = 0
    early_token: Output | None = None
    first_token: FirstToken | None = None
    is_release_asked: bool = False
    is_over: bool = False
    is_left: bool = True
    progress_due_s: float = field(default_factory=lambda: time.monotonic() + PROGRESS_S)

    @property
    def is_complete(self) -> bool:
        """D knows everything it needs to pull the whole prompt."""
        return self.first_token is not None and self.num_chunks == self.first_token.num_chunks


@dataclass(slots=True)
class HandoffServicer(handoff_pb2_grpc.HandoffServicer):
    """Answers decode nodes for one rank. Belongs to the front's event loop."""

    rank: Rank
    description: Description
    _queue: dict[LeaseId, None] = field(default_factory=dict)  # not yet accepted, in order of arrival
    _workload: Workload = field(init=False)
    _left: Seldom = field(default_factory=lambda: Seldom(log, logging.INFO))

    def __post_init__(self) -> None:
        self._workload = Workload(self.description.num_blocks, self.description.fingerprint.block_size)

    def on_transport(self, message: FromTransport) -> None:
        """A message of the transport thread goes to the stream of its lease."""
        if isinstance(message, LeaseOpened | ChunkAnnounced | LeaseAnswer | LeaseGone):
            self.rank.deliver(RequestId(message.lease_id), message)

    async def Describe(self, request: pb.DescribeRequest, context: Context) -> pb.DescribeResponse:
        check_protocol(request)
        if self.rank.lost.is_set():
            raise NotReady(f"{self.rank.lost_reason}: another one starts")
        if request.known_incarnation != self.description.incarnation:
            self.rank.tell_transport(ExpectPeer())
        self.rank.ask_for_life()  # so that the next answer knows how long its rounds take by then
        answer = encode_description(replace(self.description, longest_chunk_s=self.rank.longest_round_s))
        answer.load.CopyFrom(encode_load(self._workload.load))
        return answer

    async def Prefill(
        self, requests: AsyncIterator[pb.PrefillRequest], context: Context
    ) -> AsyncGenerator[pb.PrefillResponse, None]:
        start = await self._receive_start(requests)
        request = TokenRequest(self._id_of(start.request_key), start.prompt, start.sampling, start.priority)
        self.rank.ask_for_life()  # before the prompt: the loop answers, and may then be in its forward for long
        inbox = self.rank.open(request, PREFILL_ONLY, start.num_cached_tokens)
        # A lease bears the rank's id of its request, which is never used again.
        handoff = Handoff(LeaseId(inbox.rank_id))
        self._queue[handoff.lease_id] = None
        self._workload.add(handoff.lease_id, len(start.prompt))
        reader = asyncio.create_task(self._read(requests, inbox))
        deadline = None if start.time_left_s is None else time.monotonic() + start.time_left_s
        try:
            while not handoff.is_over:
                said = await self._next(handoff, inbox)
                if deadline is not None and time.monotonic() > deadline:
                    raise DeadlineExceeded("the caller's deadline passed before the handoff was complete")
                if said is None and time.monotonic() >= handoff.progress_due_s:
                    said = self._progress(handoff)
                if said is not None:
                    handoff.progress_due_s = time.monotonic() + PROGRESS_S
                    num_done = len(start.prompt) if handoff.first_token is not None else handoff.num_tokens_done
                    self._workload.compute(handoff.lease_id, num_done)
                    yield self._with_load(encode_to_decode(said))
        except PdserveError:
            handoff.is_left = False
            raise
        finally:
            if handoff.is_left:
                self._tell_left(handoff, len(start.prompt), context.peer())
            self._queue.pop(handoff.lease_id, None)
            self._workload.remove(handoff.lease_id)
            reader.cancel()
            # However the stream ended. A lease that was released, a request that is over, ignore this.
            self.rank.tell_transport(RevokeLease(handoff.lease_id, "the stream ended"))
            self.rank.close(request.request_id, is_over=False)

    def _tell_left(self, handoff: Handoff, num_tokens: int, decode_node: str) -> None:
        """Its client went, it gave up on us, or it is gone: all look the same from here."""
        done = f"{handoff.num_tokens_done} of its {num_tokens} tokens were computed"
        line = f"the decode node at {decode_node} left a prompt behind, {done}"
        self._left.tell(line, f"by {decode_node}")

    def _with_load(self, message: pb.PrefillResponse) -> pb.PrefillResponse:
        message.load.CopyFrom(encode_load(self._workload.load))
        return message

    # ------------------------------------------------------------ start

    async def _receive_start(self, requests: AsyncIterator[pb.PrefillRequest]) -> Start:
        async for message in requests:
            start = decode_to_prefill(message)
            if not isinstance(start, Start):
                raise ProtocolError(f"the first message is {type(start).__name__}, it must be Start")
            self._check_start(start)
            return start
        raise ProtocolError("the stream ended before its Start")

    def _check_start(self, start: Start) -> None:
        mine = self.description
        if start.incarnation != mine.incarnation:
            raise PeerReplaced(f"incarnation: {mine.incarnation!r} here, {start.incarnation!r} there; describe again")
        if differences := mine.fingerprint.differences(start.fingerprint):
            raise PeerMismatch("; ".join(differences))
        if start.weights_version != mine.weights_version:
            raise PeerMismatch(f"weights_version: {mine.weights_version} here, {start.weights_version} there")
        if len(start.prompt) > mine.max_prompt_tokens:
            raise InvalidRequest(f"prompt has {len(start.prompt)} tokens, the limit is {mine.max_prompt_tokens}")

    def _id_of(self, key: RequestKey) -> RequestId:
        """One live request a key: opening a second one is refused. A retry is a new attempt."""
        return RequestId(f"{self.description.incarnation}:{key.decode_incarnation}:{key.request_id}:{key.attempt}")

    # ------------------------------------------------------------ the stream

    async def _read(self, requests: AsyncIterator[pb.PrefillRequest], inbox: Inbox) -> None:
        """What D says joins what the rank says, in one inbox."""
        try:
            async for message in requests:
                inbox.put(decode_to_prefill(message))
        except Exception as error:  # raised where the stream is answered, bytes that are no message included
            inbox.put(error)
        else:
            inbox.put(StreamClosed())

    async def _next(self, handoff: Handoff, inbox: Inbox) -> ToDecode | None:
        """What to say next, if the next thing that happens is worth telling."""
        try:
            # Not wait_for: in Python 3.11 it loses a cancellation that comes together with a message.
            async with asyncio.timeout(handoff.progress_due_s - time.monotonic()):
                message = await inbox.get()
        except TimeoutError:
            return None
        return self._answer(handoff, message)

    def _progress(self, handoff: Handoff) -> ToDecode | None:
        """Nothing where the rank may stand still: D must not take the front's life for the rank's."""
        handoff.progress_due_s = time.monotonic() + PROGRESS_S
        self.rank.ask_for_life()
        if not self.rank.is_alive(life_s(self.description.lease_s, self.rank.longest_round_s)):
            return None
        computed = self.rank.num_tokens_computed
        if handoff.is_accepted:
            return Computing(handoff.num_tokens_done, computed)
        return Queued(list(self._queue).index(handoff.lease_id), computed)

    def _answer(self, handoff: Handoff, message: object) -> ToDecode | None:
        match message:
            case LeaseOpened():
                handoff.is_accepted = True
                del self._queue[handoff.lease_id]
                if handoff.early_token is not None:
                    self.rank.deliver(RequestId(handoff.lease_id), handoff.early_token)
                return Accepted(handoff.lease_id, num_ranks=1)
            case ChunkAnnounced(seq=seq, first_token=first, end_token=end, blocks=blocks, block_hashes=hashes):
                handoff.num_chunks += 1
                handoff.num_tokens_done = end
                return ChunkReady(0, seq, first, end, blocks, hashes)
            case Output(token_ids=(_, *_)) if not handoff.is_accepted:
                handoff.early_token = message
                return None
            case Output():
                handoff.first_token = _first_token(message)
                # One that ends the answer is all D wants.
                handoff.is_left = handoff.first_token.finish is None
                return handoff.first_token
            case LeaseAnswer(valid=valid):
                handoff.is_over, handoff.is_left = True, False
                return Released(valid)
            case Renew() | Release():
                self._on_lease_message(handoff, message)
                return None
            case LeaseGone(reason=reason):
                handoff.is_over, handoff.is_left = True, False
                return HandoffAbort(reason)
            case HandoffAbort() | StreamClosed():
                handoff.is_over = True
                return None
            case Exception():
                raise message
            case _:
                raise ProtocolError(f"{type(message).__name__} out of order")

    def _on_lease_message(self, handoff: Handoff, message: Renew | Release) -> None:
        if not handoff.is_accepted or message.lease_id != handoff.lease_id:
            raise ProtocolError(f"lease_id {message.lease_id!r} is not this stream's")
        if isinstance(message, Renew):
            self.rank.tell_transport(RenewLease(handoff.lease_id))
            return
        if not handoff.is_complete or handoff.is_release_asked:
            raise ProtocolError("Release came before the last chunk and the first token, or twice")
        handoff.is_release_asked = True
        self.rank.tell_transport(ReleaseLease(handoff.lease_id))


def _first_token(output: Output) -> FirstToken:
    """Raises the error the output carries, TransferFailed for a prompt that was given up here."""
    if output.error_name:
        raise named(output.error_name, output.error_message)
    if not output.token_ids:
        raise TransferFailed("the prefill node gave the prompt up")
    return FirstToken(
        token_id=output.token_ids[0],
        num_chunks=output.num_chunks,
        num_cached_tokens=output.num_cached_tokens,
        logprobs=output.logprobs[0] if output.logprobs else None,
        finish=output.finish,
        matched_stop_token=output.matched_stop_token,
        prompt_logprobs=output.prompt_logprobs,
    )
