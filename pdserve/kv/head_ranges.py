"""Which bytes of whose blocks make up a rank's block, when the two ends split the heads over unequal numbers of ranks.

8 heads of a plane, in bytes of one head; rank 1 of 2 reads from the ranks of 4, each of which holds two heads:

    source rank   0: [h0 h1)   1: [h2 h3)   2: [h4 h5)   3: [h6 h7)
                                              │            │
    reader rank 1                            [h4     h5   h6     h7)

In a block the planes follow each other, k and v of every layer, so that two neighbours in one plane are two runs; runs
that go on without a gap on both ends are one.

Where there are more ranks than heads, several hold the same head, and readers are spread over them. Equal splits give
one run, the whole block of the same rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pdserve.errors import PeerMismatch
from pdserve.kv.layout import KVLayout, Plane, can_split_heads, held_heads


@dataclass(frozen=True, slots=True)
class ByteRun:
    """num_bytes from source_offset on in a block of the source go to destination_offset in a block of the reader."""

    source_offset: int
    destination_offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class BlockMap:
    """What one rank reads of each block of another, in the order of destination offsets, which do not overlap."""

    source_block_bytes: int
    block_bytes: int  # the reader's
    runs: tuple[ByteRun, ...]


def whole_block(block_bytes: int) -> BlockMap:
    """Both ends' blocks are the same thing."""
    return BlockMap(block_bytes, block_bytes, (ByteRun(0, 0, block_bytes),))


def head_reads(layout: KVLayout, source_tp: int, reader_tp: int, reader_rank: int) -> dict[int, BlockMap]:
    """For each rank to read from, what to read of it; together they fill the reader's block, every byte once.

    layout: of the whole model. source_tp, reader_tp: ranks of the node that wrote the blocks, and of the one that
    reads them. Raises PeerMismatch when the heads cannot be split over either.
    """
    for size in (source_tp, reader_tp):
        if not can_split_heads(layout.num_kv_heads, size):
            sizes = f"tensor_parallel_size: {reader_tp} here, {source_tp} there"
            raise PeerMismatch(f"{sizes}: {layout.num_kv_heads} KV heads cannot be split over {size} ranks")
    assert 0 <= reader_rank < reader_tp, f"rank {reader_rank} of {reader_tp}"
    return _Ends(layout, source_tp, reader_tp, reader_rank).maps()


@dataclass(frozen=True, slots=True)
class _Ends:
    layout: KVLayout
    source_tp: int
    reader_tp: int
    reader_rank: int

    def maps(self) -> dict[int, BlockMap]:
        source, reader = self.layout.shard(self.source_tp), self.layout.shard(self.reader_tp)
        runs: dict[int, list[ByteRun]] = {}
        for layer in range(self.layout.num_layers):
            for plane in reader.planes:
                offsets = source.plane_offset(layer, plane.name), reader.plane_offset(layer, plane.name)
                for rank, run in self._plane_runs(plane, *offsets):
                    _join(runs.setdefault(rank, []), run)
        return {rank: BlockMap(source.block_bytes, reader.block_bytes, tuple(runs[rank])) for rank in sorted(runs)}

    def _plane_runs(self, plane: Plane, source_offset: int, reader_offset: int) -> Iterator[tuple[int, ByteRun]]:
        """(source rank, one head of the plane); a plane that is not split is whole on every rank."""
        if plane.head_axis is None:
            yield self.reader_rank % self.source_tp, ByteRun(source_offset, reader_offset, plane.num_bytes)
            return
        assert plane.head_axis == 0, f"the heads of plane {plane.name} are not contiguous: axis {plane.head_axis}"
        head_bytes = plane.num_bytes // plane.shape[0]
        for place, head in enumerate(held_heads(self.layout.num_kv_heads, self.reader_tp, self.reader_rank)):
            rank, source_place = self._holder(head)
            start = source_offset + source_place * head_bytes
            yield rank, ByteRun(start, reader_offset + place * head_bytes, head_bytes)

    def _holder(self, head: int) -> tuple[int, int]:
        """The source rank to read `head` from, and its place among that rank's heads."""
        num_heads = self.layout.num_kv_heads
        if self.source_tp <= num_heads:
            return divmod(head, num_heads // self.source_tp)
        num_holders = self.source_tp // num_heads
        return head * num_holders + self.reader_rank % num_holders, 0


def _join(runs: list[ByteRun], run: ByteRun) -> None:
    """Append `run`, or lengthen the last one where both ends go on without a gap."""
    if runs:
        last = runs[-1]
        ends = last.source_offset + last.num_bytes, last.destination_offset + last.num_bytes
        if ends == (run.source_offset, run.destination_offset):
            runs[-1] = ByteRun(last.source_offset, last.destination_offset, last.num_bytes + run.num_bytes)
            return
    runs.append(run)
