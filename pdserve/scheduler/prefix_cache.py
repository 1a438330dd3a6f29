"""Which block holds which prefix: a chain of hashes, one a full block, each covering all tokens up to its end."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence, Set

from pdserve.request import BlockHash, BlockId

_ROOT = BlockHash(b"")


def extend_hashes(hashes: list[BlockHash], tokens: Sequence[int], num_blocks: int, block_size: int) -> None:
    """Append to `hashes` until it covers the first `num_blocks` full blocks of `tokens`."""
    if len(hashes) >= num_blocks:
        return
    first = len(hashes)
    parent = hashes[-1] if hashes else _ROOT
    raw = array("q", tokens[first * block_size : num_blocks * block_size]).tobytes()
    block_bytes = block_size * 8
    for start in range(0, len(raw), block_bytes):
        parent = BlockHash(hashlib.sha256(parent + raw[start : start + block_bytes]).digest())
        hashes.append(parent)


class PrefixCache:
    """A two-way index between block hashes and the blocks that hold them. Holds no references of its own."""

    def __init__(self) -> None:
        self._block_by_hash: dict[BlockHash, BlockId] = {}
        self._hash_by_block: dict[BlockId, BlockHash] = {}

    def __len__(self) -> int:
        return len(self._block_by_hash)

    def __contains__(self, block: BlockId) -> bool:
        return block in self._hash_by_block

    @property
    def blocks(self) -> Set[BlockId]:
        """All that hold a prefix."""
        return self._hash_by_block.keys()

    def publish(self, block_hash: BlockHash, block: BlockId) -> None:
        """`block` now holds the prefix `block_hash`. The first block to say so stays the one that is found."""
        if block_hash not in self._block_by_hash and block not in self._hash_by_block:
            self._block_by_hash[block_hash] = block
            self._hash_by_block[block] = block_hash

    def longest(self, hashes: Sequence[BlockHash]) -> list[BlockId]:
        """The blocks of the longest cached prefix of the chain."""
        found: list[BlockId] = []
        for block_hash in hashes:
            block = self._block_by_hash.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def hash_of(self, block: BlockId) -> BlockHash:
        """The prefix that `block` holds."""
        return self._hash_by_block[block]

    def forget(self, block: BlockId) -> None:
        """`block` is about to hold something else."""
        block_hash = self._hash_by_block.pop(block, None)
        if block_hash is not None:
            del self._block_by_hash[block_hash]

    def check_integrity(self) -> None:
        assert {h: b for b, h in self._hash_by_block.items()} == self._block_by_hash
