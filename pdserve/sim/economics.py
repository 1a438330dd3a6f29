"""What the prefill gate of a group gives and costs: throughput, gaps and first tokens over its intervals and the fill.

Users who ask, read the answer and ask again: there, what a policy gains is throughput, and what it costs is waiting,
where callers of a fixed rate would pile up as soon as a policy fell behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pdserve.sim.arrivals import ClosedLoop
from pdserve.sim.deployment import Deployment
from pdserve.sim.goals import Measures
from pdserve.sim.presets import PRESETS
from pdserve.sim.report import Slo
from pdserve.sim.trials import measure

ATTEMPT_INTERVALS = (1, 2, 4, 8, 16, 32)
ANY_INTERVALS = (8, 32, 128)
FILLS = (None, "auto")


@dataclass(frozen=True, slots=True)
class Users:
    """of_rank: users for each rank; below its slots, as a gate chooses only where slots are free. think_s: on average,
    before each question."""

    of_rank: int = 24
    think_s: float = 1.0
    num_requests: int = 800


@dataclass(frozen=True, slots=True)
class Point:
    """One deployment's figures. attempt_interval None = no gate."""

    attempt_interval: int | None
    any_interval: int | None
    fill: int | str | None
    measures: Measures

    def figures(self) -> dict[str, Any]:
        own = {
            "prefill_attempt_interval": self.attempt_interval,
            "prefill_any_attempt_interval": self.any_interval,
            "prefill_fill_tokens": self.fill,
        }
        return own | asdict(self.measures)


def grid(deployment: Deployment, fills: Sequence[int | str | None] = FILLS) -> Iterator[Deployment]:
    """The deployment without a policy, then every gate of the grid."""
    plain = deployment.without_policies()
    yield plain
    for fill in fills:
        for any_interval in ANY_INTERVALS:
            for attempt in ATTEMPT_INTERVALS:
                if attempt <= any_interval:
                    yield plain.replace(
                        prefill_attempt_interval=attempt,
                        prefill_any_attempt_interval=any_interval,
                        prefill_fill_tokens=fill,
                    )


def sweep(
    deployments: Sequence[Deployment], users: Users, seed: int, on_progress: Callable[[int], None]
) -> list[Point]:
    """Each under the same users. on_progress: told how many are done."""
    points = []
    for done, one in enumerate(deployments):
        on_progress(done)
        points.append(_point(one, users, seed))
    return points


def _point(deployment: Deployment, users: Users, seed: int) -> Point:
    shapes = PRESETS["chat"].shapes(deployment.longest_request)
    num_users = users.of_rank * deployment.num_ranks
    workload = ClosedLoop(num_users, users.num_requests, shapes, users.think_s, seed)
    return Point(
        deployment.prefill_attempt_interval,
        deployment.prefill_any_attempt_interval,
        deployment.prefill_fill_tokens,
        measure(deployment, workload, Slo(), seed),
    )
