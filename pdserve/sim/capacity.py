"""How much a deployment can take: what it finishes a second while more always waits, as simulated."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.sim.arrivals import OpenLoop, Shapes
from pdserve.sim.deployment import Deployment
from pdserve.sim.observer import SimRound, Transferred
from pdserve.sim.simulation import Simulation
from pdserve.sim.workload import SimRequest

# All at once, as far as a round can tell.
FLOOD_PER_S = 1e9
REQUESTS_A_SLOT = 4
MIN_REQUESTS, MAX_REQUESTS = 100, 2_000
# The last answers leave slots empty, which no steady load would.
STEADY_SHARE = 0.8


class _EndTimes:
    """An Observer that notes when answers end."""

    def __init__(self) -> None:
        self.ends_s: list[float] = []

    def on_tokens(self, time_s: float, numbers: Sequence[int]) -> None:
        """Not counted."""

    def on_end(self, request: SimRequest, time_s: float, num_cached_tokens: int) -> None:
        self.ends_s.append(time_s)

    def on_failed(self, request: SimRequest, time_s: float, reason: str) -> None:
        """Takes no capacity."""

    def on_round(self, record: SimRound) -> None:
        """Not counted."""

    def on_transfer(self, record: Transferred) -> None:
        """Not counted."""


def capacity_per_s(deployment: Deployment, shapes: Shapes, seed: int = 0) -> float:
    """Requests of these lengths a second. Fused nodes don't know of each other, so one is simulated for all."""
    one = deployment.replace(num_nodes=1)
    num_requests = min(MAX_REQUESTS, max(MIN_REQUESTS, REQUESTS_A_SLOT * deployment.max_num_seqs))
    seen = _EndTimes()
    Simulation(one.topology(), one.costs, OpenLoop(FLOOD_PER_S, num_requests, shapes, seed=seed), seen, seed).run()
    num_steady = int(len(seen.ends_s) * STEADY_SHARE)
    return deployment.num_nodes * num_steady / seen.ends_s[num_steady - 1] if num_steady else 0.0
