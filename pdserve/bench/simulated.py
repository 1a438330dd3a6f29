"""The same requests in the simulator, heard as a client hears them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pdserve.bench.listening import Heard
from pdserve.errors import InternalError
from pdserve.sim.deployment import Deployment
from pdserve.sim.observer import SimRound, Transferred
from pdserve.sim.simulation import Simulation
from pdserve.sim.workload import SimRequest


@dataclass(slots=True)
class Listener:
    """An Observer that keeps every token's arrival, and how long each rank's rounds took together."""

    arrivals_s: dict[int, list[float]] = field(default_factory=dict)
    busy_s: dict[tuple[str, int, int], float] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)

    def on_tokens(self, time_s: float, numbers: Sequence[int]) -> None:
        for number in numbers:
            self.arrivals_s.setdefault(number, []).append(time_s)

    def on_end(self, request: SimRequest, time_s: float, num_cached_tokens: int) -> None:
        """Its last token was told already."""

    def on_failed(self, request: SimRequest, time_s: float, reason: str) -> None:
        self.failed[request.number] = reason

    def on_round(self, record: SimRound) -> None:
        place = (record.kind, record.node, record.rank)
        self.busy_s[place] = self.busy_s.get(place, 0.0) + record.busy_s

    def on_transfer(self, record: Transferred) -> None:
        """Seen in the gaps of the answers."""


@dataclass(frozen=True, slots=True)
class Known:
    """A workload of requests that are all known beforehand, in order of arrival."""

    requests: Sequence[SimRequest]

    def arrivals(self) -> Iterator[SimRequest]:
        return iter(self.requests)

    def after(self, request: SimRequest, now_s: float) -> SimRequest | None:
        return None


def simulate(deployment: Deployment, requests: Sequence[SimRequest], seed: int) -> Listener:
    """Raises InternalError where a request failed: a measurement of the others would compare unlike things."""
    listener = Listener()
    Simulation(deployment.topology(), deployment.costs, Known(requests), listener, seed).run()
    for number, reason in listener.failed.items():
        raise InternalError(f"request {number} failed in the simulation: {reason}")
    return listener


def hear_simulated(deployment: Deployment, requests: Sequence[SimRequest], seed: int) -> list[Heard]:
    """Every answer, in the order of `requests`."""
    arrivals_s = simulate(deployment, requests, seed).arrivals_s
    return [Heard(request.number, request.arrival_s, tuple(arrivals_s[request.number])) for request in requests]
