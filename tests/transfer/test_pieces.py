"""Blocks become pieces that fit a handle, and handles are filled as far as bytes and descriptors allow."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.kv.head_ranges import BlockMap, ByteRun, whole_block
from pdserve.transfer.pieces import MAX_HANDLE_BYTES, MAX_HANDLE_DESCRIPTORS, Pieces
from tests.transfer.conftest import blocks

MIB = 1 << 20
MANY_BLOCKS = 1 << 20


@pytest.mark.parametrize(
    ("block_bytes", "per_block", "per_handle"),
    [(MIB, 1, 16), (16 * MIB, 1, 1), (20 * MIB, 2, 1), (3 * MIB, 1, 5), (33 * MIB, 3, 1), (1024, 1, 4096)],
)
def test_a_handle_carries_at_most_16_mb_and_4096_descriptors(block_bytes: int, per_block: int, per_handle: int) -> None:
    pieces = Pieces(MANY_BLOCKS, whole_block(block_bytes))
    assert (pieces.per_block, pieces.handle_end(0, 10_000)) == (per_block, per_handle)
    assert pieces.num_bytes(0, per_handle) <= MAX_HANDLE_BYTES
    assert pieces.of_blocks(blocks(2)) == list(range(2 * per_block, 3 * per_block))


def test_a_handle_carries_no_more_than_may_be_in_flight_and_never_nothing() -> None:
    assert Pieces(8, whole_block(MIB)).handle_end(0, 8) == 2
    assert Pieces(2, whole_block(MIB)).handle_end(0, 2) == 1


@st.composite
def block_maps(draw: st.DrawFn) -> BlockMap:
    """Runs of unequal sizes, apart from each other on either side."""
    lengths = draw(st.lists(st.integers(1, 40 * MIB), min_size=1, max_size=6))
    runs, source, destination = [], 0, 0
    for length in lengths:
        source, destination = source + draw(st.integers(0, 9)), destination + draw(st.integers(0, 9))
        runs.append(ByteRun(source, destination, length))
        source, destination = source + length, destination + length
    return BlockMap(source, destination, tuple(runs))


@given(block_maps())
def test_pieces_cover_the_runs_in_order_and_each_fits_a_handle(block_map: BlockMap) -> None:
    parts = list(Pieces(4, block_map).runs)
    for run in block_map.runs:
        source, destination, end = run.source_offset, run.destination_offset, run.source_offset + run.num_bytes
        while source < end:
            part = parts.pop(0)
            assert (part.source_offset, part.destination_offset) == (source, destination)
            assert 0 < part.num_bytes <= MAX_HANDLE_BYTES
            source, destination = source + part.num_bytes, destination + part.num_bytes
        assert source == end
    assert parts == []


@given(block_maps(), st.integers(1, 20), st.sampled_from([1, 40, MANY_BLOCKS]))
def test_handles_take_every_piece_once_and_as_many_as_they_may(
    block_map: BlockMap, num_read: int, num_blocks: int
) -> None:
    pieces = Pieces(num_blocks, block_map)
    sizes = [pieces.runs[index % pieces.per_block].num_bytes for index in range(num_read * pieces.per_block)]
    most_bytes = min(MAX_HANDLE_BYTES, pieces.max_bytes_in_flight)
    start = 0
    while start < len(sizes):
        end = pieces.handle_end(start, len(sizes))
        carried = sum(sizes[start:end])
        assert pieces.num_bytes(start, end) == carried
        assert end == start + 1 or (carried <= most_bytes and end - start <= MAX_HANDLE_DESCRIPTORS)
        is_full = end - start == MAX_HANDLE_DESCRIPTORS or carried + sum(sizes[end : end + 1]) > most_bytes
        assert end > start
        assert is_full or end == len(sizes)
        start = end


@pytest.mark.parametrize(
    "run", [ByteRun(0, 0, 65), ByteRun(33, 0, 32), ByteRun(0, 97, 32), ByteRun(-1, 0, 2), ByteRun(0, -1, 2)]
)
def test_a_run_that_leaves_its_block_is_never_cut(run: ByteRun) -> None:
    with pytest.raises(AssertionError, match="ByteRun"):
        Pieces(4, BlockMap(64, 128, (run,)))


def test_a_map_that_reads_nothing_is_never_cut() -> None:
    with pytest.raises(AssertionError, match="reads nothing"):
        Pieces(4, BlockMap(64, 64, ()))
