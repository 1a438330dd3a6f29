"""The Handoff service of a prefill node: one stream a prompt, from Start to Released."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
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
    RevokeLease,
)
from pdserve.engine.ranks import Ranks
from pdserve.errors import (
    DeadlineExceeded,
    InvalidRequest,
    NotReady,
    PdserveError,
    PeerMismatch,
    PeerReplaced,
    ProtocolError,
)
from pdserve.kv.layout import PAIRING_REMEDY
from pdserve.node.seldom import Seldom
from pdserve.request import PREFILL_ONLY, LeaseId, RequestId, TokenRequest
from pdserve.rpc.handoff import (
    Description,
    RequestKey,
    Start,
    ToDecode,
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
from prefill_node.handoff import Handoff, StreamClosed
from prefill_node.parts import FromPart
from prefill_node.workload import Workload, load_of

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


class HandoffServicer(handoff_pb2_grpc.HandoffServicer):
    """Answers decode nodes for the ranks of this node. Belongs to the front's event loop."""

    def __init__(self, ranks: Ranks, description: Description) -> None:
        self.description = description
        self._ranks = ranks
        block_size = description.fingerprint.block_size
        self._workloads = [Workload(description.num_blocks, block_size) for _ in ranks]
        self._left = Seldom(log, logging.INFO)
        for rank in ranks:
            for part, member in enumerate(rank.members):
                member.on_transport = partial(_on_transport, rank, part)

    async def Describe(self, request: pb.DescribeRequest, context: Context) -> pb.DescribeResponse:
        check_protocol(request)
        if self._ranks.lost.is_set():
            raise NotReady(f"{self._ranks.lost_reason}: another one starts")
        for rank in self._ranks:
            if request.known_incarnation != self.description.incarnation:
                rank.tell_transport(ExpectPeer())
            rank.ask_for_life()  # so that the next answer knows how long its rounds take by then
        longest_chunk_s = max(rank.longest_round_s for rank in self._ranks)
        answer = encode_description(replace(self.description, longest_chunk_s=longest_chunk_s))
        answer.load.CopyFrom(encode_load(load_of(self._workloads)))
        return answer

    async def Prefill(
        self, requests: AsyncIterator[pb.PrefillRequest], context: Context
    ) -> AsyncGenerator[pb.PrefillResponse, None]:
        start = await self._receive_start(requests)
        request = TokenRequest(self._id_of(start.request_key), start.prompt, start.sampling, start.priority)
        rank = self._ranks.choose(request)
        rank.ask_for_life()  # before the prompt: the loop answers, and may then be in its forward for long
        inbox = rank.open(request, PREFILL_ONLY, start.num_cached_tokens)
        # A lease bears the rank's id of its request, which is never used again.
        lease_id, lease_s = LeaseId(inbox.rank_id), self.description.lease_s
        handoff = Handoff(lease_id, rank, self._workloads[rank.number], len(start.prompt), lease_s)
        handoff.workload.add(lease_id, len(start.prompt))
        reader = asyncio.create_task(self._read(requests, inbox))
        try:
            async with aclosing(self._tell(handoff, inbox, start)) as messages:
                async for message in messages:
                    yield message
        except PdserveError:
            handoff.is_left = False
            raise
        finally:
            if handoff.is_left:
                self._tell_left(handoff, context.peer())
            handoff.workload.remove(handoff.lease_id)
            reader.cancel()
            # However the stream ended. A lease that was released, a request that is over, ignore this.
            rank.tell_transport(RevokeLease(handoff.lease_id, "the stream ended"))
            rank.close(request.request_id, is_over=False)

    def _tell_left(self, handoff: Handoff, decode_node: str) -> None:
        """Its client went, it gave up on us, or it is gone: all look the same from here."""
        done = f"{handoff.num_tokens_done} of its {handoff.num_prompt_tokens} tokens were computed"
        line = f"the decode node at {decode_node} left a prompt behind, {done}"
        self._left.tell(line, f"by {decode_node}")

    def _with_load(self, message: pb.PrefillResponse) -> pb.PrefillResponse:
        message.load.CopyFrom(encode_load(load_of(self._workloads)))
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
            raise PeerMismatch(f"{'; '.join(differences)}: {PAIRING_REMEDY}")
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

    async def _tell(self, handoff: Handoff, inbox: Inbox, start: Start) -> AsyncGenerator[pb.PrefillResponse, None]:
        """Until the handoff is over."""
        deadline = None if start.time_left_s is None else time.monotonic() + start.time_left_s
        while not handoff.is_over:
            said = await self._next(handoff, inbox)
            if deadline is not None and time.monotonic() > deadline:
                raise DeadlineExceeded("the caller's deadline passed before the handoff was complete")
            if not said and time.monotonic() >= handoff.progress_due_s:
                said = handoff.progress()
            for message in said:
                handoff.put_off_progress()
                handoff.workload.compute(handoff.lease_id, handoff.num_tokens_done)
                yield self._with_load(encode_to_decode(message))

    async def _next(self, handoff: Handoff, inbox: Inbox) -> Sequence[ToDecode]:
        """What to say next, if the next thing that happens is worth telling."""
        try:
            # Not wait_for: in Python 3.11 it loses a cancellation that comes together with a message.
            async with asyncio.timeout(handoff.progress_due_s - time.monotonic()):
                message = await inbox.get()
        except TimeoutError:
            return ()
        return handoff.answer(message)


def _on_transport(rank: Rank, part: int, message: FromTransport) -> None:
    """What a transport thread says of a lease goes to its stream."""
    if isinstance(message, LeaseOpened | ChunkAnnounced | LeaseAnswer | LeaseGone):
        rank.deliver(RequestId(message.lease_id), FromPart(part, message))
