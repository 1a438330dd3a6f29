"""The thread that owns a rank's transport, its leases and its pulls, so that none of them ever waits for a forward.

Three sources, one at a time: the loop's commands, the front's messages, the transport's events. Rules it keeps:
revoke first, then tell the loop; announce to the table first, then to the peer; quiet is what the pull table calls so.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable

import zmq

from pdserve.engine.channel import RankChannel
from pdserve.engine.messages import (
    AbandonPull,
    AnnounceChunk,
    ChunkAnnounced,
    ConfirmPull,
    ConnectPeer,
    DropLease,
    DropPeer,
    ExpectPeer,
    FromTransport,
    LeaseAnswer,
    LeaseGone,
    LeaseOpened,
    LoopCommand,
    OpenLease,
    OpenPull,
    PeerConnected,
    PeerUnusable,
    PullBroken,
    PullChunk,
    PullFinished,
    ReleaseLease,
    RenewLease,
    RevokeLease,
    ToTransport,
)
from pdserve.engine.messages import PullCommitted as PullCommittedMessage
from pdserve.errors import ProtocolError
from pdserve.request import BlockId, LeaseId, RequestId, TransferId
from pdserve.scheduler.plan import Event, KvQuiet, KvReceived, LeaseReleased, LeaseRevoked
from pdserve.transfer.base import Connect, Connected, ConnectFailed, CutPeer, KVTransport, PeerId, PeerLost
from pdserve.transfer.lease import LeaseState, LeaseTable, RevokedLease
from pdserve.transfer.pull import (
    PullCommitted,
    PullComplete,
    PullEvent,
    PullFailed,
    PullQuiet,
    PullSource,
    PullTable,
)

log = logging.getLogger(__name__)

# While a read is open here, or a peer may be reading from here.
BUSY_POLL_MS = 1
IDLE_POLL_MS = 1000
# How long a peer that asked who we are may take to connect.
EXPECT_S = 10.0


class TransportThread:
    """Started by `start`, ended by `close`. `submit`, `events`, `fileno` and `counters` belong to the loop.

    open_transport and open_channel are called in the thread, which is the only one to touch what they return.
    generation: of a block now; read without a lock, as the check it serves is a belt beside braces.
    """

    def __init__(
        self,
        open_transport: Callable[[], KVTransport],
        open_channel: Callable[[], RankChannel[ToTransport, FromTransport]],
        *,
        block_size: int,
        lease_s: float,
        quarantine_s: float,
        generation: Callable[[BlockId], int],
    ) -> None:
        self._open_transport = open_transport
        self._open_channel = open_channel
        self._quarantine_s = quarantine_s
        self._generation = generation
        self._commands: queue.SimpleQueue[LoopCommand | None] = queue.SimpleQueue()
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._command_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._leases = LeaseTable(lease_s)
        self._pulls = PullTable(block_size)
        self._announced: Counter[LeaseId] = Counter()
        self._unsourced: dict[TransferId, OpenPull] = {}  # no chunk has come yet, so no peer is known
        self._peer_blocks: dict[PeerId, int] = {}  # of each connected peer's slab
        self._connecting: set[PeerId] = set()
        self._expecting_until_s = 0.0
        self._metadata: queue.SimpleQueue[bytes | BaseException] = queue.SimpleQueue()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="transport", daemon=True)

    # ------------------------------------------------------------ the loop's side

    def start(self) -> bytes:
        """Returns what peers need to read from this rank, once the transport stands. Raises what opening it raised."""
        self._thread.start()
        metadata = self._metadata.get()
        if isinstance(metadata, BaseException):
            raise metadata
        return metadata

    def submit(self, command: LoopCommand) -> None:
        """Never blocks."""
        self._commands.put(command)
        os.eventfd_write(self._command_fd, 1)

    def events(self) -> list[Event]:
        """What the scheduler must know, in order."""
        try:
            os.eventfd_read(self._event_fd)
        except BlockingIOError:
            return []
        return [self._events.get() for _ in range(self._events.qsize())]

    def fileno(self) -> int:
        return self._event_fd

    def counters(self) -> dict[str, int]:
        return {
            "live_leases": self._leases.num_live,
            "open_pulls": self._pulls.num_open + len(self._unsourced),
            "open_reads": self._pulls.num_open_reads,
            **{f"lease:{name}": count for name, count in list(self._leases.counters.items())},
            **{f"pull:{name}": count for name, count in list(self._pulls.counters.items())},
        }

    def close(self, timeout_s: float = 10.0) -> None:
        """End the thread once nothing is being read, or after the timeout."""
        self._commands.put(None)
        os.eventfd_write(self._command_fd, 1)
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            os.close(self._command_fd)
            os.close(self._event_fd)

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            self._transport = self._open_transport()
            self._front = self._open_channel()
        except BaseException as error:
            self._metadata.put(error)
            return
        self._metadata.put(self._transport.metadata())
        try:
            self._serve()
        except Exception:
            log.exception("the transport thread failed; the rank ends, as nothing it lent or pulled can be trusted")
            os._exit(70)
        finally:
            self._transport.close()
            self._front.close()

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._front.socket, zmq.POLLIN)
        poller.register(self._command_fd, zmq.POLLIN)
        while not (self._is_closing and self._transport.num_open_reads == 0):
            poller.poll(BUSY_POLL_MS if self._is_busy else IDLE_POLL_MS)
            # Messages are taken before commands and handled after them: what the front reacts to, the loop said before.
            messages = self._front.receive_all()
            self._handle_commands()
            for message in messages:
                self._on_message(message)
            self._drive()

    @property
    def _is_busy(self) -> bool:
        return bool(
            self._transport.num_open_reads
            or self._leases.num_live
            or self._pulls.num_open
            or self._connecting
            or time.monotonic() < self._expecting_until_s
        )

    def _drive(self) -> None:
        now_s = time.monotonic()
        for event in self._transport.events():
            match event:
                case Connected():
                    self._connecting.discard(event.peer)
                    self._peer_blocks[event.peer] = event.num_blocks
                    self._front.send(PeerConnected(event.peer))
                case ConnectFailed() | PeerLost():
                    self._connecting.discard(event.peer)
                    self._peer_blocks.pop(event.peer, None)
                    self._front.send(PeerUnusable(event.peer, event.reason))
            self._on_pull_events(self._pulls.on_event(event, now_s))
        for lease in self._leases.expire(now_s):
            self._on_revoked(lease)
        for peer in self._pulls.overdue(now_s, self._quarantine_s):
            log.warning("peer %s has kept blocks in quarantine for %.0f s: cutting it off", peer, self._quarantine_s)
            self._transport.submit(CutPeer(peer))

    def _tell_loop(self, event: Event) -> None:
        self._events.put(event)
        os.eventfd_write(self._event_fd, 1)

    # ------------------------------------------------------------ the loop's commands

    def _handle_commands(self) -> None:
        try:
            os.eventfd_read(self._command_fd)
        except BlockingIOError:
            return
        for _ in range(self._commands.qsize()):
            command = self._commands.get()
            match command:
                case OpenLease():
                    self._leases.open(command.lease_id, RequestId(command.lease_id), time.monotonic())
                    self._front.send(LeaseOpened(command.lease_id))
                case AnnounceChunk():
                    self._announce(command)
                case DropLease():
                    self._revoke(command.lease_id, "aborted")
                case OpenPull():
                    self._unsourced[command.transfer_id] = command
                case AbandonPull():
                    self._abandon(command.transfer_id)
                case None:
                    self._is_closing = True

    def _announce(self, chunk: AnnounceChunk) -> None:
        if self._leases.announce(chunk.lease_id, chunk.blocks, chunk.generations):
            seq = self._announced[chunk.lease_id]
            self._announced[chunk.lease_id] += 1
            self._front.send(ChunkAnnounced(chunk.lease_id, seq, chunk.first_token, chunk.end_token, chunk.blocks))

    def _abandon(self, transfer_id: TransferId) -> None:
        """Quiet at once where nothing was ever posted, or everything has ended already."""
        if self._unsourced.pop(transfer_id, None) is None and self._pulls.state(transfer_id) is not None:
            self._on_pull_events(self._pulls.abandon(transfer_id, "unwanted", time.monotonic()))
            return
        self._tell_loop(KvQuiet(transfer_id))

    # ------------------------------------------------------------ the front's messages

    def _on_message(self, message: ToTransport) -> None:
        match message:
            case ConnectPeer():
                self._connecting.add(message.peer)
                self._transport.submit(Connect(message.peer, message.metadata))
            case DropPeer():
                self._transport.submit(CutPeer(message.peer))
            case ExpectPeer():
                self._expecting_until_s = time.monotonic() + EXPECT_S
            case PullChunk():
                self._pull(message)
            case ConfirmPull():
                self._confirm(message)
            case RenewLease():
                self._leases.renew(message.lease_id, time.monotonic())
            case ReleaseLease():
                self._release(message.lease_id)
            case RevokeLease():
                self._revoke(message.lease_id, "stream_ended")

    def _pull(self, chunk: PullChunk) -> None:
        opened = self._unsourced.pop(chunk.transfer_id, None)
        if opened is not None:
            source = PullSource(0, chunk.peer, self._peer_blocks.get(chunk.peer, 0))
            self._pulls.open(
                opened.transfer_id, [source], opened.num_cached_tokens, opened.num_prompt_tokens, opened.destinations
            )
        try:
            reads = self._pulls.chunk(chunk.transfer_id, 0, chunk.seq, chunk.first_token, chunk.end_token, chunk.blocks)
        except ProtocolError as error:
            self._front.send(PullBroken(chunk.transfer_id, error.message))
            self._on_pull_events(self._pulls.abandon(chunk.transfer_id, "protocol", time.monotonic()))
            return
        for read in reads:
            self._transport.submit(read)

    def _confirm(self, answer: ConfirmPull) -> None:
        events = self._pulls.confirm(answer.transfer_id, answer.valid, time.monotonic())
        if PullCommitted(answer.transfer_id) in events:
            self._tell_loop(KvReceived(answer.transfer_id, answer.first_token))
        self._on_pull_events(events)

    def _release(self, lease_id: LeaseId) -> None:
        was_live = self._leases.state(lease_id) is LeaseState.LIVE
        is_valid = self._leases.release(lease_id, self._generation)
        self._front.send(LeaseAnswer(lease_id, is_valid))
        if was_live:
            self._announced.pop(lease_id, None)
            self._tell_loop(LeaseReleased(RequestId(lease_id)))

    def _revoke(self, lease_id: LeaseId, reason: str) -> None:
        revoked = self._leases.revoke(lease_id, reason)
        if revoked is not None:
            self._on_revoked(revoked)

    def _on_revoked(self, lease: RevokedLease) -> None:
        self._announced.pop(lease.lease_id, None)
        self._tell_loop(LeaseRevoked(lease.request_id))
        self._front.send(LeaseGone(lease.lease_id, f"the lease was revoked: {lease.reason}"))

    # ------------------------------------------------------------ the pull table's events

    def _on_pull_events(self, events: list[PullEvent]) -> None:
        for event in events:
            match event:
                case PullComplete():
                    self._front.send(
                        PullFinished(
                            event.transfer_id,
                            event.num_bytes,
                            event.num_reads,
                            event.num_descriptors,
                            event.elapsed_s,
                        )
                    )
                case PullCommitted():
                    self._front.send(PullCommittedMessage(event.transfer_id))
                case PullFailed():
                    self._front.send(PullBroken(event.transfer_id, event.reason))
                case PullQuiet():
                    self._tell_loop(KvQuiet(event.transfer_id))
