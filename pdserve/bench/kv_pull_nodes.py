"""The two processes of the KV pull benchmark: one serves a slab, the other reads it, and copies as much beside it.

Started by kv_pull.py; what they print on standard output is for it alone.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from pdserve.errors import PeerError
from pdserve.request import BlockId
from pdserve.transfer.base import Connect, Connected, ConnectFailed, PeerId, Read, ReadDone, ReadFailed, ReadId
from pdserve.transfer.nixl import NixlTransport

PEER = PeerId("bench/0")
NUM_REPEATS = 5


@dataclass(frozen=True, slots=True)
class PullTime:
    """Medians over NUM_REPEATS of reading, and of copying within a process, the same number of blocks."""

    num_blocks: int
    num_bytes: int
    read_s: float
    copy_s: float


def _new_slab(num_blocks: int, block_bytes: int, fill: int) -> npt.NDArray[np.uint8]:
    """[num_blocks, block_bytes], every page of it touched."""
    return np.full((num_blocks, block_bytes), fill, np.uint8)


def _transport(kind: str, slab: npt.NDArray[np.uint8]) -> NixlTransport:
    num_blocks, block_bytes = slab.shape
    return NixlTransport(f"bench-{kind}-{os.getpid()}", slab.ctypes.data, num_blocks, block_bytes)


def serve(num_blocks: int, block_bytes: int) -> None:
    """Let a peer read until standard input ends."""
    slab = _new_slab(num_blocks, block_bytes, 1)
    transport = _transport("source", slab)
    print(transport.metadata().hex(), flush=True)
    while not select.select([sys.stdin], [], [], 0.001)[0]:
        transport.events()
    transport.close()


class _Reader:
    def __init__(self, num_blocks: int, block_bytes: int, metadata: bytes) -> None:
        self.slab = _new_slab(num_blocks, block_bytes, 0)
        self.other = _new_slab(num_blocks, block_bytes, 2)
        self.transport = _transport("reader", self.slab)
        self.transport.submit(Connect(PEER, metadata))
        self._await()

    def _await(self) -> None:
        """Raises PeerError when what was submitted last comes to nothing."""
        while True:
            for event in self.transport.events():
                match event:
                    case Connected() | ReadDone():
                        return
                    case ConnectFailed() | ReadFailed():
                        raise PeerError(event.reason)

    def read(self, read_id: int, sources: list[int], destinations: list[int]) -> None:
        blocks = [tuple(BlockId(block) for block in ids) for ids in (sources, destinations)]
        self.transport.submit(Read(ReadId(read_id), PEER, blocks[0], blocks[1]))
        self._await()

    def copy(self, sources: list[int], destinations: list[int]) -> None:
        for source, destination in zip(sources, destinations, strict=True):
            np.copyto(self.slab[destination], self.other[source])

    def time_pull(self, num_blocks: int) -> PullTime:
        """Scattered blocks, as a pool hands them out."""
        order = np.random.default_rng(1).permutation(len(self.slab))
        sources, destinations = order[:num_blocks].tolist(), order[-num_blocks:].tolist()
        read_s = _median_s(lambda repeat: self.read(repeat, sources, destinations))
        copy_s = _median_s(lambda _: self.copy(sources, destinations))
        return PullTime(num_blocks, num_blocks * self.slab.shape[1], read_s, copy_s)


def _median_s(run: Callable[[int], None]) -> float:
    """After one run that does not count."""
    times = []
    for repeat in range(NUM_REPEATS + 1):
        start_s = time.perf_counter()
        run(repeat)
        times.append(time.perf_counter() - start_s)
    return statistics.median(times[1:])


def read(num_blocks: int, block_bytes: int, counts: list[int]) -> None:
    """Start a source, pull from it, print one JSON list of PullTime."""
    command = [sys.executable, "-m", "pdserve.bench.kv_pull_nodes", "serve", str(num_blocks), str(block_bytes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as source:
        assert source.stdout is not None
        reader = _Reader(num_blocks, block_bytes, bytes.fromhex(source.stdout.readline()))
        print(json.dumps([asdict(reader.time_pull(count)) for count in counts]), flush=True)
        reader.transport.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=["serve", "read"])
    parser.add_argument("num_blocks", type=int)
    parser.add_argument("block_bytes", type=int)
    parser.add_argument("counts", type=int, nargs="*")
    given = parser.parse_args()
    if given.action == "serve":
        serve(given.num_blocks, given.block_bytes)
    else:
        read(given.num_blocks, given.block_bytes, given.counts)


if __name__ == "__main__":
    main()
