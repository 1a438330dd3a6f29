"""What the scheduler asks of block storage below the host tier, and what it is told."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.request import BlockHash, BlockId


@dataclass(frozen=True, slots=True)
class Fetch:
    """Read the longest run of these prefixes that storage holds, from the first on, into these host blocks."""

    fetch_id: int
    hashes: tuple[BlockHash, ...]
    host_blocks: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True)
class Store:
    """Write one host block, which holds the prefix `block_hash`."""

    store_id: int
    block_hash: BlockHash
    host_block: BlockId


@dataclass(frozen=True, slots=True)
class StorageReady:
    """All that will be read is read and verified: num_blocks, 0 for a miss. Nothing writes there any more."""

    fetch_id: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class StorageLate:
    """The read missed its deadline: its prompt goes on without. The host blocks stay the fetch's until StorageReady."""

    fetch_id: int


@dataclass(frozen=True, slots=True)
class Stored:
    """The write has ended, well or not."""

    store_id: int
    is_stored: bool
