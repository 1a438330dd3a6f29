"""Transports in one process, for tests, that can be told to be slow, to hang, to write late, and to die.

Same links, same rules as the real one (`link.py`); only the wire is a copy between two arrays.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pdserve.errors import PeerError
from pdserve.transfer.base import PeerId
from pdserve.transfer.link import HandleState, Sighting
from pdserve.transfer.linked import CONNECT_TIMEOUT_S, LinkedTransport
from pdserve.transfer.metadata import SlabMetadata
from pdserve.transfer.pieces import Pieces

Slab = npt.NDArray[np.uint8]  # [num_blocks, block_bytes]


@dataclass(frozen=True, slots=True)
class Behaviour:
    """How reads from one peer go. Bytes land in the poll after `num_polls` others.

    fails_first: each handle reports a fault in its first poll, and its bytes land all the same.
    hangs: nothing ever lands while this holds.
    """

    num_polls: int = 0
    fails_first: bool = False
    hangs: bool = False


class LoopbackNetwork:
    """Who can reach whom. Its methods may be called from any thread; each takes effect on open handles too."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._slabs: dict[str, Slab] = {}
        self._behaviours: dict[str, Behaviour] = {}

    def join(self, name: str, slab: Slab) -> None:
        with self.lock:
            assert name not in self._slabs, f"{name} is on the network already"
            self._slabs[name] = slab

    def slow(self, name: str, num_polls: int) -> None:
        """Reads from `name` land only after `num_polls` polls."""
        self._behave(name, Behaviour(num_polls))

    def hang(self, name: str) -> None:
        """Reads from `name` neither land nor fail."""
        self._behave(name, Behaviour(hangs=True))

    def fail_late(self, name: str, num_polls: int) -> None:
        """Reads from `name` report a fault at once, and their bytes land `num_polls` polls later."""
        self._behave(name, Behaviour(num_polls, fails_first=True))

    def heal(self, name: str) -> None:
        self._behave(name, Behaviour())

    def kill(self, name: str) -> None:
        """`name` is gone for good: reads from it disconnect, and no byte of it lands any more."""
        with self.lock:
            self._slabs.pop(name, None)

    def _behave(self, name: str, behaviour: Behaviour) -> None:
        with self.lock:
            self._behaviours[name] = behaviour

    def slab_of(self, name: str) -> Slab | None:
        return self._slabs.get(name)

    def behaviour_of(self, name: str) -> Behaviour:
        return self._behaviours.get(name, Behaviour())


@dataclass(slots=True, eq=False)
class LoopbackHandle:
    """Pieces on their way; destination: None for a warm-up, which lands nowhere."""

    destination: Slab | None
    sources: list[int]
    destinations: list[int]
    num_polls: int = 0


@dataclass(slots=True, eq=False)
class LoopbackWire:
    network: LoopbackNetwork
    peer_name: str
    slab: Slab
    pieces: Pieces
    is_destroyed: bool = field(default=False)

    def post(self, sources: list[int], destinations: list[int]) -> tuple[LoopbackHandle, Sighting]:
        handle = LoopbackHandle(self.slab, sources, destinations)
        return handle, self.poll(handle)

    def post_warm_up(self) -> tuple[LoopbackHandle, Sighting]:
        handle = LoopbackHandle(None, [], [])
        return handle, self.poll(handle)

    def poll(self, handle: LoopbackHandle) -> Sighting:
        assert not self.is_destroyed, "a handle was polled after its wire was destroyed"
        with self.network.lock:
            source = self.network.slab_of(self.peer_name)
            if source is None:
                return Sighting(HandleState.DISCONNECTED, f"{self.peer_name} is gone")
            behaviour = self.network.behaviour_of(self.peer_name)
            if behaviour.hangs:
                return Sighting(HandleState.POSTED)
            handle.num_polls += 1
            if behaviour.fails_first and handle.num_polls == 1:
                return Sighting(HandleState.DOUBTFUL, "told to fail")
            if handle.num_polls <= behaviour.num_polls:
                return Sighting(HandleState.POSTED)
            self._land(handle, source)
            return Sighting(HandleState.DONE)

    def _land(self, handle: LoopbackHandle, source: Slab) -> None:
        if handle.destination is None:
            return
        for from_piece, to_piece in zip(handle.sources, handle.destinations, strict=True):
            block, index = divmod(from_piece, self.pieces.per_block)
            run = self.pieces.runs[index]
            moved = source[block, run.source_offset : run.source_offset + run.num_bytes]
            block, start = to_piece // self.pieces.per_block, run.destination_offset
            handle.destination[block, start : start + run.num_bytes] = moved

    def release(self, handle: LoopbackHandle) -> None:
        """Nothing is kept for a handle."""

    def destroy(self) -> None:
        self.is_destroyed = True


class LoopbackFabric:
    def __init__(self, network: LoopbackNetwork, name: str, slab: Slab) -> None:
        self._network = network
        self._name = name
        self._slab = slab
        network.join(name, slab)

    def metadata(self) -> SlabMetadata:
        num_blocks, block_bytes = self._slab.shape
        return SlabMetadata(self._name.encode(), 0, num_blocks, block_bytes)

    def connect(self, peer: PeerId, metadata: SlabMetadata, pieces: Pieces) -> LoopbackWire:
        peer_name = metadata.agent.decode(errors="replace")
        with self._network.lock:
            slab = self._network.slab_of(peer_name)
        if slab is None or slab.shape != (metadata.num_blocks, metadata.block_bytes):
            raise PeerError(f"{peer}'s transfer metadata was refused: no {peer_name!r} with such a slab")
        return LoopbackWire(self._network, peer_name, self._slab, pieces)

    def progress(self) -> None:
        """A loopback read needs nothing of its source."""

    def close(self) -> None:
        self._network.kill(self._name)


class LoopbackTransport(LinkedTransport[LoopbackHandle]):
    """KVTransport between arrays [num_blocks, block_bytes] uint8 of one process. name: unique on the network."""

    def __init__(
        self,
        network: LoopbackNetwork,
        name: str,
        slab: Slab,
        *,
        clock: Callable[[], float] = time.monotonic,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
    ) -> None:
        num_blocks, block_bytes = slab.shape
        fabric = LoopbackFabric(network, name, slab)
        super().__init__(fabric, num_blocks, block_bytes, clock=clock, connect_timeout_s=connect_timeout_s)
