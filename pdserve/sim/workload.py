"""What is asked of a simulated deployment: requests with times and lengths."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class SimRequest:
    """number: unique, counts up. arrival_s: when its client calls.

    hash_ids: names of its prompt's pieces of hash_block_tokens tokens each, equal names = an equal beginning, as in a
    trace; empty = a prompt like no other.
    """

    number: int
    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    hash_ids: tuple[int, ...] = ()
    hash_block_tokens: int = 512


class Workload(Protocol):
    """Open loops yield all requests; a closed loop yields its first ones and makes the others as answers end."""

    def arrivals(self) -> Iterator[SimRequest]:
        """In order of arrival_s; read no further ahead than the clock has come, so that memory is bounded."""

    def after(self, request: SimRequest, now_s: float) -> SimRequest | None:
        """What the client of `request`, whose answer has just ended, asks next; arrival_s >= now_s."""
