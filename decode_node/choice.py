"""Which of several peers prefills a prompt: the one where it is through first, as far as can be known from here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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
