"""Ranks as real processes over NIXL: `source` serves its shard of a model's KV, `reader` fills its own shard from them.

Started by test_unequal_processes.py with the transports of UCX that the test wants.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time

import numpy as np

from pdserve.kv.head_ranges import head_reads
from pdserve.kv.layout import KVLayout
from pdserve.transfer.base import Connect, Connected, PeerId, Read, ReadDone, ReadId
from pdserve.transfer.loopback import Slab
from pdserve.transfer.nixl import NixlTransport
from tests.kv.shards import model_kv, shard_of
from tests.transfer.conftest import Node, blocks

LAYOUT = KVLayout(num_layers=8, num_kv_heads=4, head_dim=64, block_size=64)  # 1 MB a block
NUM_BLOCKS = 32
BLOCKS_A_READ = 8


def new_node(name: str, slab: Slab) -> Node:
    name = f"{name}-{os.getpid()}"
    return Node(slab, NixlTransport(name, slab.ctypes.data, *slab.shape, connect_timeout_s=20.0))


def source(source_tp: int, rank: int) -> None:
    """Serve until standard input ends."""
    node = new_node("source", shard_of(model_kv(LAYOUT, NUM_BLOCKS), source_tp, rank))
    print(node.transport.metadata().hex(), flush=True)
    while not select.select([sys.stdin], [], [], 0.001)[0]:
        node.poll()
    node.transport.close()


def reader(source_tp: int, reader_tp: int, rank: int, metadata: list[str]) -> dict[str, object]:
    """Read every block from every source that has a share in it, block b to where block NUM_BLOCKS - 1 - b was."""
    node = new_node("reader", np.zeros((NUM_BLOCKS, LAYOUT.shard(reader_tp).block_bytes), np.uint8))
    maps = head_reads(LAYOUT, source_tp, reader_tp, rank)
    for source_rank, block_map in maps.items():
        node.transport.submit(Connect(peer(source_rank), bytes.fromhex(metadata[source_rank]), block_map))
    drive(node, Connected, len(maps))
    num_reads = 0
    for start in range(0, NUM_BLOCKS, BLOCKS_A_READ):
        ids = range(start, start + BLOCKS_A_READ)
        for source_rank in maps:
            into = blocks(*(NUM_BLOCKS - 1 - block for block in ids))
            node.transport.submit(Read(ReadId(num_reads), peer(source_rank), blocks(*ids), into))
            num_reads += 1
    drive(node, ReadDone, num_reads)
    expected = shard_of(model_kv(LAYOUT, NUM_BLOCKS), reader_tp, rank)[::-1]
    node.transport.close()
    return {"sources": list(maps), "is_equal": bool(np.array_equal(node.slab, expected))}


def peer(rank: int) -> PeerId:
    return PeerId(f"source/{rank}")


def drive(node: Node, kind: type[object], num_events: int) -> None:
    deadline_s = time.monotonic() + 30.0
    while len(node.of(kind)) < num_events:
        assert time.monotonic() < deadline_s, f"nothing came of it; seen {node.seen}"
        node.poll()


if __name__ == "__main__":
    if sys.argv[1] == "source":
        source(int(sys.argv[2]), int(sys.argv[3]))
    else:
        source_tp, reader_tp, rank = (int(number) for number in sys.argv[2:5])
        print(json.dumps(reader(source_tp, reader_tp, rank, sys.argv[5:])))
