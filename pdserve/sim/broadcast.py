"""One simulation, several listeners."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.sim.observer import Observer, SimRound, Transferred
from pdserve.sim.workload import SimRequest


class Broadcast:
    """Tells each of its observers everything, in their order."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = tuple(observers)

    def on_tokens(self, time_s: float, numbers: Sequence[int]) -> None:
        for observer in self._observers:
            observer.on_tokens(time_s, numbers)

    def on_end(self, request: SimRequest, time_s: float, num_cached_tokens: int) -> None:
        for observer in self._observers:
            observer.on_end(request, time_s, num_cached_tokens)

    def on_failed(self, request: SimRequest, time_s: float, reason: str) -> None:
        for observer in self._observers:
            observer.on_failed(request, time_s, reason)

    def on_round(self, record: SimRound) -> None:
        for observer in self._observers:
            observer.on_round(record)

    def on_transfer(self, record: Transferred) -> None:
        for observer in self._observers:
            observer.on_transfer(record)
