"""A hash a block, to see that what was read is what was lent (`--kv-checksum`). Belongs to the transport thread.

Hashing goes on a little at a time beside everything else: a peer's reads are served by the thread that hashes.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pdserve.errors import ProtocolError
from pdserve.request import BlockId, TransferId
from pdserve.transfer.base import PeerId, Read

Slab = npt.NDArray[np.uint8]  # [num_blocks, block_bytes]
Hashes = tuple[int, ...]

HASH_BYTES = 8
# How long `advance` may take; one block is hashed in any case (about 1 ms a megabyte, without the GIL).
BUDGET_S = 0.002


def block_hash(block: npt.NDArray[np.uint8]) -> int:
    """64 bits of BLAKE2b over all bytes of a block, those past the prompt's end included: they travel too."""
    return int.from_bytes(hashlib.blake2b(block.data, digest_size=HASH_BYTES).digest(), "little")


@dataclass(slots=True)
class _Job:
    blocks: Sequence[BlockId]
    then: Callable[[Hashes], None]
    hashes: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Our `block` does not hold what the peer's `source` held when it was announced."""

    peer: PeerId
    source: BlockId
    block: BlockId

    def __str__(self) -> str:
        return f"block {self.source} of {self.peer} does not have its hash after it was read into block {self.block}"


class Checksums:
    """Over one slab. What is submitted first is hashed first; each answer goes to the callable that came with it.

    num_failures: transfers that brought something else than was announced.
    """

    def __init__(self, slab: Slab, clock: Callable[[], float] = time.monotonic) -> None:
        self._slab = slab
        self._clock = clock
        self._jobs: deque[_Job] = deque()
        self._expected: dict[TransferId, list[tuple[Mismatch, int]]] = {}
        self._compared: set[TransferId] = set()  # being hashed
        self.num_failures = 0

    @property
    def is_busy(self) -> bool:
        return bool(self._jobs)

    def advance(self) -> None:
        """Hash for a moment."""
        deadline_s = self._clock() + BUDGET_S
        while self._jobs:
            self._hash_next(self._jobs[0])
            if self._clock() >= deadline_s:
                return

    def _hash_next(self, job: _Job) -> None:
        if len(job.hashes) < len(job.blocks):
            job.hashes.append(block_hash(self._slab[job.blocks[len(job.hashes)]]))
        if len(job.hashes) == len(job.blocks):
            self._jobs.popleft()
            job.then(tuple(job.hashes))

    def hash(self, blocks: Sequence[BlockId], then: Callable[[Hashes], None]) -> None:
        """Nobody may write these blocks until `then` is called with their hashes, or has to drop what it is told."""
        self._jobs.append(_Job(blocks, then))

    # ------------------------------------------------------------ what was read

    def expect(self, transfer_id: TransferId, read: Read, hashes: Hashes) -> None:
        """The peer said what the read will bring. Raises ProtocolError where it did not."""
        if len(hashes) != len(read.sources):
            raise ProtocolError(f"a chunk of {len(read.sources)} blocks came with {len(hashes)} block_hashes")
        pairs = (Mismatch(read.peer, *pair) for pair in zip(read.sources, read.destinations, strict=True))
        self._expected.setdefault(transfer_id, []).extend(zip(pairs, hashes, strict=True))

    def compare(self, transfer_id: TransferId, then: Callable[[list[Mismatch]], None]) -> None:
        """Every read of the transfer is done: tell which of its blocks are not what the peer announced."""
        expected = self._expected.pop(transfer_id, [])
        self._compared.add(transfer_id)

        def on_hashed(hashes: Hashes) -> None:
            if transfer_id not in self._compared:  # given up meanwhile: the blocks are somebody else's
                return
            self._compared.remove(transfer_id)
            found = zip(expected, hashes, strict=True)
            differing = [pair for (pair, announced), actual in found if actual != announced]
            self.num_failures += bool(differing)
            then(differing)

        self.hash([pair.block for pair, _ in expected], on_hashed)

    def forget(self, transfer_id: TransferId) -> None:
        """The transfer is over: whatever was asked about it is not answered."""
        self._expected.pop(transfer_id, None)
        self._compared.discard(transfer_id)
