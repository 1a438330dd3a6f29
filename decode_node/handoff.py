"""One prompt's handoff, seen from the decode node: read, confirm, commit.

    Start ─▶ (Progress) ─▶ Accepted ─▶ ChunkReady … ─▶ FirstToken     each chunk is pulled as it is announced
    every byte here and FirstToken here ─▶ Release ─▶ Released(valid) ─▶ confirm ─▶ committed

Anything else is a failed transfer, whatever the bytes look like.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import grpc

from decode_node.coverage import Coverage
from decode_node.patience import Patience
from decode_node.peer import Peer
from pdserve.engine.front import Rank
from pdserve.engine.messages import (
    ConfirmPull,
    PullAdvanced,
    PullBroken,
    PullChunk,
    PullCommitted,
    PullFinished,
)
from pdserve.errors import PeerBusy, PeerError, PeerReplaced, ProtocolError, TransferFailed
from pdserve.request import LeaseId, TransferId
from pdserve.rpc.handoff import (
    Accepted,
    ChunkReady,
    Computing,
    FirstToken,
    HandoffAbort,
    Queued,
    Release,
    Released,
    Renew,
    Start,
    ToDecode,
    life_s,
)
from pdserve.rpc.handoff_codec import decode_load, decode_to_decode, encode_to_prefill
from pdserve.rpc.metadata import ERROR_KEY
from pdserve.v1 import handoff_pb2 as pb

log = logging.getLogger(__name__)

FromPull = PullAdvanced | PullFinished | PullBroken | PullCommitted

RENEWALS_A_LEASE = 6
# A prefill node says something every 2 s for as long as its rank shows life. Four of these: a node that is stopped, or
# cut off without the connection's end, is left long before the no-progress deadline of a prompt that just takes long.
SILENCE_S = 8.0
# A wait that ends later than it should by this much: our own process did not run, stopped or without a core.
LATE_S = 1.0

Call = grpc.aio.StreamStreamCall[pb.PrefillRequest, pb.PrefillResponse]


@dataclass(frozen=True, slots=True)
class FromPart:
    """part: the process of our rank whose transport says it."""

    part: int
    message: FromPull


Said = ToDecode | FromPart | PeerError


class Handoff:
    """`run` it once. Messages of the transport about its transfer are given to `put`."""

    def __init__(
        self,
        peer: Peer,
        rank: Rank,
        transfer_id: TransferId,
        on_first_token: Callable[[FirstToken], None],
        no_progress_s: Callable[[], float],
        vocab_size: int,
    ) -> None:
        assert peer.description is not None
        assert peer.pairing is not None
        self._peer = peer
        self._pairing = peer.pairing
        self._lease_s = peer.description.lease_s
        self._rank = rank
        self._transfer_id = transfer_id
        self._on_first_token = on_first_token
        self._write_timeout_s = min(no_progress_s(), SILENCE_S)
        self._patience = Patience(no_progress_s, SILENCE_S)
        self._vocab_size = vocab_size
        self._inbox: asyncio.Queue[Said] = asyncio.Queue()
        self._lease_id: LeaseId | None = None
        self._first_token: FirstToken | None = None
        self._coverage = Coverage(peer.pairing, len(rank.members))
        self._is_release_sent = False
        self._is_confirmed = False

    def put(self, message: Said) -> None:
        self._inbox.put_nowait(message)

    async def run(self, start: Start) -> None:
        """Returns once the KV is committed. Raises a PeerError for any other end; cancelled, it aborts at the peer."""
        call: Call = self._peer.stub.Prefill()
        reader = asyncio.create_task(self._read(call))
        try:
            await self._write(call, encode_to_prefill(start))
            await self._follow(call)
        finally:
            reader.cancel()
            call.cancel()

    async def _read(self, call: Call) -> None:
        try:
            async for message in call:
                self._peer.load = decode_load(message) or self._peer.load
                said = decode_to_decode(message)
                self._patience.on_word(said)
                self.put(said)
            self.put(TransferFailed("the prefill node ended the stream"))
        except grpc.aio.AioRpcError as error:
            self.put(_peer_error(error))
        except PeerError as error:
            self.put(error)

    async def _write(self, call: Call, message: pb.PrefillRequest) -> None:
        try:
            async with asyncio.timeout(self._write_timeout_s):
                await call.write(message)
        except TimeoutError:
            raise TransferFailed(f"{self._peer.target} took no message for {self._write_timeout_s:g} s") from None
        except grpc.aio.AioRpcError as error:
            raise _peer_error(error) from None
        except asyncio.InvalidStateError:
            # The stream is over; the reader knows why and says so in the inbox.
            return

    # ------------------------------------------------------------ events

    async def _follow(self, call: Call) -> None:
        """Until committed: handle what comes, renew in between, give up after too long without progress."""
        renew_at = time.monotonic() + self._lease_s / RENEWALS_A_LEASE
        while not self._coverage.is_committed:
            until_s = min(renew_at, self._patience.ends_s)
            message = await self._next(until_s)
            if time.monotonic() - until_s > LATE_S:
                self._patience.on_own_pause()
            if message is not None:
                if isinstance(message, FromPart):
                    self._patience.on_news()
                await self._handle(call, message)
            if time.monotonic() >= renew_at:
                renew_at = time.monotonic() + await self._renew(call)
            if self._inbox.empty() and (reason := self._patience.why_over()):
                raise TransferFailed(f"{reason} at {self._peer.target}")

    async def _next(self, until_s: float) -> Said | None:
        """What comes next, None where nothing does in time; what is here already comes before the time is judged."""
        with suppress(TimeoutError):
            # Not wait_for: in Python 3.11 it loses a cancellation that comes together with a message.
            async with asyncio.timeout(until_s - time.monotonic()):
                return await self._inbox.get()
        return None

    async def _renew(self, call: Call) -> float:
        """Say that we still want the lease, if our rank lives to use it. Returns how long the next time is away."""
        renew_s = self._lease_s / RENEWALS_A_LEASE
        self._rank.ask_for_life()
        if not self._rank.is_alive(life_s(self._lease_s, self._rank.longest_round_s)):
            return renew_s / 4  # it may be at the end of a long forward
        if self._lease_id is not None and not self._is_release_sent:
            await self._write(call, encode_to_prefill(Renew(self._lease_id)))
        return renew_s

    async def _handle(self, call: Call, message: Said) -> None:
        match message:
            case Queued() | Computing():
                pass
            case FromPart():
                self._on_part(message)
            case Accepted():
                self._on_accepted(message)
            case ChunkReady():
                self._on_chunk(message)
            case FirstToken():
                self._on_first(message)
            case Released(is_valid=is_valid):
                self._on_released(is_valid)
            case HandoffAbort(reason=reason):
                raise TransferFailed(reason)
            case PeerError():
                self._on_stream_error(message)
        await self._release_when_complete(call)

    def _on_part(self, said: FromPart) -> None:
        match said.message:
            case PullFinished():
                self._coverage.pull(said.part)
            case PullCommitted():
                self._coverage.commit(said.part)
            case PullBroken(reason=reason):
                raise TransferFailed(reason)

    def _on_accepted(self, message: Accepted) -> None:
        if self._lease_id is not None:
            raise ProtocolError("Accepted came twice")
        if message.num_ranks != self._pairing.peer_tp:
            raise ProtocolError(f"the lease is held by {message.num_ranks} ranks, not {self._pairing.peer_tp}")
        self._lease_id = message.lease_id
        self._rank.accept_transfer(self._transfer_id)

    def _on_chunk(self, chunk: ChunkReady) -> None:
        if self._lease_id is None:
            raise ProtocolError(f"chunk {chunk.seq} of rank {chunk.rank} came before Accepted")
        self._coverage.announce(chunk)
        for part, member in enumerate(self._rank.members):
            if sources := self._pairing.sources_of(part, chunk.rank):
                member.tell_transport(
                    PullChunk(
                        self._transfer_id,
                        chunk.rank,
                        chunk.seq,
                        chunk.first_token,
                        chunk.end_token,
                        chunk.blocks,
                        sources,
                        chunk.block_hashes,
                    )
                )

    def _on_first(self, first: FirstToken) -> None:
        if self._lease_id is None or self._first_token is not None:
            raise ProtocolError("FirstToken out of order")
        if not 0 <= first.token_id < self._vocab_size:
            raise ProtocolError(f"the first token is {first.token_id}, the vocabulary has {self._vocab_size}")
        self._first_token = first
        self._on_first_token(first)

    async def _release_when_complete(self, call: Call) -> None:
        """The last READ is done and nothing more will be announced."""
        first = self._first_token
        if first is None or self._is_release_sent:
            return
        if not self._coverage.is_pulled or not self._coverage.is_announced(first.num_chunks):
            return
        assert self._lease_id is not None
        self._is_release_sent = True
        await self._write(call, encode_to_prefill(Release(self._lease_id)))

    def _on_released(self, is_valid: bool) -> None:
        if not self._is_release_sent or self._is_confirmed:
            raise ProtocolError("Released out of order")
        if not is_valid:
            raise TransferFailed("the prefill node no longer vouches for the blocks")
        assert self._first_token is not None
        self._is_confirmed = True
        self._rank.tell_transport(ConfirmPull(self._transfer_id, True, self._first_token.token_id))

    def _on_stream_error(self, error: PeerError) -> None:
        """After the confirmation the stream has nothing more to say; before it, its end is a failure."""
        if not self._is_confirmed:
            raise error


def _peer_error(error: grpc.aio.AioRpcError) -> PeerError:
    """What the peer said went wrong, where it makes a difference here; a failed transfer otherwise."""
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return PeerBusy(str(error.details()))
    if dict(error.trailing_metadata() or ()).get(ERROR_KEY) == PeerReplaced.__name__:
        return PeerReplaced(str(error.details()))
    return TransferFailed(f"{error.code().name}: {error.details()}")
