"""What of a prompt was announced, by which ranks of the peer, and has come, to which processes of our rank."""

from __future__ import annotations

from collections import Counter

from decode_node.pairing import Pairing
from pdserve.errors import ProtocolError
from pdserve.rpc.handoff import ChunkReady


class Coverage:
    """Of one transfer. A part is a process of our rank, and what it holds of every block."""

    def __init__(self, pairing: Pairing, num_parts: int) -> None:
        self._pairing = pairing
        self._num_parts = num_parts
        self._num_chunks: Counter[int] = Counter()  # by the peer's rank
        self._pulled: set[int] = set()
        self._committed: set[int] = set()

    def announce(self, chunk: ChunkReady) -> None:
        """Raises ProtocolError unless it is the next one of a rank that holds a part of this prompt."""
        ranks = {*self._num_chunks, chunk.rank}
        holders = {rank // self._pairing.peer_tp for rank in ranks}  # its processes are those of one rank
        is_there = 0 <= chunk.rank < self._pairing.num_ranks and len(holders) == 1
        if not is_there or chunk.seq != self._num_chunks[chunk.rank]:
            raise ProtocolError(f"chunk {chunk.seq} of rank {chunk.rank} out of order")
        self._num_chunks[chunk.rank] += 1

    def pull(self, part: int) -> None:
        """Every byte that was announced is here."""
        self._pulled.add(part)

    def commit(self, part: int) -> None:
        self._committed.add(part)

    @property
    def is_pulled(self) -> bool:
        return len(self._pulled) == self._num_parts

    @property
    def is_committed(self) -> bool:
        return len(self._committed) == self._num_parts

    def is_announced(self, num_chunks: int) -> bool:
        """Every rank of the peer has announced so many chunks; one that nobody reads from may still be about to.

        Asked once all is pulled, when the others are through: raises ProtocolError where theirs are fewer or more.
        """
        for rank, count in self._num_chunks.items():
            if count > num_chunks or (count < num_chunks and self._pairing.is_read(rank)):
                raise ProtocolError(f"rank {rank} covers the prompt by {count} chunks, {num_chunks} were promised")
        counts = list(self._num_chunks.values())
        return len(counts) == self._pairing.peer_tp and min(counts) == num_chunks
