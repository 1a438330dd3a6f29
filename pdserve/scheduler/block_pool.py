"""Who holds which block of the slab: reference counts, and an LRU order among the cached ones nobody holds.

free      no content worth keeping          ─allocate─▶ held
held      at least one reference            ─release──▶ cached (published) or free
cached    published, no reference           ─hold─────▶ held, ─allocate (evict)─▶ held
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

from pdserve.request import BlockHash, BlockId
from pdserve.scheduler.prefix_cache import PrefixCache


class BlockPool:
    """num_blocks blocks of one slab, all free at first."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = cast(list[BlockId], list(reversed(range(num_blocks))))
        self._cached: dict[BlockId, None] = {}  # unheld, in order of their last release
        self._references = [0] * num_blocks
        self._generations = [0] * num_blocks
        self._prefixes = PrefixCache()
        self._unsaved: dict[BlockId, None] = {}  # cached, and not known to the tier below, coldest first
        self._saved: set[BlockId] = set()

    @property
    def num_held(self) -> int:
        return self.num_blocks - len(self._free) - len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could give now, after eviction."""
        return len(self._free) + len(self._cached)

    def generation(self, block: BlockId) -> int:
        """How often the block was given out anew; equal generations mean the same content was never replaced."""
        return self._generations[block]

    def allocate(self, num_blocks: int, leaving: int = 0) -> list[BlockId] | None:
        """`num_blocks` blocks with one reference each, least recently used prefixes evicted; None if too few.

        leaving: how many others must be available after it.
        """
        if num_blocks > self.num_available - leaving:
            return None
        taken = []
        for _ in range(num_blocks):
            block = self._free.pop() if self._free else self._evict()
            self._references[block] = 1
            self._generations[block] += 1
            self._saved.discard(block)
            taken.append(block)
        return taken

    def _evict(self) -> BlockId:
        block = next(iter(self._cached))
        del self._cached[block]
        self._unsaved.pop(block, None)
        self._prefixes.forget(block)
        return block

    def hold(self, blocks: Iterable[BlockId]) -> None:
        """One more reference on each; they are held or cached."""
        for block in blocks:
            if self._references[block] == 0:
                del self._cached[block]
                self._unsaved.pop(block, None)
            self._references[block] += 1

    def release(self, blocks: Sequence[BlockId]) -> None:
        """One reference less on each. The last blocks of a table go first, so that prefixes are evicted last."""
        for block in reversed(blocks):
            self._references[block] -= 1
            assert self._references[block] >= 0, f"block {block} released more often than held"
            if self._references[block] == 0:
                if block in self._prefixes:
                    self._cached[block] = None
                    if block not in self._saved:
                        self._unsaved[block] = None
                else:
                    self._free.append(block)

    def publish(self, block_hash: BlockHash, block: BlockId) -> None:
        """The held block is complete and can be found by others."""
        assert self._references[block] > 0, f"block {block} published while nobody holds it"
        self._prefixes.publish(block_hash, block)

    def holds_prefix(self, block_hash: BlockHash) -> bool:
        """A block holds this prefix, held or cached."""
        return bool(self._prefixes.longest([block_hash]))

    def is_held(self, block: BlockId) -> bool:
        return self._references[block] > 0

    def num_sole_references(self, blocks: Iterable[BlockId]) -> int:
        """How many of these would be available if their holder let go."""
        return [self._references[block] for block in blocks].count(1)

    def coldest_unsaved(self) -> tuple[BlockId, BlockHash] | None:
        """The cached block that will be evicted first of those the tier below does not hold, and its prefix."""
        block = next(iter(self._unsaved), None)
        return None if block is None else (block, self._prefixes.hash_of(block))

    def mark_saved(self, block: BlockId) -> None:
        """The tier below holds this block's prefix, or need not."""
        self._unsaved.pop(block, None)
        self._saved.add(block)

    def longest_prefix(self, hashes: Sequence[BlockHash]) -> list[BlockId]:
        """The blocks of the longest cached prefix; not held yet."""
        return self._prefixes.longest(hashes)

    def check_integrity(self, holders: Iterable[Iterable[BlockId]]) -> None:
        """Every reference is accounted for by `holders` (each a table of blocks), every block by one of the sets."""
        expected = [0] * self.num_blocks
        for table in holders:
            for block in table:
                expected[block] += 1
        wrong = () if expected == self._references else zip(self._references, expected, strict=True)
        for index, (references, num_holders) in enumerate(wrong):
            assert references == num_holders, f"block {index} has {references} references, {num_holders} holders"
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & cached, "a block is free and cached"
        held = {block for block, count in enumerate(self._references) if count}
        assert not held & (free | cached), "a held block can be given out"
        assert len(free) + len(cached) + len(held) == self.num_blocks, "a block is in no set"
        published = self._prefixes.blocks
        assert cached <= published, "a cached block holds no known prefix"
        assert not free & published, "a free block holds a known prefix"
        assert set(self._unsaved) == cached - self._saved, "a cached block is lost to the tier below"
        self._prefixes.check_integrity()
