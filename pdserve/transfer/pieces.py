"""How the blocks of a pair are cut for the wire: the runs of its block map, none too big for a handle."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

from pdserve.kv.head_ranges import BlockMap, ByteRun
from pdserve.request import BlockId

MAX_HANDLE_BYTES = 16 << 20
MAX_HANDLE_DESCRIPTORS = 4096


class Pieces:
    """The same run of each block is one piece. Pieces are numbered block by block: block * per_block + index in `runs`.

    A read is a list of whole blocks and so a list of pieces; a *position* is a place in that list. num_blocks: of our
    slab, into which the peer's blocks are read.
    """

    def __init__(self, num_blocks: int, block_map: BlockMap) -> None:
        _check(block_map)
        self.num_blocks = num_blocks
        self.block_map = block_map
        self.runs = tuple(part for run in block_map.runs for part in _parts(run))
        # [i]: bytes of a block's first i pieces.
        self._ends = list(accumulate((run.num_bytes for run in self.runs), initial=0))

    @property
    def per_block(self) -> int:
        return len(self.runs)

    @property
    def max_bytes_in_flight(self) -> int:
        return self.num_blocks * self.block_map.block_bytes // 4  # R6 of link.py

    def of_blocks(self, blocks: Sequence[BlockId]) -> list[int]:
        per_block = self.per_block
        return [block * per_block + index for block in blocks for index in range(per_block)]

    def num_bytes(self, start: int, end: int) -> int:
        """Of the pieces at positions [start, end) of a read."""
        return self._bytes_before(end) - self._bytes_before(start)

    def handle_end(self, start: int, end: int) -> int:
        """Where a handle that starts at position `start` stops: at `end`, or before, at the last piece it can carry."""
        most_bytes = min(MAX_HANDLE_BYTES, self.max_bytes_in_flight)
        num_blocks, rest = divmod(self._bytes_before(start) + most_bytes, self._ends[-1])
        full = num_blocks * self.per_block + bisect_right(self._ends, rest) - 1
        return min(end, max(start + 1, min(full, start + MAX_HANDLE_DESCRIPTORS)))

    def _bytes_before(self, position: int) -> int:
        num_blocks, index = divmod(position, self.per_block)
        return num_blocks * self._ends[-1] + self._ends[index]


def _check(block_map: BlockMap) -> None:
    """A run out of bounds would read or write another block's bytes."""
    assert block_map.runs, "a pair that reads nothing"
    for run in block_map.runs:
        assert 0 <= run.source_offset <= block_map.source_block_bytes - run.num_bytes, f"{run} of {block_map}"
        assert 0 <= run.destination_offset <= block_map.block_bytes - run.num_bytes, f"{run} of {block_map}"
        assert run.num_bytes > 0, f"{run} of {block_map}"


def _parts(run: ByteRun) -> Iterator[ByteRun]:
    """The run, in as few parts as handles allow and of about the same size."""
    num_parts = -(-run.num_bytes // MAX_HANDLE_BYTES)
    part_bytes = -(-run.num_bytes // num_parts)
    for start in range(0, run.num_bytes, part_bytes):
        length = min(part_bytes, run.num_bytes - start)
        yield ByteRun(run.source_offset + start, run.destination_offset + start, length)
