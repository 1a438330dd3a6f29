"""Which of several peers prefills a prompt: the one where it is through first, as far as can be known from here."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

# A prompt's first blocks decide: beyond this many the hit no longer changes the choice, and hashing has its cost.
MAX_PREFIX_BLOCKS = 128
# What is remembered of one peer, at most; less where its pool is smaller.
MAX_REMEMBERED_BLOCKS = 65_536


@dataclass(frozen=True, slots=True)
class Candidate:
    """A peer as the choice sees it.

    num_queued_tokens: prompt tokens it was given and has not computed. num_known_tokens: of this prompt, in its prefix
    cache. has_room: its free blocks hold the prompt, so that it need not wait for others to leave.
    """

    num_queued_tokens: int
    num_known_tokens: int = 0
    has_room: bool = True


def choose(candidates: Sequence[Candidate]) -> int:
    """The index of the best candidate; there is at least one.

    Among those with room (all, where none has any) the fewest tokens to compute before this prompt is through:
    queued ones and, of this prompt, those not in the prefix cache. So the peer with the longest known prefix is
    preferred, unless its queue exceeds another's by more tokens than the longer hit saves. Equal ones: the longer hit,
    then the first.

    >>> choose([Candidate(1000, num_known_tokens=600), Candidate(500)])  # 600 saved, 500 more to wait for
    0
    >>> choose([Candidate(1000, num_known_tokens=600), Candidate(300)])  # 600 saved, 700 more to wait for
    1
    """

    def cost(number: int) -> tuple[bool, int, int]:
        it = candidates[number]
        return not it.has_room, it.num_queued_tokens - it.num_known_tokens, -it.num_known_tokens

    return min(range(len(candidates)), key=cost)


def prefix_hashes(prompt: Sequence[int], block_size: int) -> list[bytes]:
    """A name for each whole block of the prompt's beginning, which speaks for all tokens before it too."""
    hashes: list[bytes] = []
    name = b""
    for end in range(block_size, min(len(prompt), MAX_PREFIX_BLOCKS * block_size) + 1, block_size):
        name = blake2b(name + array("q", prompt[end - block_size : end]).tobytes(), digest_size=16).digest()
        hashes.append(name)
    return hashes


class PrefixMemory:
    """What a peer computed lately: a guess at its prefix cache, never larger than that and forgotten in the same order.

    It may be wrong both ways, which costs a little time and nothing else.
    """

    def __init__(self, num_blocks: int) -> None:
        self._max_blocks = min(num_blocks, MAX_REMEMBERED_BLOCKS)
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def num_known(self, hashes: Sequence[bytes]) -> int:
        """Whole blocks of the prompt's beginning that the peer probably has."""
        return next((number for number, name in enumerate(hashes) if name not in self._blocks), len(hashes))

    def remember(self, hashes: Sequence[bytes]) -> None:
        """The peer is to compute, or has, these. Later blocks are forgotten before their parents."""
        for name in reversed(hashes):
            self._blocks[name] = None
            self._blocks.move_to_end(name)
        while len(self._blocks) > self._max_blocks:
            self._blocks.popitem(last=False)
