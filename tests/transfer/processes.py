"""Two real processes over NIXL: `source` serves a slab, the others read from it. Each prints what came of it as JSON.

Started by test_nixl.py with the transports of UCX that the test wants, as UCX reads them once a process.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np

from pdserve.transfer.base import (
    Connect,
    Connected,
    ConnectFailed,
    CutPeer,
    PeerLost,
    ReadDone,
    TransportEvent,
)
from pdserve.transfer.nixl import NixlTransport
from tests.transfer.conftest import PEER, Node, blocks, new_slab

NUM_BLOCKS = 32
NUM_READS = NUM_BLOCKS // 2
BLOCK_BYTES = 1 << 20
UNTOUCHED = 0xEE


def new_node(name: str, seed: int | None = None, connect_timeout_s: float = 20.0) -> Node:
    slab = new_slab(NUM_BLOCKS, BLOCK_BYTES, seed=seed)
    name = f"{name}-{os.getpid()}"
    transport = NixlTransport(name, slab.ctypes.data, NUM_BLOCKS, BLOCK_BYTES, connect_timeout_s=connect_timeout_s)
    return Node(slab, transport)


def source() -> None:
    """Serve until standard input ends."""
    node = new_node("source", seed=5)
    print(node.transport.metadata().hex(), flush=True)
    while not select.select([sys.stdin], [], [], 0.001)[0]:
        node.poll()


class Reader:
    """A reading node and the process it reads from."""

    def __init__(self, connect_timeout_s: float = 20.0) -> None:
        command = [sys.executable, "-m", "tests.transfer.processes", "source"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.node = new_node("reader", connect_timeout_s=connect_timeout_s)
        self.metadata = bytes.fromhex(self.process.stdout.readline())

    def drive(self, until: Callable[[], object], limit_s: float = 20.0) -> None:
        deadline_s = time.monotonic() + limit_s
        while not until():
            assert time.monotonic() < deadline_s, f"nothing came of it; seen {self.node.seen}"
            self.node.poll()

    def connect(self) -> None:
        self.node.transport.submit(Connect(PEER, self.metadata))
        self.drive(lambda: self.node.of(Connected))
        self.node.slab[:] = UNTOUCHED

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def read_all(self) -> None:
        """NUM_READS reads, every block to its own place; four of them fill the quarter that may be in flight."""
        for read_id in range(NUM_READS):
            ids = blocks(2 * read_id, 2 * read_id + 1)
            self.node.read(read_id, ids, ids)

    def num_late_bytes(self) -> int:
        """Bytes that still change in the tenth of a second after the reads were called quiet."""
        before = self.node.slab.copy()
        end_s = time.monotonic() + 0.1
        while time.monotonic() < end_s:
            self.node.poll()
        return int((before != self.node.slab).sum())


def told(events: list[TransportEvent]) -> list[list[object]]:
    return [
        [type(event).__name__, getattr(event, "read_id", None), getattr(event, "is_quiet", None)] for event in events
    ]


def whole() -> dict[str, object]:
    """Every byte of the source's slab arrives while the source does nothing but serve."""
    reader = Reader()
    reader.connect()
    reader.read_all()
    reader.drive(lambda: len(reader.node.of(ReadDone)) == NUM_READS)
    expected = new_slab(NUM_BLOCKS, BLOCK_BYTES, seed=5)
    assert reader.process.stdin is not None
    reader.process.stdin.close()
    ended = reader.process.wait(20)
    reader.node.transport.close()
    return {"is_equal": bool(np.array_equal(reader.node.slab, expected)), "source_exit": ended}


def killed() -> dict[str, object]:
    """The source is stopped, reads are posted, then it is killed."""
    reader = Reader()
    reader.connect()
    reader.stop()
    reader.read_all()
    for _ in range(20):
        reader.node.poll()
    num_open = reader.node.transport.num_open_reads
    reader.kill()
    reader.drive(lambda: reader.node.transport.num_open_reads == 0)
    reader.node.read(99, blocks(0), blocks(0))  # whoever saw no disconnect yet sees it here
    reader.drive(lambda: reader.node.of(PeerLost))
    late = reader.num_late_bytes()
    reader.node.transport.close()
    return {"num_open": num_open, "told": told(reader.node.seen), "late": late}


def cut() -> dict[str, object]:
    """The source is stopped for good; its peer is cut off."""
    reader = Reader()
    reader.connect()
    reader.stop()
    reader.read_all()
    for _ in range(20):
        reader.node.poll()
    num_open = reader.node.transport.num_open_reads
    reader.node.transport.submit(CutPeer(PEER))
    reader.node.poll()
    late = reader.num_late_bytes()
    reader.kill()
    reader.node.transport.close()
    return {"num_open": num_open, "told": told(reader.node.seen), "late": late}


def unanswered() -> dict[str, object]:
    """The source never answers the first read."""
    reader = Reader(connect_timeout_s=0.3)
    reader.stop()
    reader.node.transport.submit(Connect(PEER, reader.metadata))
    reader.drive(lambda: reader.node.of(ConnectFailed) or reader.node.of(Connected))
    reader.kill()
    reader.node.transport.close()
    return {"failed": [event.reason for event in reader.node.of(ConnectFailed)]}


if __name__ == "__main__":
    if sys.argv[1] == "source":
        source()
    else:
        print(json.dumps({"whole": whole, "killed": killed, "cut": cut, "unanswered": unanswered}[sys.argv[1]]()))
