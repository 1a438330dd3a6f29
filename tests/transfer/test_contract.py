"""What every KVTransport promises, on each of them."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pdserve.transfer.base import (
    Connect,
    Connected,
    ConnectFailed,
    CutPeer,
    PeerId,
    PeerLost,
    ReadDone,
    ReadFailed,
    ReadId,
)
from tests.transfer.conftest import BLOCK_BYTES, PEER, NewPair, blocks


def test_a_read_brings_exactly_the_bytes_that_were_asked_for(new_pair: NewPair) -> None:
    pair = new_pair()
    pair.connect()
    pair.reader.read(1, blocks(3, 4, 5, 20, 0), blocks(31, 2, 9, 1, 10))
    pair.drive(lambda: pair.reader.of(ReadDone))
    expected = np.zeros_like(pair.reader.slab)
    expected[[31, 2, 9, 1, 10]] = pair.source.slab[[3, 4, 5, 20, 0]]
    assert np.array_equal(pair.reader.slab, expected)
    (done,) = pair.reader.of(ReadDone)
    assert (done.read_id, done.num_bytes, done.num_descriptors) == (1, 5 * BLOCK_BYTES, 5)
    assert done.elapsed_s >= 0
    assert pair.reader.transport.num_open_reads == 0


def test_connecting_tells_how_big_the_peers_slab_is_and_writes_nothing(new_pair: NewPair) -> None:
    pair = new_pair(num_blocks=8)
    pair.connect()
    assert pair.reader.of(Connected) == [Connected(PEER, 8)]
    assert not pair.reader.slab.any()


def test_many_reads_at_once_each_complete_once_with_their_own_bytes(new_pair: NewPair) -> None:
    pair = new_pair(num_blocks=64)
    pair.connect()
    order = random.Random(5)
    sources, destinations = order.sample(range(64), 64), order.sample(range(64), 64)
    cuts = [0, 1, 2, 10, 13, 40, 41, 64]
    for read_id, (start, end) in enumerate(itertools.pairwise(cuts)):
        pair.reader.read(read_id, blocks(*sources[start:end]), blocks(*destinations[start:end]))
    assert pair.reader.transport.num_open_reads == 7
    pair.drive(lambda: len(pair.reader.of(ReadDone)) == 7)
    assert sorted(done.read_id for done in pair.reader.of(ReadDone)) == list(range(7))
    assert np.array_equal(pair.reader.slab[destinations], pair.source.slab[sources])


def test_blocks_bigger_than_a_handle_arrive_whole(new_pair: NewPair) -> None:
    pair = new_pair(num_blocks=2, block_bytes=20 << 20)
    pair.connect()
    pair.reader.read(1, blocks(1), blocks(0))
    pair.drive(lambda: pair.reader.of(ReadDone))
    assert np.array_equal(pair.reader.slab[0], pair.source.slab[1])
    assert pair.reader.of(ReadDone)[0].num_bytes == 20 << 20


@pytest.mark.parametrize("garbage", [b"", b"garbage", b"\x80"])
def test_metadata_that_is_none_fails_the_connect_and_nothing_else(new_pair: NewPair, garbage: bytes) -> None:
    pair = new_pair()
    pair.reader.transport.submit(Connect(PEER, garbage))
    pair.drive(lambda: pair.reader.of(ConnectFailed))
    assert "metadata" in pair.reader.of(ConnectFailed)[0].reason
    pair.connect()


def test_metadata_whose_inner_part_is_damaged_fails_the_connect(new_pair: NewPair) -> None:
    pair = new_pair()
    damaged = pair.source.transport.metadata().replace(b"nixl", b"niks").replace(b"n0", b"zz")
    pair.reader.transport.submit(Connect(PEER, damaged))
    pair.drive(lambda: pair.reader.of(ConnectFailed))
    assert "refused" in pair.reader.of(ConnectFailed)[0].reason


def test_a_peer_with_other_blocks_is_refused_with_both_sizes(new_pair: NewPair) -> None:
    pair, other = new_pair(), new_pair(block_bytes=2 * BLOCK_BYTES)
    pair.reader.transport.submit(Connect(PEER, other.source.transport.metadata()))
    pair.drive(lambda: pair.reader.of(ConnectFailed))
    assert pair.reader.of(ConnectFailed)[0].reason == f"block_bytes: {BLOCK_BYTES} here, {2 * BLOCK_BYTES} there"


def test_a_read_from_a_peer_that_is_not_connected_fails_and_is_quiet(new_pair: NewPair) -> None:
    pair = new_pair()
    pair.reader.read(4, blocks(0), blocks(0))
    pair.reader.poll()
    assert pair.reader.seen == [ReadFailed(ReadId(4), "source/0 is not connected", is_quiet=True)]


def test_a_peer_that_was_cut_can_be_connected_again(new_pair: NewPair) -> None:
    pair = new_pair()
    pair.connect()
    pair.reader.transport.submit(CutPeer(PEER))
    pair.reader.transport.submit(CutPeer(PeerId("nobody")))
    pair.drive(lambda: pair.reader.of(PeerLost))
    pair.reader.seen.clear()
    pair.connect()
    pair.reader.read(1, blocks(2), blocks(3))
    pair.drive(lambda: pair.reader.of(ReadDone))
    assert np.array_equal(pair.reader.slab[3], pair.source.slab[2])


def test_a_peer_that_is_connected_twice_answers_and_keeps_its_reads(new_pair: NewPair) -> None:
    pair = new_pair()
    metadata = pair.source.transport.metadata()
    pair.reader.transport.submit(Connect(PEER, metadata))
    assert pair.reader.transport.num_open_reads == 1
    pair.connect()
    pair.reader.read(1, blocks(2), blocks(3))
    pair.reader.transport.submit(Connect(PEER, metadata))
    pair.drive(lambda: pair.reader.of(ReadDone))
    assert pair.reader.of(Connected) == [Connected(PEER, 32)] * 2


def test_a_connect_that_is_cut_fails(new_pair: NewPair) -> None:
    pair = new_pair()
    pair.reader.transport.submit(Connect(PEER, pair.source.transport.metadata()))
    pair.reader.transport.submit(CutPeer(PEER))
    pair.reader.poll()
    assert pair.reader.seen == [ConnectFailed(PEER, "cut off")]


def test_close_can_be_called_twice_and_leaves_nothing_open(new_pair: NewPair) -> None:
    pair = new_pair()
    pair.connect()
    pair.reader.read(1, blocks(0), blocks(1))
    pair.reader.transport.close()
    pair.reader.transport.close()
    assert pair.reader.transport.num_open_reads == 0
    pair.reader.poll()
    assert pair.reader.of(ReadFailed) == [ReadFailed(ReadId(1), "this node closed its transport", is_quiet=True)]
    pair.reader.poll()
    assert len(pair.reader.of(PeerLost)) == 1


@pytest.mark.skipif("UCX_TLS" in os.environ, reason="this is the inner run")
def test_the_contract_holds_over_sockets_too() -> None:
    """Another process, as UCX reads its transports once: the way two hosts take."""
    command = [sys.executable, "-m", "pytest", "-k", "nixl", "-p", "no:cacheprovider", __file__]
    environment = os.environ | {"UCX_TLS": "tcp,self"}
    ran = subprocess.run(
        command, env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
