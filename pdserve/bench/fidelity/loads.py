"""What is asked of the real nodes and of the simulator: the same requests at the same moments.

Each load is scaled so that the busiest rank of either deployment would be busy for a share of the time, as the
simulator says of requests that come at that rate.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.bench.listening import Call, unique_prompt
from pdserve.bench.policy_runs import Model
from pdserve.bench.simulated import simulate
from pdserve.sim.arrivals import MixedShapes, OpenLoop, Shape, Shapes
from pdserve.sim.deployment import Deployment
from pdserve.sim.lengths import Lognormal, Uniform
from pdserve.sim.workload import SimRequest

BUSY_SHARE = 0.6
NUM_HALVINGS = 7
RATES_PER_S = (0.02, 20.0)


@dataclass(frozen=True, slots=True)
class Load:
    """One kind of traffic. burstiness: as of sim.arrivals.OpenLoop, 1 is Poisson."""

    name: str
    shapes: Shapes
    burstiness: float = 1.0
    seed: int = 0

    def requests(self, rate_per_s: float, arrivals_s: float) -> list[SimRequest]:
        """Those that come within arrivals_s, at least one."""
        number = max(1, round(rate_per_s * arrivals_s))
        return list(OpenLoop(rate_per_s, number, self.shapes, self.burstiness, self.seed).arrivals())


LOADS = (
    Load("chat", Shape(Lognormal(120, 0.7, 400), Lognormal(40, 0.6, 120)), seed=11),
    Load(
        "long",
        MixedShapes(
            ((0.7, Shape(Uniform(40, 300), Uniform(20, 60))), (0.3, Shape(Uniform(1000, 3000), Uniform(8, 40))))
        ),
        seed=12,
    ),
    Load("burst", Shape(Lognormal(200, 0.6, 700), Uniform(16, 64)), burstiness=0.3, seed=13),
)


def rate_for(load: Load, deployments: Sequence[Deployment], arrivals_s: float) -> float:
    """Requests a second at which the busiest rank of any deployment is busy for BUSY_SHARE, nearly.

    More requests than the measurement has are simulated, so that the share is of the rate and not of this one sample.
    """
    low, high = RATES_PER_S
    long = dataclasses.replace(load, seed=load.seed + 1000)
    for _ in range(NUM_HALVINGS):
        middle = (low * high) ** 0.5
        if max(busy_share(deployment, long, middle, 5 * arrivals_s) for deployment in deployments) > BUSY_SHARE:
            high = middle
        else:
            low = middle
    return low


def busy_share(deployment: Deployment, load: Load, rate_per_s: float, arrivals_s: float) -> float:
    """Of the time in which requests come, the busiest rank's rounds take this share; more than 1 where they pile up."""
    listener = simulate(deployment, load.requests(rate_per_s, arrivals_s), seed=0)
    return max(listener.busy_s.values()) / arrivals_s


def calls(requests: Sequence[SimRequest], model: Model, name: str, repeat: int) -> list[Call]:
    """The same requests for real nodes; prompts of another repeat are others, as those would be cached."""
    return [
        Call(
            request.number,
            unique_prompt(model.text, request.num_prompt_tokens, f"{name} {repeat} {request.number}"),
            request.num_output_tokens,
            request.arrival_s,
        )
        for request in requests
    ]
