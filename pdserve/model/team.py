"""How many threads compute a round: all of a rank's, or one while others compute on the same cores."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger(__name__)

# Of the threads' time, the share that they were off their cores. A front and 32 clients on the same two cores take a
# sixth, a process that only computes a fifth, two of them half; one thread is the faster from about a quarter on.
CONTENDED = 0.25
# In one round, added up: as decoder.c has it, which then leaves the round's rest to one thread.
MAX_SECONDS_AWAY = 0.02
# Of each core that the others would need, the share that must be idle before they compute again. A front and its
# clients leave it more, a process that computes nothing.
FREE = 0.35
# What is older hardly counts.
MEMORY_S = 0.1
# One thread computes for so long at least; twice as long each time that this soon turns out to be too short, up to the
# second.
FIRST_HOLD_S, LONGEST_HOLD_S = 0.5, 8.0


def idle_seconds() -> float:
    """That the cores this process may run on have been idle for, added up, since the machine started."""
    mine = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    lines = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
    return sum(int(line[4]) for line in lines if line[0] in mine) / os.sysconf("SC_CLK_TCK")


class Team:
    """A rank's threads. Of two that have to meet some hundreds of times a round, one that is off its core stops both.

    Beside processes that compute on every core they get a twentieth done of what they would alone, and stand still for
    seconds where the system shares cores by groups of processes; one thread, which waits for nobody, gets half done.
    """

    def __init__(
        self, size: int, clock: Callable[[], float] = time.monotonic, idle_seconds: Callable[[], float] = idle_seconds
    ) -> None:
        self.size = size
        self._clock = clock
        self._idle_seconds = idle_seconds
        self._is_alone = False
        # Since when it is so, and what the cores had been idle for by then.
        self._since_s = -math.inf
        self._idle_s = 0.0
        self._hold_s = 0.0
        self._away = 0.0

    @property
    def num_threads(self) -> int:
        """That compute the next round whose threads meet often."""
        return 1 if self._is_alone else self.size

    def note(self, seconds: float, seconds_away: float) -> None:
        """A round by `num_threads` took so long; how long they were off their cores meanwhile, added up."""
        if self.size == 1:
            return
        if self._is_alone:
            self._meet_if_free()
            return
        share = seconds_away / (max(seconds, 1e-9) * self.size)
        self._away += (share - self._away) * -math.expm1(-seconds / MEMORY_S)
        if self._away > CONTENDED or seconds_away > MAX_SECONDS_AWAY:
            self._go_alone(share)

    def _go_alone(self, share: float) -> None:
        is_relapse = self._clock() - self._since_s < self._hold_s
        self._hold_s = min(2 * self._hold_s, LONGEST_HOLD_S) if is_relapse else FIRST_HOLD_S
        self._turn(is_alone=True)
        if not is_relapse:
            log.warning(
                "other processes compute on this rank's cores: its %d threads were off them for %.0f %% of a round, "
                "decoding takes one until they are free; cores of its own, or fewer --num-threads, prevent that",
                self.size,
                100 * share,
            )

    def _meet_if_free(self) -> None:
        seconds = self._clock() - self._since_s
        if seconds < self._hold_s:
            return
        idle = (self._idle_seconds() - self._idle_s) / seconds
        self._turn(is_alone=idle < FREE * (self.size - 1))

    def _turn(self, *, is_alone: bool) -> None:
        """Begins another stretch, of the same or of the other kind."""
        self._is_alone, self._away = is_alone, 0.0
        self._since_s, self._idle_s = self._clock(), self._idle_seconds()
