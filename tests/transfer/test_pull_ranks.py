"""A pull from several ranks is all or nothing: one of them missing never commits, and quiet means quiet in all."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

import pytest

from pdserve.errors import ProtocolError
from pdserve.request import TransferId
from pdserve.transfer.base import PeerId, PeerLost, Read, ReadDone, ReadFailed, ReadId, ReadQuiet
from pdserve.transfer.pull import (
    PullCommitted,
    PullComplete,
    PullEvent,
    PullFailed,
    PullQuiet,
    PullSource,
    PullState,
    PullTable,
)
from tests.transfer.conftest import blocks

T = TransferId(1)
BLOCK = 4
NUM_RANKS = 3
CHUNKS = ((4, 8), (8, 16), (16, 18))  # tokens; in blocks 10 | 11, 12 | 13


def peer(rank: int) -> PeerId:
    return PeerId(f"source/{rank}")


def new_table() -> PullTable:
    """Transfer T: tokens [4, 18) into blocks 10 to 13, from three ranks with slabs of 100, 101 and 102 blocks."""
    table = PullTable(BLOCK)
    table.open(
        T, [PullSource(rank, peer(rank), 100 + rank) for rank in range(NUM_RANKS)], 4, 18, blocks(*range(10, 14))
    )
    return table


def chunk(table: PullTable, rank: int, seq: int) -> list[Read]:
    first, end = CHUNKS[seq]
    ids = blocks(*range(first // BLOCK, -(-end // BLOCK)))
    return table.chunk(T, rank, seq, first, end, ids)


def everything(table: PullTable, ranks: range = range(NUM_RANKS)) -> list[Read]:
    return [read for rank in ranks for seq in range(len(CHUNKS)) for read in chunk(table, rank, seq)]


def done(table: PullTable, read: Read) -> list[PullEvent]:
    return table.on_event(ReadDone(read.read_id, 10, len(read.sources), 0.5), 1.0)


def of(events: list[PullEvent], *kinds: type[PullEvent]) -> list[PullEvent]:
    return [event for event in events if isinstance(event, kinds)]


def ends(events: list[PullEvent]) -> list[PullEvent]:
    return of(events, PullComplete, PullCommitted, PullFailed, PullQuiet)


def test_every_rank_brings_its_share_into_the_same_blocks() -> None:
    reads = everything(new_table())
    for rank in range(NUM_RANKS):
        own = [read for read in reads if read.peer == peer(rank)]
        assert [read.destinations for read in own] == [blocks(10), blocks(11, 12), blocks(13)]
    assert len({read.read_id for read in reads}) == len(reads) == NUM_RANKS * len(CHUNKS)


@pytest.mark.parametrize("order", list(itertools.permutations(range(NUM_RANKS))))
def test_a_pull_is_complete_once_and_only_with_the_last_read_of_the_last_rank(order: tuple[int, ...]) -> None:
    table = new_table()
    reads = everything(table)
    in_order = [read for rank in order for read in reads if read.peer == peer(rank)]
    for read in in_order[:-1]:
        assert ends(done(table, read)) == []
    assert ends(done(table, in_order[-1])) == [PullComplete(T, 90, 9, 12, 4.5)]
    assert table.confirm(T, True, 2.0) == [PullCommitted(T)]


@pytest.mark.parametrize("missing", range(NUM_RANKS))
def test_one_rank_that_announced_nothing_or_not_all_never_commits(missing: int) -> None:
    for num_announced in range(len(CHUNKS)):
        table = new_table()
        for rank in range(NUM_RANKS):
            for seq in range(num_announced if rank == missing else len(CHUNKS)):
                for read in chunk(table, rank, seq):
                    assert ends(done(table, read)) == []
        assert table.state(T) is PullState.OPEN
        assert ends(table.confirm(T, True, 2.0)) == [
            PullFailed(T, "confirmed before everything was read"),
            PullQuiet(T),
        ]
        assert table.counters["committed"] == 0


@pytest.mark.parametrize("late", range(NUM_RANKS))
def test_a_confirmation_while_one_rank_is_still_read_is_a_failure_that_waits_for_that_read(late: int) -> None:
    table = new_table()
    reads = everything(table)
    held = next(read for read in reads if read.peer == peer(late))
    for read in reads:
        if read is not held:
            done(table, read)
    assert table.confirm(T, True, 2.0) == [PullFailed(T, "confirmed before everything was read")]
    assert table.num_quarantined_blocks == 4
    assert done(table, held) == [PullQuiet(T)]


@pytest.mark.parametrize("is_quiet", [True, False])
def test_a_failure_on_one_rank_waits_until_the_reads_of_every_rank_are_quiet(is_quiet: bool) -> None:
    table = new_table()
    reads = everything(table)
    broken, *others = reads
    assert table.on_event(ReadFailed(broken.read_id, "broken", is_quiet), 1.0) == [PullFailed(T, "broken")]
    if not is_quiet:
        others.append(broken)
    for read in others[:-1]:
        assert done(table, read) == []
        assert (table.num_open, table.num_quarantined_blocks) == (1, 4)
    last = others[-1]
    assert table.on_event(ReadQuiet(last.read_id), 2.0) == [PullQuiet(T)]
    assert (table.num_open, table.num_open_reads, table.num_quarantined_blocks) == (0, 0, 0)


def test_faults_on_several_ranks_are_one_failure() -> None:
    table = new_table()
    reads = everything(table)
    told = [e for read in reads for e in table.on_event(ReadFailed(read.read_id, "broken", is_quiet=False), 1.0)]
    assert told == [PullFailed(T, "broken")]
    told = [e for read in reads for e in table.on_event(ReadQuiet(read.read_id), 2.0)]
    assert told == [PullQuiet(T)]
    assert table.counters["failed"] == 1


def test_after_one_ranks_failure_no_rank_is_read_any_more() -> None:
    table = new_table()
    (read,) = chunk(table, 0, 0)
    (open_read,) = chunk(table, 1, 0)
    table.on_event(ReadFailed(read.read_id, "broken", is_quiet=True), 1.0)
    assert [chunk(table, rank, seq) for rank, seq in ((0, 1), (1, 1), (2, 0))] == [[], [], []]
    assert table.num_open_reads == 1
    assert done(table, open_read) == [PullQuiet(T)]


def test_a_rank_lost_after_its_share_was_read_fails_the_pull_while_another_is_still_read() -> None:
    table = new_table()
    reads = everything(table)
    for read in reads:
        if read.peer != peer(2):
            done(table, read)
    assert table.on_event(PeerLost(peer(0), "gone"), 1.0) == [PullFailed(T, "source/0 lost: gone")]
    for read in reads[-3:-1]:
        assert done(table, read) == []
    assert done(table, reads[-1]) == [PullQuiet(T)]


def test_every_rank_that_keeps_blocks_in_quarantine_is_cut_and_no_other() -> None:
    table = new_table()
    for read in everything(table):
        if read.peer == peer(1):
            done(table, read)
    table.abandon(T, "abort", 10.0)
    assert table.overdue(130.0, 120.0) == [peer(0), peer(2)]
    assert table.on_event(PeerLost(peer(0), "cut off"), 131.0) == []
    assert table.overdue(132.0, 120.0) == [peer(2)]
    assert table.on_event(PeerLost(peer(2), "cut off"), 133.0) == [PullQuiet(T)]


def test_each_rank_counts_its_own_chunks_and_is_bounded_by_its_own_slab() -> None:
    table = new_table()
    everything(table, range(1))
    with pytest.raises(ProtocolError, match=r"chunk 3 \[4, 8\) of rank 1: expected chunk 0"):
        table.chunk(T, 1, 3, 4, 8, blocks(1))
    with pytest.raises(ProtocolError, match="block 101 is outside the peer's 101"):
        table.chunk(T, 1, 0, 4, 8, blocks(101))
    assert [read.sources for read in table.chunk(T, 2, 0, 4, 8, blocks(101))] == [blocks(101)]


# ---------------------------------------------------------------- a walk


@dataclass
class Walk:
    """A pull, what is open of it, and whether anything ever went wrong."""

    dice: random.Random
    table: PullTable = field(default_factory=new_table)
    next_seq: list[int] = field(default_factory=lambda: [0] * NUM_RANKS)
    open_reads: list[Read] = field(default_factory=list)
    loud: set[ReadId] = field(default_factory=set)
    told: list[PullEvent] = field(default_factory=list)
    is_spoiled: bool = False

    def announce(self) -> None:
        rank = self.dice.randrange(NUM_RANKS)
        if self.next_seq[rank] < len(CHUNKS):
            self.open_reads += chunk(self.table, rank, self.next_seq[rank])
            self.next_seq[rank] += 1

    def finish(self) -> None:
        if self.open_reads:
            read = self.open_reads.pop(self.dice.randrange(len(self.open_reads)))
            quiet = ReadQuiet(read.read_id)
            self.told += self.table.on_event(quiet, 1.0) if read.read_id in self.loud else done(self.table, read)

    def fail(self) -> None:
        if self.open_reads:
            read = self.dice.choice(self.open_reads)
            if read.read_id not in self.loud:
                self.loud.add(read.read_id)
                self.is_spoiled = True
                self.told += self.table.on_event(ReadFailed(read.read_id, "broken", is_quiet=False), 1.0)

    def lose(self) -> None:
        lost = peer(self.dice.randrange(NUM_RANKS))
        self.is_spoiled |= self.table.state(T) is PullState.OPEN
        self.open_reads = [read for read in self.open_reads if read.peer != lost]
        self.told += self.table.on_event(PeerLost(lost, "gone"), 1.0)

    def confirm(self) -> None:
        is_whole = self.next_seq == [len(CHUNKS)] * NUM_RANKS and not self.open_reads
        self.is_spoiled |= not is_whole
        self.told += self.table.confirm(T, True, 1.0)

    def check(self) -> None:
        """Blocks are the pull's until every read of every rank is quiet."""
        is_over = bool(of(self.told, PullCommitted, PullQuiet))
        assert self.table.num_open == (0 if is_over else 1)
        if is_over:
            assert not self.open_reads


def test_whatever_happens_to_any_rank_a_pull_commits_whole_or_ends_quiet() -> None:
    kinds = {"announce": 6, "finish": 6, "fail": 0.15, "lose": 0.05, "confirm": 0.3}
    outcomes = set()
    for seed in range(400):
        walk = Walk(random.Random(seed))
        for _ in range(40):
            getattr(walk, walk.dice.choices(list(kinds), list(kinds.values()))[0])()
            walk.check()
        walk.told += walk.table.abandon(T, "end", 9.0)
        while walk.open_reads:
            walk.finish()
        (end,) = of(walk.told, PullCommitted, PullQuiet)
        assert walk.told[-1] == end
        assert not (walk.is_spoiled and isinstance(end, PullCommitted))
        assert len(of(walk.told, PullFailed, PullComplete)) <= 2
        assert (walk.table.num_open, walk.table.num_open_reads, walk.table.num_quarantined_blocks) == (0, 0, 0)
        outcomes.add(type(end))
    assert outcomes == {PullCommitted, PullQuiet}
