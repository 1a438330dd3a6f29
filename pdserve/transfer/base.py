"""Moving KV blocks between nodes: the queue-shaped protocol every transport implements, and its messages.

A transport belongs to one thread. Commands are handed in with `submit`, which never blocks on a peer; what came of
them is collected with `events`, which also drives the transport forward and so has to be called every millisecond
while a read is open, here or at a peer that reads from us.

*Quiet* is a fact about memory (spec: quiet and quarantine): nothing can write the destination any more. A read that
failed and is not quiet stays open inside the transport, which keeps watching it and reports ReadQuiet when it may.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType, Protocol

from pdserve.kv.head_ranges import BlockMap
from pdserve.request import BlockId

ReadId = NewType("ReadId", int)
# One life of one rank of a peer: `{incarnation}/{rank}`. A restarted peer is another peer.
PeerId = NewType("PeerId", str)


@dataclass(frozen=True, slots=True)
class Connect:
    """Learn a peer's memory and warm the pair with a tiny read. A peer that is connected answers Connected at once.

    block_map: what every read takes of each block, where the two ends split the heads differently; it is the pair's for
    life, so that a peer is described once. None: whole blocks, of our size.
    """

    peer: PeerId
    metadata: bytes  # the peer's KVTransport.metadata()
    block_map: BlockMap | None = None


@dataclass(frozen=True, slots=True)
class Read:
    """Pull sources[i] of the peer's slab into destinations[i] of ours, all that the pair's block map takes of a block.

    Non-empty, equal lengths.
    """

    read_id: ReadId
    peer: PeerId
    sources: tuple[BlockId, ...]
    destinations: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True)
class CutPeer:
    """Last resort: destroy whatever talks to this peer, so that every open read from it becomes quiet.

    Answered by PeerLost (ConnectFailed if the pair was not warm yet); nothing comes of cutting an unknown peer.
    """

    peer: PeerId


Command = Connect | Read | CutPeer


@dataclass(frozen=True, slots=True)
class Connected:
    """The pair is warm: reads may be submitted. num_blocks: the size of the peer's slab, which bounds source ids."""

    peer: PeerId
    num_blocks: int


@dataclass(frozen=True, slots=True)
class ConnectFailed:
    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class ReadDone:
    """Every byte is in place, and the read is quiet. elapsed_s: from post to the completion seen."""

    read_id: ReadId
    num_bytes: int
    num_descriptors: int
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class ReadFailed:
    """The read will not complete usefully. Unless is_quiet, a ReadQuiet follows when its destination is safe."""

    read_id: ReadId
    reason: str
    is_quiet: bool


@dataclass(frozen=True, slots=True)
class ReadQuiet:
    """A read that failed before can write no more."""

    read_id: ReadId


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The peer is known to be gone; every read from it has failed and is quiet."""

    peer: PeerId
    reason: str


TransportEvent = Connected | ConnectFailed | ReadDone | ReadFailed | ReadQuiet | PeerLost


class KVTransport(Protocol):
    """Reads of blocks, or of a peer's share of their heads, from peers' slabs into ours."""

    def metadata(self) -> bytes:
        """What a peer needs to read from this slab."""

    def submit(self, command: Command) -> None:
        """Start a command. A peer's fault comes back as an event, never as an exception."""

    def events(self) -> list[TransportEvent]:
        """Drive open work forward, and everything that happened since the last call."""

    @property
    def num_open_reads(self) -> int:
        """Reads that are not quiet, those that warm a pair included."""

    def close(self) -> None:
        """Destroy everything; after it nothing can write here. A peer on the same host may still be able to read."""
