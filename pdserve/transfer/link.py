"""The reads open from one peer: cut into handles, posted in turns, and watched until they are quiet.

The safety rules of a transfer live here, once for every transport (spec: quiet, and quarantine):

R1  Done means done: a read is reported done only when every handle of it was seen DONE.
R2  An exception is not quiet: a handle in doubt is watched on, and so is its read's destination.
R3  A disconnect is quiet only when every other handle to the peer has ended too.
R4  An unfinished handle is never released; a peer with unfinished handles is never removed, only destroyed whole.
R5  Destroying what posted a read makes it quiet (`cut`), and nothing short of it does.
R6  Bytes in flight from one peer never exceed a quarter of our slab, so that a stuck peer cannot take the pool.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

from pdserve.transfer.base import Read, ReadDone, ReadFailed, ReadId, ReadQuiet, TransportEvent
from pdserve.transfer.pieces import Pieces

# Some transports copy inside `post`. Past this the rest waits for the next call, so that messages are never held up.
POST_BUDGET_S = 0.004

Handle = TypeVar("Handle")


class HandleState(enum.Enum):
    POSTED = "posted"
    DOUBTFUL = "doubtful"  # it reported a fault; bytes may still land
    DISCONNECTED = "disconnected"
    DONE = "done"


# A handle in one of these changes no more. DISCONNECTED alone says nothing about memory yet (R3).
ENDED = frozenset({HandleState.DONE, HandleState.DISCONNECTED})


class Sighting(NamedTuple):
    """What was seen of a handle; `reason` where something is wrong with it."""

    state: HandleState
    reason: str = ""


class NotPosted(Exception):
    """Nothing was handed to the wire, so that nothing of it can be written."""


class Wire(Protocol[Handle]):
    """One peer as a transport's technology sees it. Both slabs are seen as the pieces of one `Pieces`."""

    def post(self, sources: list[int], destinations: list[int]) -> tuple[Handle, Sighting]:
        """Start pulling the peer's pieces into ours. Raises NotPosted when nothing was started."""

    def post_warm_up(self) -> tuple[Handle, Sighting]:
        """Start a tiny read into memory that nobody uses. Raises NotPosted."""

    def poll(self, handle: Handle) -> Sighting:
        """What became of it; drives it forward."""

    def release(self, handle: Handle) -> None:
        """Forget a handle that was seen DONE."""

    def destroy(self) -> None:
        """Destroy whatever posts; when it returns nothing can write here any more."""


@dataclass(slots=True, eq=False)
class _Open:
    """A read that is not quiet. sources, destinations: pieces; those before `num_taken` were handed to the wire."""

    read_id: ReadId
    sources: list[int]
    destinations: list[int]
    num_taken: int = 0
    num_open_handles: int = 0
    num_bytes: int = 0
    first_post_s: float = 0.0
    failure: str | None = None
    is_reported: bool = False

    @property
    def is_complete(self) -> bool:
        return self.failure is None and self.num_open_handles == 0 and self.num_taken == len(self.sources)


@dataclass(slots=True, eq=False)
class _Posted(Generic[Handle]):
    handle: Handle
    read: _Open
    num_bytes: int
    state: HandleState = HandleState.POSTED


