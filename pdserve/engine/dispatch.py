"""Which data-parallel rank a request goes to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Protocol

from pdserve.engine.prefix_memory import PrefixMemory, prefix_hashes
from pdserve.request import TokenRequest


class Candidate(Protocol):
    """What the front knows of a rank without asking it."""

    @property
    def number(self) -> int:
        """Among the data-parallel ranks, from 0."""

    @property
    def num_live(self) -> int:
        """Requests it runs or has queued."""

    @property
    def num_held_tokens(self) -> int:
        """Prompt and output tokens of those so far: what its KV holds, or will."""


# The number of the rank that gets the request. There is at least one candidate; ranks with full queues are none.
Dispatch = Callable[[TokenRequest, Sequence[Candidate]], int]


def shortest_queue(request: TokenRequest, candidates: Sequence[Candidate]) -> int:
    """Fewest requests, then fewest tokens, then the first."""
    return min(candidates, key=lambda it: (it.num_live, it.num_held_tokens, it.number)).number


def least_kv(request: TokenRequest, candidates: Sequence[Candidate]) -> int:
    """Fewest tokens held, then fewest requests, then the first."""
    return min(candidates, key=lambda it: (it.num_held_tokens, it.num_live, it.number)).number


class RoundRobin:
    """Each rank in turn."""

    def __init__(self) -> None:
        self._turns = count()

    def __call__(self, request: TokenRequest, candidates: Sequence[Candidate]) -> int:
        return candidates[next(self._turns) % len(candidates)].number


class PrefixAffinity:
    """Fewest tokens held, less those of this prompt that are in the rank's prefix cache; then the shortest queue.

    So the longest known prefix is preferred, unless that rank has more on its hands than the hit saves.
    """

    def __init__(self, num_ranks: int, num_blocks: int, block_size: int) -> None:
        self._memories = [PrefixMemory(num_blocks) for _ in range(num_ranks)]
        self._block_size = block_size

    def __call__(self, request: TokenRequest, candidates: Sequence[Candidate]) -> int:
        hashes = prefix_hashes(request.prompt, self._block_size)

        def cost(it: Candidate) -> tuple[int, int, int]:
            known = self._memories[it.number].num_known(hashes) * self._block_size
            return it.num_held_tokens - known, it.num_live, it.number

        chosen = min(candidates, key=cost).number
        self._memories[chosen].remember(hashes)
        return chosen
