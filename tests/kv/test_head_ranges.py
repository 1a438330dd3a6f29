"""Unequal tensor parallel: a rank's block is made of head ranges of other ranks' blocks, every byte once."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import PeerMismatch
from pdserve.kv.head_ranges import BlockMap, ByteRun, head_reads, whole_block
from pdserve.kv.layout import KVLayout, Plane
from tests.kv.shards import model_kv, shard_of

EIGHT_HEADS = KVLayout(num_layers=2, num_kv_heads=8, head_dim=4, block_size=2)


@st.composite
def splits(draw: st.DrawFn) -> tuple[KVLayout, int, int, int]:
    """(the model's layout, ranks that wrote, ranks that read, one of the latter)"""
    heads = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12]))
    sizes = [size for size in range(1, 25) if heads % size == 0 or size % heads == 0]
    layout = KVLayout(draw(st.integers(1, 3)), heads, draw(st.integers(1, 3)), draw(st.integers(1, 3)), "float16")
    reader_tp = draw(st.sampled_from(sizes))
    return layout, draw(st.sampled_from(sizes)), reader_tp, draw(st.integers(0, reader_tp - 1))


@given(splits())
def test_every_byte_is_written_once_and_comes_from_a_rank_that_holds_its_head(
    split: tuple[KVLayout, int, int, int],
) -> None:
    layout, source_tp, reader_tp, reader_rank = split
    kv = model_kv(layout, 1)
    block = np.zeros(layout.shard(reader_tp).block_bytes, np.uint8)
    num_writes = np.zeros(len(block), int)
    for rank, block_map in head_reads(layout, source_tp, reader_tp, reader_rank).items():
        (source,) = shard_of(kv, source_tp, rank)
        assert (block_map.source_block_bytes, block_map.block_bytes) == (len(source), len(block))
        for run in block_map.runs:
            into = slice(run.destination_offset, run.destination_offset + run.num_bytes)
            block[into] = source[run.source_offset : run.source_offset + run.num_bytes]
            num_writes[into] += 1
    assert (num_writes == 1).all()
    assert np.array_equal(block, shard_of(kv, reader_tp, reader_rank)[0])


@given(splits())
def test_no_two_runs_could_be_one(split: tuple[KVLayout, int, int, int]) -> None:
    for block_map in head_reads(*split).values():
        for one, next_one in pairwise(block_map.runs):
            assert one.destination_offset + one.num_bytes <= next_one.destination_offset
            steps = (
                next_one.source_offset - one.source_offset,
                next_one.destination_offset - one.destination_offset,
            )
            assert steps != (one.num_bytes, one.num_bytes)


@given(splits())
def test_equal_splits_read_the_whole_block_of_the_same_rank_in_one_run(split: tuple[KVLayout, int, int, int]) -> None:
    layout, _, size, rank = split
    assert head_reads(layout, size, size, rank) == {rank: whole_block(layout.shard(size).block_bytes)}


def test_a_reader_of_two_ranks_takes_a_run_a_plane_from_each_of_four() -> None:
    head = 2 * 4 * 4
    (low, high) = (
        tuple(ByteRun(plane * 2 * head, (plane * 4 + start) * head, 2 * head) for plane in range(4)) for start in (0, 2)
    )
    blocks = EIGHT_HEADS.shard(4).block_bytes, EIGHT_HEADS.shard(2).block_bytes
    assert head_reads(EIGHT_HEADS, 4, 2, 1) == {2: BlockMap(*blocks, low), 3: BlockMap(*blocks, high)}


def test_heads_that_do_not_meet_on_rank_bounds_come_from_both_sides() -> None:
    six_heads = KVLayout(1, 6, 4, 2)
    assert list(head_reads(six_heads, 2, 3, 1)) == [0, 1]  # heads 2 and 3 of [0, 3) and [3, 6)


def test_readers_are_spread_over_the_ranks_that_hold_a_head() -> None:
    one_head = KVLayout(1, 1, 4, 2)
    assert [list(head_reads(one_head, 2, 4, rank)) for rank in range(4)] == [[0], [1], [0], [1]]
    assert [list(head_reads(one_head, 4, 2, rank)) for rank in range(2)] == [[0], [1]]


class Latent(KVLayout):
    """One plane that every rank holds whole, beside a plane of heads."""

    @property
    def planes(self) -> tuple[Plane, ...]:
        return (Plane("latent", (self.block_size, 3), self.dtype, None), *KVLayout.planes.fget(self)[:1])  # type: ignore[attr-defined]


@pytest.mark.parametrize(("source_tp", "reader_tp"), [(1, 2), (2, 1), (2, 4), (4, 2)])
def test_a_plane_without_heads_is_read_whole_from_one_rank(source_tp: int, reader_tp: int) -> None:
    layout = Latent(1, 4, 4, 2)
    latent = layout.planes[0].num_bytes
    for rank in range(reader_tp):
        maps = head_reads(layout, source_tp, reader_tp, rank)
        covering = [run for block_map in maps.values() for run in block_map.runs if run.destination_offset < latent]
        assert [(run.source_offset, run.destination_offset) for run in covering] == [(0, 0)]
        assert covering[0].num_bytes >= latent


@pytest.mark.parametrize(
    ("source_tp", "reader_tp", "message"),
    [
        (3, 2, "tensor_parallel_size: 2 here, 3 there: 8 KV heads cannot be split over 3 ranks"),
        (2, 12, "tensor_parallel_size: 12 here, 2 there: 8 KV heads cannot be split over 12 ranks"),
        (0, 1, "tensor_parallel_size: 1 here, 0 there: 8 KV heads cannot be split over 0 ranks"),
    ],
)
def test_heads_that_cannot_be_split_are_refused_with_the_numbers(source_tp: int, reader_tp: int, message: str) -> None:
    with pytest.raises(PeerMismatch) as raised:
        head_reads(EIGHT_HEADS, source_tp, reader_tp, 0)
    assert raised.value.message == message
