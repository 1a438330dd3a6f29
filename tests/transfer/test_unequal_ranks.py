"""Ranks of one node read from those of another that splits the heads differently, over each transport."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from pdserve.kv.head_ranges import BlockMap, ByteRun, head_reads, whole_block
from pdserve.kv.layout import KVLayout
from pdserve.transfer.base import (
    Connect,
    Connected,
    ConnectFailed,
    PeerId,
    PeerLost,
    Read,
    ReadDone,
    ReadFailed,
    ReadId,
)
from pdserve.transfer.loopback import LoopbackNetwork, Slab
from tests.kv.shards import model_kv, shard_of
from tests.transfer.conftest import Node, blocks, loopback_node, nixl_node

NUM_BLOCKS = 16
FOUR_HEADS = KVLayout(num_layers=3, num_kv_heads=4, head_dim=8, block_size=16)
TWO_HEADS = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, block_size=16)
# The slab of P, and where D puts it: other blocks, in another order.
SOURCES, DESTINATIONS = blocks(3, 4, 9, 0), blocks(1, 15, 2, 7)
UNTOUCHED = 0xEE

NewNode = Callable[[Slab], Node]


@pytest.fixture(params=["loopback", "nixl"])
def new_node(request: pytest.FixtureRequest) -> Iterator[NewNode]:
    made: list[Node] = []
    network = LoopbackNetwork()

    def new(slab: Slab) -> Node:
        node = nixl_node(slab) if request.param == "nixl" else loopback_node(network, f"n{len(made)}", slab)
        made.append(node)
        return node

    yield new
    for node in reversed(made):
        node.transport.close()


def peer(rank: int) -> PeerId:
    return PeerId(f"source/{rank}")


def drive(nodes: list[Node], until: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + 20.0
    while not until():
        assert time.monotonic() < deadline_s, f"nothing came of it; seen {[node.seen for node in nodes]}"
        for node in nodes:
            node.poll()


def connect(reader: Node, sources: list[Node], maps: dict[int, BlockMap]) -> None:
    for rank, block_map in maps.items():
        reader.transport.submit(Connect(peer(rank), sources[rank].transport.metadata(), block_map))
    drive([reader, *sources], lambda: len(reader.of(Connected)) == len(maps))


def untouched(block_bytes: int) -> Slab:
    return np.full((NUM_BLOCKS, block_bytes), UNTOUCHED, np.uint8)


@pytest.mark.parametrize("reader_tp", [1, 2, 4])
@pytest.mark.parametrize("source_tp", [1, 2, 4])
@pytest.mark.parametrize("layout", [FOUR_HEADS, TWO_HEADS], ids=["four_heads", "two_heads"])
def test_every_rank_gets_the_bytes_one_rank_would_have_and_no_other(
    new_node: NewNode, layout: KVLayout, source_tp: int, reader_tp: int
) -> None:
    kv = model_kv(layout, NUM_BLOCKS)
    sources = [new_node(shard_of(kv, source_tp, rank)) for rank in range(source_tp)]
    for rank in range(reader_tp):
        reader = new_node(untouched(layout.shard(reader_tp).block_bytes))
        maps = head_reads(layout, source_tp, reader_tp, rank)
        connect(reader, sources, maps)
        for source_rank in maps:
            reader.transport.submit(Read(ReadId(source_rank), peer(source_rank), SOURCES, DESTINATIONS))
        drive([reader, *sources], lambda reader=reader, maps=maps: len(reader.of(ReadDone)) == len(maps))
        expected = untouched(reader.slab.shape[1])
        expected[list(DESTINATIONS)] = shard_of(kv, reader_tp, rank)[list(SOURCES)]
        assert np.array_equal(reader.slab, expected)
        check_told(reader, maps)


def check_told(reader: Node, maps: dict[int, BlockMap]) -> None:
    """What was moved is said as it was: the bytes of the runs, a descriptor each."""
    for done in reader.of(ReadDone):
        runs = maps[done.read_id].runs
        num_bytes = sum(run.num_bytes for run in runs)
        assert (done.num_bytes, done.num_descriptors) == (len(SOURCES) * num_bytes, len(SOURCES) * len(runs))
    assert sum(done.num_bytes for done in reader.of(ReadDone)) == len(SOURCES) * reader.slab.shape[1]


def test_one_source_serves_readers_of_different_splits_at_once(new_node: NewNode) -> None:
    kv = model_kv(FOUR_HEADS, NUM_BLOCKS)
    source = new_node(shard_of(kv, 1, 0))
    places = [(size, rank) for size in (1, 2, 4) for rank in range(size)]
    readers = [new_node(untouched(FOUR_HEADS.shard(size).block_bytes)) for size, _ in places]
    for (size, rank), reader in zip(places, readers, strict=True):
        connect(reader, [source], head_reads(FOUR_HEADS, 1, size, rank))
    for reader in readers:
        reader.transport.submit(Read(ReadId(1), peer(0), SOURCES, DESTINATIONS))
    drive([source, *readers], lambda: all(reader.of(ReadDone) for reader in readers))
    for (size, rank), reader in zip(places, readers, strict=True):
        assert np.array_equal(reader.slab[list(DESTINATIONS)], shard_of(kv, size, rank)[list(SOURCES)])


def test_more_pieces_than_a_handle_holds_arrive_whole(new_node: NewNode) -> None:
    """16 blocks of 2 * 200 pieces from either rank: 6,400 descriptors, so two handles each."""
    layout = KVLayout(num_layers=200, num_kv_heads=2, head_dim=1, block_size=1)
    kv = model_kv(layout, NUM_BLOCKS)
    sources = [new_node(shard_of(kv, 2, rank)) for rank in range(2)]
    reader = new_node(untouched(layout.block_bytes))
    maps = head_reads(layout, 2, 1, 0)
    connect(reader, sources, maps)
    everything = blocks(*range(NUM_BLOCKS))
    for rank in maps:
        reader.transport.submit(Read(ReadId(rank), peer(rank), everything, everything))
    drive([reader, *sources], lambda: len(reader.of(ReadDone)) == 2)
    assert [done.num_descriptors for done in reader.of(ReadDone)] == [6400, 6400]
    assert np.array_equal(reader.slab, shard_of(kv, 1, 0))


def test_runs_of_unequal_sizes_and_past_a_handles_bytes_arrive_whole(new_node: NewNode) -> None:
    mib = 1 << 20
    runs = (ByteRun(mib, 0, 3), ByteRun(2 * mib, 64, 20 * mib), ByteRun(0, 21 * mib, 1000))
    block_map = BlockMap(22 * mib, 22 * mib, runs)
    source = new_node(np.random.default_rng(3).integers(0, 256, (4, 22 * mib), np.uint8))
    reader = new_node(np.full((4, 22 * mib), UNTOUCHED, np.uint8))
    connect(reader, [source], {0: block_map})
    reader.transport.submit(Read(ReadId(1), peer(0), blocks(2, 0), blocks(3, 1)))
    drive([reader, source], lambda: reader.of(ReadDone))
    expected = np.full_like(reader.slab, UNTOUCHED)
    for (into, block), run in itertools.product([(3, 2), (1, 0)], runs):
        moved = source.slab[block, run.source_offset : run.source_offset + run.num_bytes]
        expected[into, run.destination_offset : run.destination_offset + run.num_bytes] = moved
    assert np.array_equal(reader.slab, expected)


def test_a_rank_whose_blocks_are_not_what_the_map_says_is_refused_with_both_sizes(new_node: NewNode) -> None:
    reader = new_node(untouched(FOUR_HEADS.block_bytes))
    source = new_node(untouched(FOUR_HEADS.block_bytes))
    block_map = head_reads(FOUR_HEADS, 2, 1, 0)[0]
    reader.transport.submit(Connect(peer(0), source.transport.metadata(), block_map))
    drive([reader], lambda: reader.of(ConnectFailed))
    expected = f"block_bytes: {FOUR_HEADS.block_bytes // 2} here, {FOUR_HEADS.block_bytes} there"
    assert reader.of(ConnectFailed) == [ConnectFailed(peer(0), expected)]


def test_a_map_into_blocks_of_another_size_is_never_connected(new_node: NewNode) -> None:
    reader = new_node(untouched(2 * FOUR_HEADS.block_bytes))
    with pytest.raises(AssertionError, match="is not into blocks of"):
        reader.transport.submit(Connect(peer(0), b"", whole_block(FOUR_HEADS.block_bytes)))


@pytest.mark.parametrize("is_warm", [False, True])
def test_a_pair_keeps_its_map_for_life(new_node: NewNode, is_warm: bool) -> None:
    reader, source = new_node(untouched(FOUR_HEADS.block_bytes)), new_node(untouched(FOUR_HEADS.block_bytes))
    metadata = source.transport.metadata()
    reader.transport.submit(Connect(peer(0), metadata))
    if is_warm:
        drive([reader, source], lambda: reader.of(Connected))
    reader.transport.submit(Connect(peer(0), metadata, whole_block(FOUR_HEADS.block_bytes)))
    other = BlockMap(FOUR_HEADS.block_bytes, FOUR_HEADS.block_bytes, (ByteRun(0, 64, 64),))
    with pytest.raises(AssertionError, match="for life"):
        reader.transport.submit(Connect(peer(0), metadata, other))


def test_one_lost_rank_takes_its_own_reads_and_no_other_ranks() -> None:
    network = LoopbackNetwork()
    kv = model_kv(FOUR_HEADS, NUM_BLOCKS)
    sources = [loopback_node(network, f"p{rank}", shard_of(kv, 2, rank)) for rank in range(2)]
    reader = loopback_node(network, "d", untouched(FOUR_HEADS.block_bytes))
    connect(reader, sources, head_reads(FOUR_HEADS, 2, 1, 0))
    network.slow("p0", 2)
    network.slow("p1", 2)
    for rank in range(2):
        reader.transport.submit(Read(ReadId(rank), peer(rank), SOURCES, DESTINATIONS))
    reader.poll()
    network.kill("p1")
    drive([reader, sources[0]], lambda: reader.of(ReadDone))
    assert reader.of(ReadFailed) == [ReadFailed(ReadId(1), "p1 is gone", is_quiet=True)]
    assert [lost.peer for lost in reader.of(PeerLost)] == [peer(1)]
    assert [done.read_id for done in reader.of(ReadDone)] == [0]
