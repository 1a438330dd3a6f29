"""The KVTransport every technology shares: connects, warms, reads, loses and cuts peers, each over its own link.

A technology is a Fabric (our slab, and how to reach a peer) and a Wire (one peer). Peers are apart from each other: a
stuck one is cut off alone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from pdserve.errors import PeerError
from pdserve.kv.head_ranges import whole_block
from pdserve.transfer.base import (
    Command,
    Connect,
    Connected,
    ConnectFailed,
    CutPeer,
    PeerId,
    PeerLost,
    Read,
    ReadFailed,
    TransportEvent,
)
from pdserve.transfer.link import HandleState, PeerLink, Wire
from pdserve.transfer.metadata import SlabMetadata, decode_metadata
from pdserve.transfer.pieces import Pieces

CONNECT_TIMEOUT_S = 10.0

Handle = TypeVar("Handle")


class Fabric(Protocol[Handle]):
    """Our slab as peers see it, and the way to theirs."""

    def metadata(self) -> SlabMetadata:
        """What a peer needs to read from our slab."""

    def connect(self, peer: PeerId, metadata: SlabMetadata, pieces: Pieces) -> Wire[Handle]:
        """A wire of its own to one peer, for these pieces. Raises PeerError when the metadata leads nowhere."""

    def progress(self) -> None:
        """Serve peers that read from us."""

    def close(self) -> None:
        """Stop serving."""


@dataclass(slots=True, eq=False)
class _Warming(Generic[Handle]):
    """A peer whose first, tiny read is on its way. num_blocks: of its slab."""

    link: PeerLink[Handle]
    num_blocks: int
    deadline_s: float


class LinkedTransport(Generic[Handle]):
    """KVTransport over a Fabric. Belongs to the thread that calls it first."""

    def __init__(
        self,
        fabric: Fabric[Handle],
        num_blocks: int,
        block_bytes: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
    ) -> None:
        self._fabric = fabric
        self._num_blocks = num_blocks
        self._block_bytes = block_bytes
        self._clock = clock
        self._connect_timeout_s = connect_timeout_s
        self._warming: dict[PeerId, _Warming[Handle]] = {}
        self._links: dict[PeerId, PeerLink[Handle]] = {}
        self._num_source_blocks: dict[PeerId, int] = {}
        self._told: list[TransportEvent] = []
        self._owner: int | None = None
        self._is_closed = False

    def metadata(self) -> bytes:
        return self._fabric.metadata().encode()

    @property
    def num_open_reads(self) -> int:
        return len(self._warming) + sum(link.num_open_reads for link in self._links.values())

    @property
    def num_open_handles(self) -> int:
        """Handles of reads that were posted and not seen done."""
        return sum(link.num_open_handles for link in self._links.values())

    def submit(self, command: Command) -> None:
        self._check_caller()
        match command:
            case Connect():
                self._connect(command)
            case Read():
                self._read(command)
            case CutPeer():
                self._cut(command.peer)

    def events(self) -> list[TransportEvent]:
        self._check_caller()
        if not self._is_closed:
            self._fabric.progress()
            for peer in list(self._warming):
                self._warm(peer)
            for peer in list(self._links):
                self._advance(peer)
        told, self._told = self._told, []
        return told

    def close(self) -> None:
        """Idempotent. Open reads end with their agents; what was not collected from `events` still can be."""
        if self._is_closed:
            return
        self._check_caller()
        for peer in [*self._warming, *self._links]:
            self._cut(peer, "this node closed its transport")
        self._is_closed = True
        self._fabric.close()

    def _check_caller(self) -> None:
        caller = threading.get_ident()
        self._owner = self._owner or caller
        assert caller == self._owner, "a transport belongs to one thread"

    # ------------------------------------------------------------ connecting

    def _connect(self, command: Connect) -> None:
        peer = command.peer
        assert not self._is_closed, f"{peer} connected on a closed transport"
        pieces = self._pieces(command)
        if peer in self._warming:  # its answer is on the way
            self._check_map(self._warming[peer].link, pieces)
            return
        if peer in self._links:
            self._check_map(self._links[peer], pieces)
            self._told.append(Connected(peer, self._num_source_blocks[peer]))
            return
        try:
            metadata = decode_metadata(command.metadata, block_bytes=pieces.block_map.source_block_bytes)
            wire = self._fabric.connect(peer, metadata, pieces)
        except PeerError as error:
            self._told.append(ConnectFailed(peer, error.message))
            return
        link = PeerLink(wire, pieces, self._clock)
        self._warming[peer] = _Warming(link, metadata.num_blocks, self._clock() + self._connect_timeout_s)

    def _pieces(self, command: Connect) -> Pieces:
        block_map = command.block_map or whole_block(self._block_bytes)
        assert block_map.block_bytes == self._block_bytes, f"{block_map} is not into blocks of {self._block_bytes}"
        return Pieces(self._num_blocks, block_map)

    def _check_map(self, link: PeerLink[Handle], pieces: Pieces) -> None:
        assert link.pieces.block_map == pieces.block_map, f"a pair's block map is for life: {pieces.block_map}"

    def _warm(self, peer: PeerId) -> None:
        warming = self._warming[peer]
        state, reason = warming.link.warm()
        if state is HandleState.DONE:
            del self._warming[peer]
            self._links[peer] = warming.link
            self._num_source_blocks[peer] = warming.num_blocks
            self._told.append(Connected(peer, warming.num_blocks))
        elif state is not HandleState.POSTED:
            self._cut(peer, f"the first read failed: {reason}")
        elif self._clock() >= warming.deadline_s:
            self._cut(peer, f"no answer to the first read within {self._connect_timeout_s:g} s")

    # ------------------------------------------------------------ reading

    def _read(self, read: Read) -> None:
        link = self._links.get(read.peer)
        if link is None:  # lost between the caller's decision and now
            self._told.append(ReadFailed(read.read_id, f"{read.peer} is not connected", is_quiet=True))
            return
        assert len(read.sources) == len(read.destinations) > 0, f"read {read.read_id}: empty, or lists differ"
        assert all(0 <= block < self._num_source_blocks[read.peer] for block in read.sources), read.sources
        assert all(0 <= block < self._num_blocks for block in read.destinations), read.destinations
        link.submit(read)

    def _advance(self, peer: PeerId) -> None:
        link = self._links[peer]
        self._told += link.advance()
        if link.lost_reason is not None:
            self._forget(peer, link.lost_reason)

    def _cut(self, peer: PeerId, reason: str = "cut off") -> None:
        warming = self._warming.pop(peer, None)
        if warming is not None:
            warming.link.cut(reason)
            self._told.append(ConnectFailed(peer, reason))
        elif peer in self._links:
            self._told += self._links[peer].cut(reason)
            self._forget(peer, reason)

    def _forget(self, peer: PeerId, reason: str) -> None:
        del self._links[peer], self._num_source_blocks[peer]
        self._told.append(PeerLost(peer, reason))
