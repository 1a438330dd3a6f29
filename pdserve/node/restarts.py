"""How often, and how soon, a rank that died is followed by another one."""

from __future__ import annotations

from collections import deque

FIRST_DELAY_S = 1.0
MAX_DELAY_S = 30.0
# More deaths than this within the window, and the next rank would die as well: a person has to look.
MAX_DEATHS = 5
WINDOW_S = 60.0


class Restarts:
    """Delays of 1, 2, 4 … 30 s while ranks die young; one that lived for a whole window starts that over.

    Times are seconds of any one monotonic clock.
    """

    def __init__(self) -> None:
        self._deaths: deque[float] = deque()
        self._num_young = 0

    def delay_s(self, born_s: float, died_s: float) -> float | None:
        """Seconds to wait after this death; None when there were more than MAX_DEATHS within WINDOW_S."""
        self._deaths.append(died_s)
        while self._deaths[0] <= died_s - WINDOW_S:
            self._deaths.popleft()
        if len(self._deaths) > MAX_DEATHS:
            return None
        self._num_young = 1 if died_s - born_s >= WINDOW_S else self._num_young + 1
        return min(MAX_DELAY_S, FIRST_DELAY_S * 2.0 ** (self._num_young - 1))