@dataclass(slots=True, eq=False)
class PeerLink(Generic[Handle]):
    """Owned by the transport thread. `lost_reason` is set once the peer is gone and every read from it is quiet."""

    wire: Wire[Handle]
    pieces: Pieces
    clock: Callable[[], float]
    lost_reason: str | None = None
    _reads: dict[ReadId, _Open] = field(default_factory=dict)
    _turns: deque[_Open] = field(default_factory=deque)  # reads with pieces left to post
    _handles: list[_Posted[Handle]] = field(default_factory=list)  # not DONE
    _bytes_in_flight: int = 0
    _disconnect_reason: str | None = None
    _warm_up: Handle | None = None

    @property
    def num_open_reads(self) -> int:
        return len(self._reads)

    @property
    def num_open_handles(self) -> int:
        return len(self._handles)

    def warm(self) -> Sighting:
        """Post the tiny first read, or look at it; it lands in memory of nobody, so that it may be cut at any time."""
        try:
            if self._warm_up is None:
                self._warm_up, sighting = self.wire.post_warm_up()
            else:
                sighting = self.wire.poll(self._warm_up)
        except NotPosted as error:
            return Sighting(HandleState.DOUBTFUL, str(error))
        if sighting.state is HandleState.DONE:
            self.wire.release(self._warm_up)
            self._warm_up = None
        return sighting

    def submit(self, read: Read) -> None:
        assert read.read_id not in self._reads, f"read {read.read_id} is open already"
        opened = _Open(read.read_id, self.pieces.of_blocks(read.sources), self.pieces.of_blocks(read.destinations))
        self._reads[read.read_id] = opened
        self._turns.append(opened)

    def advance(self) -> list[TransportEvent]:
        """Look at every handle, post what there is room for, and tell what became of the reads."""
        for posted in self._handles:
            if posted.state not in ENDED:
                self._see(posted, self.wire.poll(posted.handle))
        self._forget_done()
        if self._disconnect_reason is None:
            self._post()
            self._forget_done()
        return self._settle()

    def cut(self, reason: str) -> list[TransportEvent]:
        """Destroy the wire; with it every read is quiet (R5)."""
        self._warm_up = None
        self._handles.clear()
        self._turns.clear()
        self._bytes_in_flight = 0
        self.wire.destroy()
        self.lost_reason = reason
        for read in self._reads.values():
            self._fail(read, reason)
        return self._tell_failed(list(self._reads.values()), is_quiet=True)

    # ------------------------------------------------------------ handles

    def _see(self, posted: _Posted[Handle], sighting: Sighting) -> None:
        posted.state, reason = sighting
        if posted.state is HandleState.DONE:
            self.wire.release(posted.handle)  # R4: here and nowhere else
            posted.read.num_open_handles -= 1
            posted.read.num_bytes += posted.num_bytes
            self._bytes_in_flight -= posted.num_bytes
        elif posted.state is HandleState.DISCONNECTED:
            self._disconnect_reason = reason
        elif posted.state is HandleState.DOUBTFUL:
            self._fail(posted.read, reason)  # R2: it stays among the handles

    def _forget_done(self) -> None:
        self._handles = [posted for posted in self._handles if posted.state is not HandleState.DONE]

    def _post(self) -> None:
        """One handle of each read in turn, while there is room in flight and time."""
        deadline_s = self.clock() + POST_BUDGET_S
        while self._turns and self._has_room_for(self._turns[0]) and self._disconnect_reason is None:
            read = self._turns.popleft()
            self._post_next(read)
            if read.failure is None and read.num_taken < len(read.sources):
                self._turns.append(read)
            if self.clock() >= deadline_s:
                return

    def _has_room_for(self, read: _Open) -> bool:
        next_bytes = self.pieces.num_bytes(read.num_taken, self._end_of_next(read))
        return not self._handles or self._bytes_in_flight + next_bytes <= self.pieces.max_bytes_in_flight

    def _end_of_next(self, read: _Open) -> int:
        return self.pieces.handle_end(read.num_taken, len(read.sources))

    def _post_next(self, read: _Open) -> None:
        start, end = read.num_taken, self._end_of_next(read)
        sources, destinations = read.sources[start:end], read.destinations[start:end]
        if start == 0:
            read.first_post_s = self.clock()
        try:
            handle, sighting = self.wire.post(sources, destinations)
        except NotPosted as error:
            self._fail(read, str(error))
            return
        posted = _Posted(handle, read, self.pieces.num_bytes(start, end))
        read.num_taken = end
        read.num_open_handles += 1
        self._bytes_in_flight += posted.num_bytes
        self._handles.append(posted)
        self._see(posted, sighting)

    # ------------------------------------------------------------ reads

    def _fail(self, read: _Open, reason: str) -> None:
        if read.failure is None:
            read.failure = reason
            if read in self._turns:
                self._turns.remove(read)

    def _settle(self) -> list[TransportEvent]:
        done = [read for read in self._reads.values() if read.is_complete]
        events: list[TransportEvent] = [self._tell_done(read) for read in done]
        if self._disconnect_reason is not None:
            for read in self._reads.values():
                self._fail(read, self._disconnect_reason)
            if all(posted.state is HandleState.DISCONNECTED for posted in self._handles):  # R3
                return events + self.cut(self._disconnect_reason)
        failed = [read for read in self._reads.values() if read.failure is not None]
        quiet = [read for read in failed if read.num_open_handles == 0]
        loud = [read for read in failed if read.num_open_handles > 0]
        return events + self._tell_failed(quiet, is_quiet=True) + self._tell_failed(loud, is_quiet=False)

    def _tell_done(self, read: _Open) -> ReadDone:
        del self._reads[read.read_id]
        return ReadDone(read.read_id, read.num_bytes, len(read.sources), self.clock() - read.first_post_s)

    def _tell_failed(self, reads: list[_Open], *, is_quiet: bool) -> list[TransportEvent]:
        """One ReadFailed a read, and one ReadQuiet if the failure was told before the memory was safe."""
        events: list[TransportEvent] = []
        for read in reads:
            assert read.failure is not None
            if not read.is_reported:
                events.append(ReadFailed(read.read_id, read.failure, is_quiet))
            elif is_quiet:
                events.append(ReadQuiet(read.read_id))
            read.is_reported = True
            if is_quiet:
                del self._reads[read.read_id]
        return events
