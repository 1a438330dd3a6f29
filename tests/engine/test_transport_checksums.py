"""The transport thread with checksums: hashes go out with the blocks, and what came is compared before it counts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.engine.messages import (
    ChunkAnnounced,
    DropLease,
    LeaseAnswer,
    LeaseGone,
    LeaseOpened,
    PullAdvanced,
    PullBroken,
    PullChunk,
    PullFinished,
    ReleaseLease,
)
from pdserve.request import BlockId
from pdserve.scheduler.plan import KvQuiet
from pdserve.transfer.checksum import block_hash
from tests.engine.test_transport_thread import LEASE, PEER, TRANSFER, Harness, running


@pytest.fixture
def harness(sockets: Path) -> Iterator[Harness]:
    with running(sockets, has_checksums=True) as harness:
        yield harness


def hashed_chunk(harness: Harness, seq: int, first: int, end: int, *blocks: int, wrong: bool = False) -> PullChunk:
    hashes = tuple(block_hash(harness.there[block]) ^ wrong for block in blocks)
    return PullChunk(TRANSFER, 0, seq, first, end, tuple(BlockId(block) for block in blocks), ((0, PEER),), hashes)


def test_blocks_are_announced_with_their_hashes_in_order(harness: Harness) -> None:
    harness.here[1:3] = 7
    harness.lend(1, 2)
    assert harness.front.next() == LeaseOpened(LEASE)
    announced = harness.front.hear(ChunkAnnounced)
    assert announced.block_hashes == (block_hash(harness.here[1]), block_hash(harness.here[2]))


def test_a_lease_that_ends_before_its_blocks_are_hashed_announces_nothing(harness: Harness) -> None:
    harness.lend(*range(1, 9))
    harness.thread.submit(DropLease(LEASE))
    harness.front.send(ReleaseLease(LEASE))
    harness.front.hear(LeaseAnswer)
    said = [type(message) for message in harness.front.seen]
    assert ChunkAnnounced not in said[said.index(LeaseGone) :]


def test_a_pull_whose_hashes_agree_is_finished(harness: Harness) -> None:
    harness.connect()
    harness.open_pull()
    harness.front.send(hashed_chunk(harness, 0, 0, 4, 3))
    harness.front.hear(PullAdvanced)
    harness.front.send(hashed_chunk(harness, 1, 4, 8, 5))
    assert harness.front.hear(PullFinished).num_reads == 2
    assert harness.counts("kv_checksum_failures_total") == 0


def test_a_pull_that_brought_other_bytes_is_broken_and_never_finished(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    harness.connect()
    harness.open_pull()
    harness.front.send(hashed_chunk(harness, 0, 0, 4, 3), hashed_chunk(harness, 1, 4, 8, 5, wrong=True))
    broken = harness.front.hear(PullBroken)
    assert f"block 5 of {PEER}" in broken.reason
    assert f"block 5 of {PEER}" in caplog.text
    assert harness.event() == KvQuiet(TRANSFER)
    assert not any(isinstance(message, PullFinished) for message in harness.front.seen)
    assert harness.counts("kv_checksum_failures_total") == 1
    assert harness.counts("pull:abandoned:checksum") == 1


def test_a_chunk_without_hashes_breaks_the_pull(harness: Harness) -> None:
    harness.connect()
    harness.open_pull()
    harness.front.send(PullChunk(TRANSFER, 0, 0, 0, 8, (BlockId(3), BlockId(4)), ((0, PEER),)))
    assert "came with 0 block_hashes" in harness.front.hear(PullBroken).reason
    assert harness.event() == KvQuiet(TRANSFER)
