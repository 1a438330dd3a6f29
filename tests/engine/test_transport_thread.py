"""What the transport thread promises to the loop on one side and to the front on the other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from pdserve.engine.channel import RankChannel
from pdserve.engine.messages import (
    AbandonPull,
    AnnounceChunk,
    ChunkAnnounced,
    ConfirmPull,
    ConnectPeer,
    DropLease,
    DropPeer,
    ExpectPeer,
    FromTransport,
    LeaseAnswer,
    LeaseGone,
    LeaseOpened,
    OpenLease,
    OpenPull,
    PeerConnected,
    PeerUnusable,
    PullAdvanced,
    PullBroken,
    PullChunk,
    PullCommitted,
    PullFinished,
    ReleaseLease,
    RenewLease,
    RevokeLease,
    ToTransport,
)
from pdserve.engine.transport_thread import TransportThread
from pdserve.errors import StartupError
from pdserve.request import BlockId, LeaseId, RequestId, TransferId
from pdserve.scheduler.plan import Event, KvQuiet, KvReceived, LeaseReleased, LeaseRevoked
from pdserve.transfer.base import PeerId
from pdserve.transfer.loopback import LoopbackNetwork, LoopbackTransport
from pdserve.transfer.metadata import SlabMetadata
from tests.engine.other_end import OtherEnd, other_end, wait_for

BLOCK_SIZE, BLOCK_BYTES, NUM_BLOCKS = 4, 64, 16
LEASE, TRANSFER, PEER = LeaseId("lease"), TransferId(1), PeerId("there/0")
REQUEST = RequestId(LEASE)


class Harness:
    """The loop's side is `thread`, the front's `front`; `there` is a peer's slab on the network."""

    def __init__(
        self,
        front: OtherEnd,
        endpoint: str,
        *,
        lease_s: float = 30.0,
        quarantine_s: float = 120.0,
        has_checksums: bool = False,
    ) -> None:
        self.front = front
        self.network = LoopbackNetwork()
        self.here = np.zeros((NUM_BLOCKS, BLOCK_BYTES), np.uint8)
        self.there = np.arange(NUM_BLOCKS, dtype=np.uint8).repeat(BLOCK_BYTES).reshape(NUM_BLOCKS, BLOCK_BYTES)
        self.network.join("there", self.there)
        self.generations = {BlockId(block): 1 for block in range(NUM_BLOCKS)}
        self.told: list[Event] = []

        def open_channel() -> RankChannel[ToTransport, FromTransport]:
            return RankChannel(endpoint, ToTransport)

        self.thread = TransportThread(
            lambda: LoopbackTransport(self.network, "here", self.here),
            open_channel,
            block_size=BLOCK_SIZE,
            lease_s=lease_s,
            quarantine_s=quarantine_s,
            generation=self.generations.__getitem__,
            hashed_slab=self.here if has_checksums else None,
        )
        self.thread.start()
        self._is_closed = False

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self.thread.close()

    def event(self) -> Event:
        """The next thing the loop is told."""

        def find() -> Event | None:
            self.told += self.thread.events()
            return self.told.pop(0) if self.told else None

        return wait_for(find)

    def lend(self, *blocks: int) -> None:
        """A lease with one announced chunk."""
        ids = tuple(BlockId(block) for block in blocks)
        generations = tuple(self.generations[block] for block in ids)
        self.thread.submit(OpenLease(LEASE))
        self.thread.submit(AnnounceChunk(LEASE, 0, len(blocks) * BLOCK_SIZE, ids, generations))

    def connect(self) -> None:
        metadata = SlabMetadata(b"there", 0, NUM_BLOCKS, BLOCK_BYTES).encode()
        self.front.send(ConnectPeer(PEER, metadata))
        self.front.hear(PeerConnected)

    def open_pull(self, num_tokens: int = 8) -> None:
        num_blocks = -(-num_tokens // BLOCK_SIZE)
        self.thread.submit(OpenPull(TRANSFER, 0, num_tokens, tuple(BlockId(8 + block) for block in range(num_blocks))))

    def counts(self, name: str) -> int:
        return self.thread.counters().get(name, 0)


@pytest.fixture
def harness(sockets: Path) -> Iterator[Harness]:
    with running(sockets) as harness:
        yield harness


@contextmanager
def running(sockets: Path, *, has_checksums: bool = False, **times: float) -> Iterator[Harness]:
    endpoint = f"ipc://{sockets}/transport"
    with other_end(endpoint, FromTransport) as front:
        harness = Harness(front, endpoint, has_checksums=has_checksums, **times)
        try:
            yield harness
        finally:
            harness.network.heal("there")
            harness.close()


def chunk(seq: int, first: int, end: int, *blocks: int, peer: PeerId = PEER) -> PullChunk:
    return PullChunk(TRANSFER, 0, seq, first, end, tuple(BlockId(block) for block in blocks), ((0, peer),))


# ---------------------------------------------------------------- leases


def test_a_release_of_a_live_lease_is_confirmed_and_the_loop_may_free(harness: Harness) -> None:
    harness.lend(1, 2)
    assert harness.front.next() == LeaseOpened(LEASE)
    assert harness.front.next() == ChunkAnnounced(LEASE, 0, 0, 8, (BlockId(1), BlockId(2)))
    harness.front.send(RenewLease(LEASE), ReleaseLease(LEASE))
    assert harness.front.next() == LeaseAnswer(LEASE, valid=True)
    assert harness.event() == LeaseReleased(REQUEST)
    assert harness.counts("live_leases") == 0


@pytest.mark.parametrize("who", ["front", "loop"])
def test_a_lease_is_revoked_before_the_loop_is_told(harness: Harness, who: str) -> None:
    harness.lend(1)
    harness.front.hear(ChunkAnnounced)
    if who == "front":
        harness.front.send(RevokeLease(LEASE, "the stream ended"))
    else:
        harness.thread.submit(DropLease(LEASE))
    assert harness.event() == LeaseRevoked(REQUEST)
    harness.front.send(ReleaseLease(LEASE))
    assert harness.front.hear(LeaseAnswer) == LeaseAnswer(LEASE, valid=False)
    assert any(isinstance(message, LeaseGone) for message in harness.front.seen)
    assert harness.thread.events() == []


def test_blocks_are_in_the_table_before_anybody_hears_of_them(harness: Harness) -> None:
    harness.lend(1, 2)
    harness.front.hear(ChunkAnnounced)
    harness.generations[BlockId(2)] += 1  # given out anew: that must not happen, and must not go unseen
    harness.front.send(ReleaseLease(LEASE))
    assert harness.front.hear(LeaseAnswer) == LeaseAnswer(LEASE, valid=False)
    assert harness.event() == LeaseReleased(REQUEST), "its blocks are free all the same"
    assert harness.counts("lease:release:generation_mismatch") == 1


def test_a_chunk_of_a_revoked_lease_is_told_to_nobody(harness: Harness) -> None:
    harness.thread.submit(OpenLease(LEASE))
    harness.thread.submit(DropLease(LEASE))
    harness.thread.submit(AnnounceChunk(LEASE, 0, 4, (BlockId(1),), (1,)))
    harness.front.send(ReleaseLease(LEASE))
    harness.front.hear(LeaseAnswer)
    assert [type(message) for message in harness.front.seen] == [LeaseOpened, LeaseGone, LeaseAnswer]


@pytest.mark.parametrize("message", [ReleaseLease(LEASE), RenewLease(LEASE), RevokeLease(LEASE, "x")])
def test_a_lease_that_never_was_is_never_valid(harness: Harness, message: ToTransport) -> None:
    harness.front.send(message, ReleaseLease(LeaseId("after")))
    answers = {harness.front.hear(LeaseAnswer)}
    if isinstance(message, ReleaseLease):
        answers.add(harness.front.hear(LeaseAnswer))
    assert not any(answer.valid for answer in answers)
    assert harness.thread.events() == []


def test_a_lease_that_nobody_renews_is_revoked(sockets: Path) -> None:
    with running(sockets, lease_s=0.05) as harness:
        harness.lend(1)
        assert harness.event() == LeaseRevoked(REQUEST)
        assert harness.front.hear(LeaseGone) == LeaseGone(LEASE, "the lease was revoked: expired")


# ---------------------------------------------------------------- pulls


def test_a_pull_is_committed_once_everything_is_read_and_confirmed(harness: Harness) -> None:
    harness.connect()
    harness.open_pull()
    harness.front.send(chunk(0, 0, 4, 3))
    assert harness.front.hear(PullAdvanced) == PullAdvanced(TRANSFER), "the front hears that it comes forward"
    harness.front.send(chunk(1, 4, 8, 5))
    finished = harness.front.hear(PullFinished)
    assert (finished.num_bytes, finished.num_reads, finished.num_descriptors) == (2 * BLOCK_BYTES, 2, 2)
    assert harness.here[[8, 9], 0].tolist() == [3, 5]
    assert harness.thread.events() == []
    harness.front.send(ConfirmPull(TRANSFER, valid=True, first_token=17))
    assert harness.front.hear(PullCommitted) == PullCommitted(TRANSFER)
    assert harness.event() == KvReceived(TRANSFER, 17)
    assert (harness.counts("open_pulls"), harness.counts("open_reads")) == (0, 0)


@pytest.mark.parametrize("valid", [True, False])
def test_an_answer_before_everything_is_read_commits_nothing(harness: Harness, valid: bool) -> None:
    harness.connect()
    harness.open_pull()
    harness.front.send(chunk(0, 0, 4, 3), ConfirmPull(TRANSFER, valid=valid, first_token=17))
    assert harness.front.hear(PullBroken).transfer_id == TRANSFER
    assert harness.event() == KvQuiet(TRANSFER)


def test_nothing_comes_of_a_confirmation_for_a_pull_that_is_over(harness: Harness) -> None:
    harness.connect()
    harness.front.send(ConfirmPull(TRANSFER, valid=True, first_token=17), ReleaseLease(LEASE))
    harness.front.hear(LeaseAnswer)
    assert harness.thread.events() == []
    assert harness.counts("pull:ignored:confirm") == 1


WRONG_CHUNKS = {
    "out of order": chunk(1, 0, 4, 3),
    "a gap": chunk(0, 4, 8, 3),
    "a block out of range": chunk(0, 0, 4, NUM_BLOCKS),
    "a peer that nobody connected": chunk(0, 0, 4, 3, peer=PeerId("stranger/0")),
}


@pytest.mark.parametrize("name", WRONG_CHUNKS)
def test_a_chunk_that_cannot_be_breaks_the_pull_and_reads_nothing(harness: Harness, name: str) -> None:
    harness.connect()
    harness.open_pull()
    harness.front.send(WRONG_CHUNKS[name])
    assert harness.front.hear(PullBroken).transfer_id == TRANSFER
    assert harness.event() == KvQuiet(TRANSFER)
    assert not harness.here.any()


def test_what_nobody_pulled_is_quiet_at_once(harness: Harness) -> None:
    harness.thread.submit(AbandonPull(TRANSFER))
    assert harness.event() == KvQuiet(TRANSFER)
    harness.open_pull()
    harness.thread.submit(AbandonPull(TRANSFER))
    assert harness.event() == KvQuiet(TRANSFER)
    harness.connect()
    harness.front.send(chunk(0, 0, 4, 3), ReleaseLease(LEASE))
    harness.front.hear(LeaseAnswer)
    assert not harness.here.any(), "a chunk that comes after is not read"


def test_chunks_that_come_before_the_word_to_open_wait_for_it(harness: Harness) -> None:
    """To a process that does not lead its rank, that word comes by way of the one that does."""
    harness.connect()
    harness.front.send(chunk(0, 0, 4, 3), chunk(1, 4, 8, 5), ReleaseLease(LEASE))
    harness.front.hear(LeaseAnswer)
    assert not harness.here.any()
    harness.open_pull()
    harness.front.hear(PullFinished)
    assert harness.here[[8, 9], 0].tolist() == [3, 5]


def test_an_abandoned_pull_is_quiet_when_its_last_read_is_over(harness: Harness) -> None:
    harness.connect()
    harness.network.hang("there")
    harness.open_pull()
    harness.front.send(chunk(0, 0, 8, 3, 4))
    wait_for(lambda: harness.counts("open_reads") or None)
    harness.thread.submit(AbandonPull(TRANSFER))
    harness.front.send(ReleaseLease(LEASE))
    harness.front.hear(LeaseAnswer)
    assert harness.thread.events() == []
    harness.network.heal("there")
    assert harness.event() == KvQuiet(TRANSFER)


def test_a_peer_that_keeps_an_abandoned_pull_open_is_cut_off(sockets: Path) -> None:
    with running(sockets, quarantine_s=0.05) as harness:
        harness.connect()
        harness.network.hang("there")
        harness.open_pull()
        harness.front.send(chunk(0, 0, 8, 3, 4))
        wait_for(lambda: harness.counts("open_reads") or None)
        harness.thread.submit(AbandonPull(TRANSFER))
        assert harness.front.hear(PeerUnusable).peer == PEER
        assert harness.event() == KvQuiet(TRANSFER)


# ---------------------------------------------------------------- peers


def test_a_peer_that_is_not_there_is_unusable(harness: Harness) -> None:
    harness.front.send(ExpectPeer(), ConnectPeer(PEER, SlabMetadata(b"nobody", 0, 4, BLOCK_BYTES).encode()))
    assert "nobody" in harness.front.hear(PeerUnusable).reason


def test_a_dropped_peer_breaks_what_is_pulled_from_it(harness: Harness) -> None:
    harness.connect()
    harness.network.hang("there")
    harness.open_pull()
    harness.front.send(chunk(0, 0, 4, 3), DropPeer(PEER))
    assert harness.front.hear(PullBroken).transfer_id == TRANSFER
    assert harness.front.hear(PeerUnusable).peer == PEER
    assert harness.event() == KvQuiet(TRANSFER)


# ---------------------------------------------------------------- life


def test_a_transport_that_cannot_be_opened_is_the_starters_error(sockets: Path) -> None:
    def open_transport() -> LoopbackTransport:
        raise StartupError("no transport: install one")

    def open_channel() -> RankChannel[ToTransport, FromTransport]:
        raise AssertionError("not reached")

    thread = TransportThread(
        open_transport, open_channel, block_size=4, lease_s=1, quarantine_s=1, generation=lambda _: 0
    )
    with pytest.raises(StartupError, match="install one"):
        thread.start()


def test_closing_waits_for_reads_that_can_still_write(harness: Harness) -> None:
    harness.connect()
    harness.network.slow("there", num_polls=20)
    harness.open_pull()
    harness.front.send(chunk(0, 0, 8, 3, 4))
    wait_for(lambda: harness.counts("open_reads") or None)
    harness.close()
    assert harness.here[[8, 9], 0].tolist() == [3, 4]
