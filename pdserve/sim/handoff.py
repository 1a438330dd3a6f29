"""One prompt's way from the node that prefills to the node that decodes, in the order of the real protocol.

    Start ─▶ Accepted ─▶ chunk ready … ─▶ first token         each message takes latency_s; each chunk is pulled at once
    every byte here and the first token here ─▶ Release ─▶ Released ─▶ commit

Both nodes' transport threads and fronts do this beside the rounds: only what a scheduler is told waits for one.
"""

from __future__ import annotations

from typing import Protocol

from pdserve.request import RequestId, TransferId
from pdserve.scheduler.plan import ChunkComputed, KvAccepted, KvQuiet, KvReceived, Reservation, TransferFailed
from pdserve.sim.answers import Live
from pdserve.sim.clock import Clock
from pdserve.sim.costs import CostModel
from pdserve.sim.observer import Transferred
from pdserve.sim.prompts import ANSWER_TOKEN
from pdserve.sim.rank import Message
from pdserve.sim.tiers import Line


class Reader(Protocol):
    """The decode node's side."""

    def tell(self, index: int, message: Message) -> None:
        """Into the inbox of the rank of that index."""

    def on_first_token(self, handoff: Handoff) -> None:
        """The peer drew it: the client has it at once, whatever becomes of the KV."""

    def on_given_up(self, handoff: Handoff) -> None:
        """The peer will not prefill it; the rank has been told to."""

    def on_committed(self, handoff: Handoff, record: Transferred) -> None:
        """All of its KV is here, and the rank has been told."""


class Writer(Protocol):
    """The prefill node's side. Both calls are messages that have arrived."""

    def release(self, handoff: Handoff) -> None:
        """The last READ is done."""

    def abort(self, handoff: Handoff) -> None:
        """The reader is gone."""


class Handoff:
    """One attempt at one prompt. peer: index of the rank that prefills. peer_id: of the request there.

    num_peer_cached_tokens: what that rank did not have to compute.
    """

    def __init__(
        self,
        live: Live,
        reservation: Reservation,
        peer: int,
        peer_id: RequestId,
        *,
        reads: Line,
        reader: Reader,
        writer: Writer,
        clock: Clock,
        costs: CostModel,
    ) -> None:
        self.live = live
        self.peer = peer
        self.peer_id = peer_id
        self.transfer_id: TransferId = reservation.transfer_id
        self.num_cached_tokens = reservation.num_cached_tokens
        self.num_peer_cached_tokens = 0
        self._reads = reads
        self._reader = reader
        self._writer = writer
        self._clock = clock
        self._costs = costs
        self._is_over = False
        self._num_left_tokens = reservation.num_prompt_tokens - reservation.num_cached_tokens
        self._num_open_reads = 0
        self._num_bytes = 0
        self._started_s = 0.0
        self._last_read_ends_s = 0.0
        self._drawn_s: float | None = None

    # ------------------------------------------------------------ what the peer says, as it arrives

    def on_accepted(self) -> None:
        """Blocks for the whole prompt are reserved there."""
        if not self._is_over:
            self._tell(KvAccepted(self.transfer_id))

    def on_chunk(self, chunk: ChunkComputed) -> None:
        """Pull it, after what the rank is pulling already."""
        if self._is_over:
            return
        num_bytes = len(chunk.blocks) * self._costs.block_bytes
        read_s = self._costs.handoff.read_s + num_bytes / self._costs.handoff.bytes_per_s
        self._last_read_ends_s = self._reads.take(read_s)
        if not self._num_bytes:
            self._started_s = self._last_read_ends_s - read_s
        self._num_bytes += num_bytes
        self._num_left_tokens -= chunk.end_token - chunk.first_token
        self._num_open_reads += 1
        self._clock.at(self._last_read_ends_s, self._on_read)

    def on_first_token(self, drawn_s: float) -> None:
        if not self._is_over:
            self._drawn_s = drawn_s
            self._reader.on_first_token(self)
            self._release_when_complete()

    def on_given_up(self) -> None:
        """The peer refused it, or gave it up: it is prefilled where it decodes."""
        if not self._is_over:
            self._is_over = True
            self._tell(TransferFailed(self.transfer_id, () if self._drawn_s is None else (ANSWER_TOKEN,)))
            self._reader.on_given_up(self)

    # ------------------------------------------------------------ read, confirm, commit

    def _on_read(self) -> None:
        self._num_open_reads -= 1
        self._release_when_complete()

    def _release_when_complete(self) -> None:
        """The last READ is done and nothing more will be announced."""
        is_complete = self._drawn_s is not None and not self._num_left_tokens and not self._num_open_reads
        if is_complete and not self._is_over:
            latency_s = self._costs.handoff.latency_s
            self._clock.after(latency_s, lambda: self._writer.release(self))
            self._clock.after(2 * latency_s, self._commit)

    def _commit(self) -> None:
        assert self._drawn_s is not None, "a commit before the first token"
        assert not self._is_over, "a handoff ended after its release"
        self._is_over = True
        self._tell(KvReceived(self.transfer_id, ANSWER_TOKEN))
        now_s = self._clock.now_s
        record = Transferred(
            self.live.request.number, self._started_s, now_s, self._num_bytes, exposed_s=now_s - self._drawn_s
        )
        self._reader.on_committed(self, record)

    def _tell(self, message: Message) -> None:
        self._reader.tell(self.live.index, message)

    # ------------------------------------------------------------ giving up

    def end(self) -> None:
        """Nobody waits for it any more: nothing more is pulled, and the peer hears of it."""
        if not self._is_over:
            self._is_over = True
            self._clock.after(self._costs.handoff.latency_s, lambda: self._writer.abort(self))

    def fall_quiet(self) -> None:
        """The scheduler left the blocks to the transfer: they are quiet once the last READ has ended."""
        quiet_s = max(self._clock.now_s, self._last_read_ends_s)
        self._clock.at(quiet_s, lambda: self._tell(KvQuiet(self.transfer_id)))
