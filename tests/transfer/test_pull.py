"""A pull commits what was announced whole, read on every rank, and confirmed; everything else fails and drains."""

from __future__ import annotations

import itertools
import random

import pytest

from pdserve.errors import InternalError, ProtocolError
from pdserve.request import TransferId
from pdserve.transfer.base import Connected, PeerId, PeerLost, Read, ReadDone, ReadFailed, ReadId, ReadQuiet
from pdserve.transfer.pull import (
    TRANSITIONS,
    PullChunkRead,
    PullCommitted,
    PullComplete,
    PullFailed,
    PullQuiet,
    PullSource,
    PullState,
    PullStep,
    PullTable,
    next_state,
)
from tests.transfer.conftest import PEER, blocks

T = TransferId(1)
OTHER = PeerId("source/1")
BLOCK = 4


def new_table(*, ranks: int = 1, num_cached: int = 4, num_prompt: int = 14) -> PullTable:
    """Transfer T: tokens [4, 14) in blocks 10, 11, 12; the peer has 100 blocks a rank."""
    table = PullTable(BLOCK)
    sources = [PullSource(rank, peer, 100) for rank, peer in enumerate((PEER, OTHER)[:ranks])]
    num_blocks = -(-(num_prompt - num_cached) // BLOCK)
    table.open(T, sources, num_cached, num_prompt, blocks(*range(10, 10 + num_blocks)))
    return table


def chunk(table: PullTable, seq: int, first: int, end: int, *ids: int, rank: int = 0) -> list[Read]:
    return table.chunk(T, rank, seq, first, end, blocks(*ids))


def done(read: Read) -> ReadDone:
    return ReadDone(read.read_id, 100 * len(read.sources), len(read.sources), 0.5)


def failed(read: Read, *, is_quiet: bool) -> ReadFailed:
    return ReadFailed(read.read_id, "broken", is_quiet)


def complete_table() -> PullTable:
    table = new_table()
    (read,) = chunk(table, 0, 4, 14, 50, 51, 52)
    table.on_event(done(read), 0.0)
    return table


@pytest.mark.parametrize(("state", "step"), list(itertools.product(PullState, PullStep)))
def test_a_step_that_is_not_in_the_table_is_an_error_that_names_both(state: PullState, step: PullStep) -> None:
    if (state, step) in TRANSITIONS:
        assert next_state(state, step) is TRANSITIONS[state, step]
    else:
        with pytest.raises(InternalError, match=f"{state.value} cannot {step.value}"):
            next_state(state, step)


def test_commit_is_reached_only_through_complete_and_quiet_only_through_draining() -> None:
    assert {state for (state, _), target in TRANSITIONS.items() if target is PullState.COMMITTED} == {
        PullState.COMPLETE
    }
    assert {state for (state, _), target in TRANSITIONS.items() if target is PullState.QUIET} == {PullState.DRAINING}


def test_chunks_become_reads_into_the_blocks_of_their_range() -> None:
    table = new_table()
    assert chunk(table, 0, 4, 8, 50) == [Read(ReadId(1), PEER, blocks(50), blocks(10))]
    assert chunk(table, 1, 8, 14, 51, 99) == [Read(ReadId(2), PEER, blocks(51, 99), blocks(11, 12))]
    assert table.num_open_reads == 2


def test_a_pull_completes_when_all_is_covered_and_read_and_commits_when_confirmed() -> None:
    table = new_table()
    (first,) = chunk(table, 0, 4, 8, 50)
    assert table.on_event(done(first), 1.0) == [PullChunkRead(T)]
    (second,) = chunk(table, 1, 8, 14, 51, 52)
    assert table.on_event(done(second), 2.0) == [PullComplete(T, 300, 2, 3, 1.0)]
    assert table.state(T) is PullState.COMPLETE
    assert table.confirm(T, True, 3.0) == [PullCommitted(T)]
    assert (table.num_open, table.num_open_reads, table.num_quarantined_blocks) == (0, 0, 0)
    assert table.counters == {"committed": 1}


def test_reads_may_end_in_any_order() -> None:
    table = new_table()
    reads = chunk(table, 0, 4, 8, 50) + chunk(table, 1, 8, 14, 51, 52)
    assert table.on_event(done(reads[1]), 0.0) == [PullChunkRead(T)]
    assert [type(event) for event in table.on_event(done(reads[0]), 0.0)] == [PullComplete]


def test_a_pull_with_one_rank_missing_is_not_complete() -> None:
    table = new_table(ranks=2)
    (mine,) = chunk(table, 0, 4, 14, 50, 51, 52)
    assert table.on_event(done(mine), 0.0) == [PullChunkRead(T)]
    assert [type(e) for e in table.confirm(T, True, 0.0)] == [PullFailed, PullQuiet]


def test_every_rank_reads_from_its_own_peer() -> None:
    table = new_table(ranks=2)
    reads = chunk(table, 0, 4, 14, 50, 51, 52) + chunk(table, 0, 4, 14, 60, 61, 62, rank=1)
    assert [read.peer for read in reads] == [PEER, OTHER]
    assert table.on_event(done(reads[0]), 0.0) == [PullChunkRead(T)]
    assert table.on_event(done(reads[1]), 0.0) == [PullComplete(T, 600, 2, 6, 1.0)]


def test_a_confirmation_before_everything_is_read_is_a_failure() -> None:
    table = new_table()
    (read,) = chunk(table, 0, 4, 14, 50, 51, 52)
    assert table.confirm(T, True, 0.0) == [PullFailed(T, "confirmed before everything was read")]
    assert table.num_quarantined_blocks == 3
    assert table.on_event(done(read), 1.0) == [PullQuiet(T)]


def test_a_refused_confirmation_is_a_failure_whatever_was_read() -> None:
    table = complete_table()
    assert table.confirm(T, False, 0.0) == [PullFailed(T, "the peer refused to confirm"), PullQuiet(T)]
    assert table.confirm(T, True, 0.0) == []
    assert table.counters == {"failed": 1, "ignored:confirm": 1}


@pytest.mark.parametrize(
    ("seq", "first", "end", "ids", "message"),
    [
        (1, 4, 8, (50,), "chunk 1 [4, 8) of rank 0: expected chunk 0"),
        (0, 8, 14, (50, 51), "chunk 0 [8, 14) of rank 0: expected to start at token 4"),
        (0, 0, 8, (50, 51), "chunk 0 [0, 8) of rank 0: expected to start at token 4"),
        (0, 4, 4, (), "chunk 0 [4, 4) of rank 0: empty, or past the prompt's 14 tokens"),
        (0, 4, 16, (1, 2, 3), "chunk 0 [4, 16) of rank 0: empty, or past the prompt's 14 tokens"),
        (0, 4, 10, (1, 2), "chunk 0 [4, 10) of rank 0: ends inside a block of 4 before the prompt does"),
        (0, 4, 12, (1,), "chunk 0 [4, 12) of rank 0: 1 blocks of 4 tokens"),
        (0, 4, 8, (100,), "chunk 0 [4, 8) of rank 0: block 100 is outside the peer's 100"),
        (0, 4, 8, (-1,), "chunk 0 [4, 8) of rank 0: block -1 is outside the peer's 100"),
    ],
)
def test_a_chunk_out_of_order_or_bounds_is_refused_with_its_values(
    seq: int, first: int, end: int, ids: tuple[int, ...], message: str
) -> None:
    table = new_table()
    with pytest.raises(ProtocolError) as raised:
        chunk(table, seq, first, end, *ids)
    assert raised.value.message == message
    assert table.num_open_reads == 0
    assert table.abandon(T, "protocol", 0.0) == [PullQuiet(T)]


def test_a_chunk_of_a_rank_that_is_no_source_is_refused() -> None:
    with pytest.raises(ProtocolError, match=r"chunk 0: rank 3 is none of \[0\]"):
        chunk(new_table(), 0, 4, 8, 50, rank=3)


def test_a_failure_is_told_once_and_quiet_when_every_read_is() -> None:
    table = new_table()
    first, second = chunk(table, 0, 4, 8, 50) + chunk(table, 1, 8, 14, 51, 52)
    assert table.on_event(failed(first, is_quiet=False), 1.0) == [PullFailed(T, "broken")]
    assert table.on_event(failed(second, is_quiet=True), 1.0) == []
    assert table.num_quarantined_blocks == 3
    assert table.on_event(ReadQuiet(first.read_id), 2.0) == [PullQuiet(T)]
    assert (table.num_open, table.num_quarantined_blocks, table.num_open_reads) == (0, 0, 0)


def test_a_failure_that_is_quiet_ends_the_transfer_at_once() -> None:
    table = new_table()
    (read,) = chunk(table, 0, 4, 8, 50)
    assert table.on_event(failed(read, is_quiet=True), 1.0) == [PullFailed(T, "broken"), PullQuiet(T)]


def test_an_abandoned_pull_waits_for_its_reads_and_takes_no_more_chunks() -> None:
    table = new_table()
    (read,) = chunk(table, 0, 4, 8, 50)
    assert table.abandon(T, "abort", 1.0) == []
    assert chunk(table, 1, 8, 14, 51, 52) == []
    assert table.abandon(T, "abort", 1.0) == []
    assert table.num_quarantined_blocks == 3
    assert table.on_event(done(read), 2.0) == [PullQuiet(T)]
    assert table.counters == {"abandoned:abort": 1, "ignored:chunk": 1, "ignored:abandon": 1}


def test_late_and_unknown_completions_are_counted_and_ignored() -> None:
    table = complete_table()
    table.confirm(T, True, 0.0)
    read = Read(ReadId(1), PEER, blocks(1), blocks(1))
    for event in (done(read), failed(read, is_quiet=True), failed(read, is_quiet=False), ReadQuiet(read.read_id)):
        assert table.on_event(event, 1.0) == []
    assert table.on_event(Connected(PEER, 4), 1.0) == []
    assert table.counters == {"committed": 1, "ignored:done": 1, "ignored:failed": 2, "ignored:quiet": 1}


def test_a_lost_peer_fails_what_still_needs_it_and_nothing_else() -> None:
    table = new_table()
    table.open(TransferId(2), [PullSource(0, PEER, 100)], 0, 4, blocks(20))
    (read,) = table.chunk(TransferId(2), 0, 0, 0, 4, blocks(7))
    table.on_event(done(read), 0.0)  # complete: it needs the confirmation alone
    table.open(TransferId(3), [PullSource(0, OTHER, 100)], 0, 4, blocks(21))
    chunk(table, 0, 4, 8, 50)
    assert table.on_event(PeerLost(PEER, "gone"), 1.0) == [PullFailed(T, "source/0 lost: gone"), PullQuiet(T)]
    assert (table.state(TransferId(2)), table.state(TransferId(3))) == (PullState.COMPLETE, PullState.OPEN)
    assert table.num_open_reads == 0


def test_a_lost_peer_ends_the_drain_of_what_was_abandoned() -> None:
    table = new_table()
    chunk(table, 0, 4, 8, 50)
    table.abandon(T, "abort", 0.0)
    assert table.on_event(PeerLost(PEER, "gone"), 1.0) == [PullQuiet(T)]


def test_peers_that_keep_blocks_in_quarantine_for_too_long_are_named_once_each() -> None:
    table = new_table()
    chunk(table, 0, 4, 8, 50)
    chunk(table, 1, 8, 14, 51, 52)
    assert table.overdue(1000.0, 120.0) == []
    table.abandon(T, "abort", 1000.0)
    assert table.overdue(1119.9, 120.0) == []
    assert table.overdue(1120.0, 120.0) == [PEER]


def test_whatever_happens_each_pull_ends_once_and_no_block_stays_behind() -> None:
    """300 walks: chunks, completions, faults, confirmations and aborts in any order."""
    dice = random.Random(11)
    for _ in range(300):
        table = new_table(num_cached=0, num_prompt=16)
        open_reads: list[Read] = []
        told = []
        loud: set[ReadId] = set()
        seq = 0
        for now_s in range(12):
            action = dice.choice(["chunk", "chunk", "chunk", "done", "done", "done", "fail", "confirm", "abandon"])
            if action == "chunk" and seq < 4:
                open_reads += chunk(table, seq, 4 * seq, 4 * seq + 4, seq)
                seq += 1
            elif action in ("done", "fail") and open_reads:
                read = dice.choice(open_reads)
                is_quiet = action == "done" or dice.random() < 0.5
                if is_quiet:
                    open_reads.remove(read)
                if read.read_id in loud:
                    told += table.on_event(ReadQuiet(read.read_id), now_s) if is_quiet else []
                else:
                    told += table.on_event(done(read) if action == "done" else failed(read, is_quiet=is_quiet), now_s)
                    loud |= set() if is_quiet else {read.read_id}
            elif action == "confirm" and dice.random() < 0.4:
                told += table.confirm(T, dice.random() < 0.8, now_s)
            elif action == "abandon" and dice.random() < 0.2:
                told += table.abandon(T, "abort", now_s)
        told += table.abandon(T, "end", 99.0)
        for read in open_reads:
            told += table.on_event(ReadQuiet(read.read_id), 100.0)
        ends = [event for event in told if isinstance(event, PullCommitted | PullQuiet)]
        assert len(ends) == 1, told
        assert told[-1] == ends[0]
        assert isinstance(ends[0], PullQuiet) or any(isinstance(event, PullComplete) for event in told)
        assert (table.num_open, table.num_open_reads, table.num_quarantined_blocks) == (0, 0, 0)
