"""How many threads compute a round: all of a rank's, or one while others compute on the same cores."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

# Of the threads' time, the share that they were off their cores. A front and 32 clients on the same two cores take a
# sixth, a process that only computes a fifth, two of them half; one thread is the faster from about a quarter on. When
# it computes alone it loses a fiftieth to all but the last, and a quarter to that (docs/figures.md).
CONTENDED, FREE = 0.25, 0.05
# What is older hardly counts.
MEMORY_S = 0.1
# One thread computes for so long at least; twice as long each time that the cores turn out not to be free, up to the
# second. They were free when the team has computed for as long as one thread had before.
FIRST_HOLD_S, LONGEST_HOLD_S = 0.5, 8.0


class Team:
    """A rank's threads. Of two that have to meet some hundreds of times a round, one that is off its core stops both.

    Beside a process that computes on every core they get a twentieth done of what they would alone; one thread, which
    waits for nobody, gets half.
    """

    def __init__(self, size: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.size = size
        self._clock = clock
        self._is_alone = False
        self._since_s = -math.inf
        self._hold_s = 0.0
        self._away = 0.0

    @property
    def num_threads(self) -> int:
        """That compute the next round whose threads meet often."""
        return 1 if self._is_alone else self.size

    def note(self, seconds: float, seconds_away: float) -> None:
        """A round by `num_threads` took so long; how long they were off their cores meanwhile, added up."""
        if self.size == 1 or seconds <= 0.0:
            return
        share = seconds_away / (seconds * self.num_threads)
        self._away += (share - self._away) * -math.expm1(-seconds / MEMORY_S)
        if self._is_alone:
            self._meet_again()
        elif self._away > CONTENDED:
            self._go_alone()

    def _go_alone(self) -> None:
        now_s = self._clock()
        is_relapse = now_s - self._since_s < self._hold_s
        self._hold_s = min(2 * self._hold_s, LONGEST_HOLD_S) if is_relapse else FIRST_HOLD_S
        self._is_alone, self._since_s = True, now_s
        if not is_relapse:
            log.warning(
                "other processes compute on this rank's cores: its %d threads were off them for %.0f %% of their time, "
                "decoding takes one until they are free; cores of its own, or fewer --num-threads, prevent that",
                self.size,
                100 * self._away,
            )

    def _meet_again(self) -> None:
        now_s = self._clock()
        if now_s - self._since_s >= self._hold_s and self._away < FREE:
            self._is_alone, self._since_s = False, now_s
