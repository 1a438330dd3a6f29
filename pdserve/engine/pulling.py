"""What this rank reads from peers: the pull table between the loop, which owns the destinations, and the front.

Quiet is what the table calls so, and the loop is told of nothing else. Transport thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from pdserve.engine.messages import (
    ConfirmPull,
    FromTransport,
    OpenPull,
    PullAdvanced,
    PullBroken,
    PullChunk,
    PullFinished,
)
from pdserve.engine.messages import PullCommitted as PullCommittedMessage
from pdserve.errors import ProtocolError
from pdserve.request import TransferId
from pdserve.scheduler.plan import Event, KvQuiet, KvReceived
from pdserve.transfer.base import Command, CutPeer, PeerId, TransportEvent
from pdserve.transfer.checksum import Checksums, Mismatch
from pdserve.transfer.pull import (
    PullChunkRead,
    PullCommitted,
    PullComplete,
    PullEvent,
    PullFailed,
    PullQuiet,
    PullSource,
    PullTable,
)

log = logging.getLogger(__name__)


class Pulling:
    """submit: of the transport. checksums: of our blocks, where they are compared with what their peer announced."""

    def __init__(
        self,
        block_size: int,
        quarantine_s: float,
        submit: Callable[[Command], None],
        tell_front: Callable[[FromTransport], None],
        tell_loop: Callable[[Event], None],
        checksums: Checksums | None,
    ) -> None:
        self._pulls = PullTable(block_size)
        self._quarantine_s = quarantine_s
        self._submit = submit
        self._tell_front = tell_front
        self._tell_loop = tell_loop
        self._checksums = checksums
        self._unsourced: dict[TransferId, OpenPull] = {}  # no chunk has come yet, so no peer is known
        self._newest = TransferId(0)  # of those that were opened, in the order of their ids
        self._early: dict[TransferId, list[PullChunk]] = {}
        self._peer_blocks: dict[PeerId, int] = {}  # of each connected peer's slab

    @property
    def num_open(self) -> int:
        """Those that something was read for, draining ones included."""
        return self._pulls.num_open

    def counters(self) -> dict[str, int]:
        return {
            "open_pulls": self._pulls.num_open + len(self._unsourced),
            "open_reads": self._pulls.num_open_reads,
            "kv_checksum_failures_total": self._checksums.num_failures if self._checksums is not None else 0,
            **{f"pull:{name}": count for name, count in list(self._pulls.counters.items())},
        }

    # ------------------------------------------------------------ peers

    def on_connected(self, peer: PeerId, num_blocks: int) -> None:
        self._peer_blocks[peer] = num_blocks

    def on_unusable(self, peer: PeerId) -> None:
        self._peer_blocks.pop(peer, None)

    def cut_overdue(self, now_s: float) -> None:
        """The last resort for blocks that a peer keeps for too long."""
        for peer in self._pulls.overdue(now_s, self._quarantine_s):
            log.warning("peer %s has kept blocks in quarantine for %.0f s: cutting it off", peer, self._quarantine_s)
            self._submit(CutPeer(peer))

    # ------------------------------------------------------------ a pull

    def open(self, command: OpenPull) -> None:
        assert command.transfer_id > self._newest, f"{command} after {self._newest}"
        self._newest = command.transfer_id
        self._unsourced[command.transfer_id] = command
        for chunk in self._early.pop(command.transfer_id, ()):
            self.chunk(chunk)

    def chunk(self, chunk: PullChunk) -> None:
        """The first one says which ranks of which peer it is.

        To a rank's other processes the word to open comes by way of its leader, and the peer may be faster.
        """
        if chunk.transfer_id > self._newest:
            self._early.setdefault(chunk.transfer_id, []).append(chunk)
            return
        opened = self._unsourced.pop(chunk.transfer_id, None)
        if opened is not None:
            sources = [PullSource(rank, peer, self._peer_blocks.get(peer, 0)) for rank, peer in chunk.sources]
            self._pulls.open(
                opened.transfer_id, sources, opened.num_cached_tokens, opened.num_prompt_tokens, opened.destinations
            )
        try:
            reads = self._pulls.chunk(
                chunk.transfer_id, chunk.rank, chunk.seq, chunk.first_token, chunk.end_token, chunk.blocks
            )
            for read in reads:
                self._submit(read)
                if self._checksums is not None:
                    self._checksums.expect(chunk.transfer_id, read, chunk.block_hashes)
        except ProtocolError as error:
            self._break(chunk.transfer_id, "protocol", error.message)

    def confirm(self, answer: ConfirmPull) -> None:
        events = self._pulls.confirm(answer.transfer_id, answer.valid, time.monotonic())
        if PullCommitted(answer.transfer_id) in events:
            self._tell_loop(KvReceived(answer.transfer_id, answer.first_token))
        self._on_pull_events(events)

    def abandon(self, transfer_id: TransferId) -> None:
        """Quiet at once where nothing was ever posted, or everything has ended already."""
        if self._unsourced.pop(transfer_id, None) is None and self._pulls.state(transfer_id) is not None:
            self._on_pull_events(self._pulls.abandon(transfer_id, "unwanted", time.monotonic()))
            return
        self._tell_loop(KvQuiet(transfer_id))

    def _break(self, transfer_id: TransferId, label: str, reason: str) -> None:
        self._tell_front(PullBroken(transfer_id, reason))
        self._on_pull_events(self._pulls.abandon(transfer_id, label, time.monotonic()))

    # ------------------------------------------------------------ what becomes of it

    def on_event(self, event: TransportEvent, now_s: float) -> None:
        """What the transport saw."""
        self._on_pull_events(self._pulls.on_event(event, now_s))

    def _on_pull_events(self, events: list[PullEvent]) -> None:
        for event in events:
            match event:
                case PullChunkRead():
                    self._tell_front(PullAdvanced(event.transfer_id))
                case PullComplete():
                    self._on_complete(event)
                case PullCommitted():
                    self._tell_front(PullCommittedMessage(event.transfer_id))
                case PullFailed():
                    self._tell_front(PullBroken(event.transfer_id, event.reason))
                case PullQuiet():
                    if self._checksums is not None:
                        self._checksums.forget(event.transfer_id)
                    self._tell_loop(KvQuiet(event.transfer_id))

    def _on_complete(self, pull: PullComplete) -> None:
        """The bytes are here; with checksums they are looked at before anybody hears of it."""
        if self._checksums is None:
            self._finish(pull)
        else:
            self._checksums.compare(pull.transfer_id, lambda differing: self._on_compared(pull, differing))

    def _on_compared(self, pull: PullComplete, differing: list[Mismatch]) -> None:
        if not differing:
            self._finish(pull)
            return
        first, count = differing[0], len(differing)
        log.error("checksums: transfer %d failed, blocks that differ: %d, %s", pull.transfer_id, count, first)
        self._break(pull.transfer_id, "checksum", str(first))

    def _finish(self, pull: PullComplete) -> None:
        self._tell_front(
            PullFinished(pull.transfer_id, pull.num_bytes, pull.num_reads, pull.num_descriptors, pull.elapsed_s)
        )
