"""Two nodes that share a process: slabs, transports over each technology, and a loop that drives them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import pytest

from pdserve.request import BlockId
from pdserve.transfer.base import Connect, Connected, KVTransport, PeerId, Read, ReadId, TransportEvent
from pdserve.transfer.loopback import LoopbackNetwork, LoopbackTransport, Slab
from pdserve.transfer.nixl import NixlTransport

PEER = PeerId("source/0")
BLOCK_BYTES = 6 * 1024
E = TypeVar("E")
agent_numbers = itertools.count()


def new_slab(num_blocks: int, block_bytes: int = BLOCK_BYTES, *, seed: int | None = None) -> Slab:
    """[num_blocks, block_bytes] of noise, or of zeros without a seed."""
    if seed is None:
        return np.zeros((num_blocks, block_bytes), np.uint8)
    return np.random.default_rng(seed).integers(0, 256, (num_blocks, block_bytes), np.uint8)


def blocks(*numbers: int) -> tuple[BlockId, ...]:
    return tuple(BlockId(number) for number in numbers)


@dataclass
class Node:
    slab: Slab
    transport: KVTransport
    seen: list[TransportEvent] = field(default_factory=list)

    def poll(self) -> None:
        self.seen += self.transport.events()

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in self.seen if isinstance(event, kind)]

    def read(self, read_id: int, sources: tuple[BlockId, ...], destinations: tuple[BlockId, ...]) -> None:
        self.transport.submit(Read(ReadId(read_id), PEER, sources, destinations))


@dataclass
class Pair:
    """`source` is read from, `reader` reads."""

    source: Node
    reader: Node

    def drive(self, until: Callable[[], object], *, limit_s: float = 20.0) -> None:
        deadline_s = time.monotonic() + limit_s
        while not until():
            assert time.monotonic() < deadline_s, f"nothing came of it; seen {self.reader.seen}"
            self.source.poll()
            self.reader.poll()

    def connect(self) -> None:
        self.reader.transport.submit(Connect(PEER, self.source.transport.metadata()))
        self.drive(lambda: self.reader.of(Connected))


NewPair = Callable[..., Pair]


def loopback_node(network: LoopbackNetwork, name: str, slab: Slab) -> Node:
    return Node(slab, LoopbackTransport(network, name, slab))


def nixl_node(slab: Slab) -> Node:
    num_blocks, block_bytes = slab.shape
    name = f"test-{next(agent_numbers)}"
    return Node(slab, NixlTransport(name, slab.ctypes.data, num_blocks, block_bytes, connect_timeout_s=20.0))


@pytest.fixture(params=["loopback", "nixl"])
def new_pair(request: pytest.FixtureRequest) -> Iterator[NewPair]:
    """Makes pairs of either technology; closes what was made."""
    made: list[Node] = []
    network = LoopbackNetwork()

    def new(num_blocks: int = 32, block_bytes: int = BLOCK_BYTES) -> Pair:
        slabs = new_slab(num_blocks, block_bytes, seed=7), new_slab(num_blocks, block_bytes)
        if request.param == "loopback":
            nodes = [loopback_node(network, f"n{len(made) + i}", slab) for i, slab in enumerate(slabs)]
        else:
            nodes = [nixl_node(slab) for slab in slabs]
        made.extend(nodes)
        return Pair(*nodes)

    yield new
    for node in reversed(made):
        node.transport.close()
