"""Virtual time: what happens when, in the order of time and, at one time, in the order in which it was asked for."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

Action = Callable[[], None]

MESSAGES, ROUNDS = 0, 1


class Clock:
    """now_s starts at 0 and never goes back. Rounds end after all messages of the same time have come."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, int, Action]] = []
        self._numbers = count()

    def at(self, time_s: float, action: Action) -> None:
        """A message arrives, or something else happens that rounds of the same time see."""
        self._push(time_s, MESSAGES, action)

    def after(self, seconds: float, action: Action) -> None:
        self._push(self.now_s + seconds, MESSAGES, action)

    def after_messages(self, seconds: float, action: Action) -> None:
        """A round begins or ends then, with all that came until then."""
        self._push(self.now_s + seconds, ROUNDS, action)

    def _push(self, time_s: float, turn: int, action: Action) -> None:
        assert time_s >= self.now_s, f"{time_s} s is before {self.now_s} s"
        heapq.heappush(self._events, (time_s, turn, next(self._numbers), action))

    def run(self, until_s: float | None = None) -> bool:
        """Everything up to and including until_s; False if more would come after it."""
        events = self._events
        while events:
            if until_s is not None and events[0][0] > until_s:
                self.now_s = until_s
                return False
            self.now_s, _, _, action = heapq.heappop(events)
            action()
        return True
