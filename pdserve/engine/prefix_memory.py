"""What others have in their prefix caches, guessed from what they were given to compute."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

# A prompt's first blocks decide: beyond this many the hit no longer changes a choice, and hashing has its cost.
MAX_PREFIX_BLOCKS = 128
# What is remembered of one pool, at most; less where the pool is smaller.
MAX_REMEMBERED_BLOCKS = 65_536


def prefix_hashes(prompt: Sequence[int], block_size: int) -> list[bytes]:
    """A name for each whole block of the prompt's beginning, which speaks for all tokens before it too."""
    hashes: list[bytes] = []
    name = b""
    for end in range(block_size, min(len(prompt), MAX_PREFIX_BLOCKS * block_size) + 1, block_size):
        name = blake2b(name + array("q", prompt[end - block_size : end]).tobytes(), digest_size=16).digest()
        hashes.append(name)
    return hashes


class PrefixMemory:
    """What was computed lately: a guess at a prefix cache, never larger than that and forgotten in the same order.

    It may be wrong both ways, which costs a little time and nothing else.
    """

    def __init__(self, num_blocks: int) -> None:
        self._max_blocks = min(num_blocks, MAX_REMEMBERED_BLOCKS)
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def num_known(self, hashes: Sequence[bytes]) -> int:
        """Whole blocks of the prompt's beginning that are probably there."""
        return next((number for number, name in enumerate(hashes) if name not in self._blocks), len(hashes))

    def remember(self, hashes: Sequence[bytes]) -> None:
        """These are computed, or will be. Later blocks are forgotten before their parents."""
        for name in reversed(hashes):
            self._blocks[name] = None
            self._blocks.move_to_end(name)
        while len(self._blocks) > self._max_blocks:
            self._blocks.popitem(last=False)
