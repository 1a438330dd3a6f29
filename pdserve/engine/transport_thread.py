"""The thread that owns a rank's transport, its leases and its pulls, so that none of them ever waits for a forward.

Three sources, one at a time: the loop's commands, the front's messages, the transport's events. What they are about is
in `lending.py` (peers read from us) and `pulling.py` (we read from them).
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable

import zmq

from pdserve.engine.channel import Pollable, RankChannel
from pdserve.engine.lending import Lending
from pdserve.engine.messages import (
    AbandonPull,
    AnnounceChunk,
    ConfirmPull,
    ConnectPeer,
    DropLease,
    DropPeer,
    ExpectPeer,
    FromTransport,
    LoopCommand,
    OpenLease,
    OpenPull,
    PeerConnected,
    PeerUnusable,
    PullChunk,
    ReleaseLease,
    RenewLease,
    RevokeLease,
    ToTransport,
)
from pdserve.engine.pulling import Pulling
from pdserve.request import BlockId
from pdserve.scheduler.plan import Event
from pdserve.transfer.base import Command, Connect, Connected, ConnectFailed, CutPeer, KVTransport, PeerId, PeerLost
from pdserve.transfer.checksum import Checksums, Slab

log = logging.getLogger(__name__)

# While a read is open here, or a peer may be reading from here.
BUSY_POLL_MS = 1
IDLE_POLL_MS = 1000
# How long a peer that asked who we are may take to connect.
EXPECT_S = 10.0


class TransportThread:
    """Started by `start`, ended by `close`. `submit`, `events`, `pollables` and `counters` belong to the loop.

    open_transport and open_channel are called in the thread, which is the only one to touch what they return.
    generation: of a block now; read without a lock, as the check it serves is a belt beside braces. hashed_slab: the
    blocks whose hashes are told and compared; None without checksums.
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
        hashed_slab: Slab | None = None,
    ) -> None:
        self._open_transport = open_transport
        self._open_channel = open_channel
        self._commands: queue.SimpleQueue[LoopCommand | None] = queue.SimpleQueue()
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._command_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._checksums = Checksums(hashed_slab) if hashed_slab is not None else None
        self._lending = Lending(lease_s, self._tell_front, self._tell_loop, generation, self._checksums)
        self._pulling = Pulling(
            block_size, quarantine_s, self._submit_to_transport, self._tell_front, self._tell_loop, self._checksums
        )
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

    @property
    def pollables(self) -> list[Pollable]:
        """What becomes readable while events wait."""
        return [self._event_fd]

    def counters(self) -> dict[str, int]:
        return {
            "live_leases": self._lending.num_live,
            **self._lending.counters(),
            **self._pulling.counters(),
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
            # Most polls of a busy thread find nothing but time passed, and every look takes the GIL from the forward.
            if poller.poll(self._poll_ms):
                self._handle_what_came()
            self._drive()

    def _handle_what_came(self) -> None:
        """Messages are taken before commands and handled after them: what the front reacts to, the loop said before."""
        messages = self._front.receive_all()
        self._handle_commands()
        for message in messages:
            self._on_message(message)

    @property
    def _poll_ms(self) -> int:
        if self._checksums is not None and self._checksums.is_busy:
            return 0
        return BUSY_POLL_MS if self._is_busy else IDLE_POLL_MS

    @property
    def _is_busy(self) -> bool:
        """A pull between two chunks is not: nothing is read, and the next one comes as a message."""
        return bool(
            self._transport.num_open_reads
            or self._lending.num_live
            or self._connecting
            or time.monotonic() < self._expecting_until_s
        )

    def _drive(self) -> None:
        now_s = time.monotonic()
        for event in self._transport.events():
            match event:
                case Connected():
                    self._connecting.discard(event.peer)
                    self._pulling.on_connected(event.peer, event.num_blocks)
                    self._front.send(PeerConnected(event.peer))
                case ConnectFailed() | PeerLost():
                    self._connecting.discard(event.peer)
                    self._pulling.on_unusable(event.peer)
                    self._front.send(PeerUnusable(event.peer, event.reason))
            self._pulling.on_event(event, now_s)
        if self._checksums is not None:
            self._checksums.advance()
        self._lending.expire(now_s)
        self._pulling.cut_overdue(now_s)

    def _submit_to_transport(self, command: Command) -> None:
        self._transport.submit(command)

    def _tell_front(self, message: FromTransport) -> None:
        self._front.send(message)

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
                    self._lending.open(command.lease_id)
                case AnnounceChunk():
                    self._lending.announce(command)
                case DropLease():
                    self._lending.revoke(command.lease_id, "aborted")
                case OpenPull():
                    self._pulling.open(command)
                case AbandonPull():
                    self._pulling.abandon(command.transfer_id)
                case None:
                    self._is_closing = True

    # ------------------------------------------------------------ the front's messages

    def _on_message(self, message: ToTransport) -> None:
        match message:
            case ConnectPeer():
                self._connecting.add(message.peer)
                self._transport.submit(Connect(message.peer, message.metadata, message.block_map))
            case DropPeer():
                self._transport.submit(CutPeer(message.peer))
            case ExpectPeer():
                self._expecting_until_s = time.monotonic() + EXPECT_S
            case PullChunk():
                self._pulling.chunk(message)
            case ConfirmPull():
                self._pulling.confirm(message)
            case RenewLease():
                self._lending.renew(message.lease_id)
            case ReleaseLease():
                self._lending.release(message.lease_id)
            case RevokeLease():
                self._lending.revoke(message.lease_id, "stream_ended")
