"""How long a round takes lately, for those who have to tell a busy rank from one that stands still."""

from __future__ import annotations

import time
from collections.abc import Callable

# What was seen within this time counts; one window earlier too. So one bad minute is forgotten after two.
WINDOW_S = 60.0
# A round of a few prompt tokens says little of a full one: its time is scaled up by no more than this.
MAX_SCALE = 8.0


class Pace:
    """The longest round of the last one or two windows in which there were rounds: idle time makes nothing forgotten.

    warm_up_s: the longest round of the warm-up, which counts until a round of a good part of a full one was seen, or
    it is as old as any. full_round: prompt tokens of a full round. A shorter round counts for what a full one would
    have taken at its pace, so that the first long prompt after many short ones doesn't come as a surprise.
    """

    def __init__(
        self, warm_up_s: float = 0.0, full_round: int = 1, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._full_round = full_round
        self._clock = clock
        self._recent_s, self._before_s = warm_up_s, 0.0
        self._turns_s = clock() + WINDOW_S
        self._is_measured = False
        self._is_excused = False

    @property
    def longest_s(self) -> float:
        return max(self._recent_s, self._before_s)

    def observe(self, num_prompt_tokens: int, elapsed_s: float) -> None:
        """A round took elapsed_s seconds. num_prompt_tokens: 0 for one that only decoded."""
        if self._is_excused:
            self._is_excused = False
            return
        if (now_s := self._clock()) >= self._turns_s:
            self._before_s, self._recent_s = self._recent_s, 0.0
            self._turns_s = now_s + WINDOW_S
        scale = max(1.0, self._full_round / num_prompt_tokens) if num_prompt_tokens else 1.0
        if not self._is_measured and num_prompt_tokens and scale <= MAX_SCALE:
            self._is_measured = True
            self._recent_s = self._before_s = 0.0
        self._recent_s = max(self._recent_s, elapsed_s * min(scale, MAX_SCALE))

    def excuse(self) -> None:
        """The process was stopped by a signal and goes on: the time of its present round says nothing of its pace."""
        self._is_excused = True
