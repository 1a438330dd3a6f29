"""How fast the simulator is: one fused group of 64 ranks, and a split deployment of 1,000, each on one core.

python -m pdserve.bench.simulator_speed [--only fused|split] [--scale 0.1]
"""

from __future__ import annotations

import argparse
import resource
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from time import process_time

from rich.console import Console
from rich.table import Table

from pdserve.scheduler.config import SchedulerConfig
from pdserve.sim.costs import CostModel, FrontCosts, HandoffCosts, RankCosts, TierCosts
from pdserve.sim.observer import SimRound, Transferred
from pdserve.sim.simulation import Simulation
from pdserve.sim.topology import Fused, GateSpec, GroupSpec, Split, Topology
from pdserve.sim.totals import Totals
from pdserve.sim.workload import SimRequest

# Of the size of an 8B model on one large accelerator. What is timed here is the simulator, for which any will do.
RANK = RankCosts(
    prefill_fixed_s=6e-3,
    prefill_token_s=40e-6,
    prefill_token_context_s=2e-10,
    decode_fixed_s=8e-3,
    decode_row_s=2e-5,
    decode_context_s=1e-8,
)
COSTS = CostModel(
    name="made-up",
    source="for timing the simulator only",
    block_size=16,
    block_bytes=2 << 20,
    fused=RANK,
    prefill=RANK,
    decode=RANK,
    handoff=HandoffCosts(latency_s=5e-4, read_s=2e-4, bytes_per_s=2e10),
    tiers=TierCosts(host_bytes_per_s=2e10, storage_bytes_per_s=2e9, storage_latency_s=1e-3),
    front=FrontCosts(arrival_s=1e-3, delivery_s=1e-3),
)
SCHEDULER = SchedulerConfig(
    num_blocks=8192, block_size=16, max_batch_size=64, max_scheduled_tokens=8192, max_model_len=8192
)


class Arrivals:
    """An open loop: num_requests a time apart that is drawn, with prompts and answers around 256 and 64 tokens."""

    def __init__(self, num_requests: int, requests_per_s: float) -> None:
        self._num_requests = num_requests
        self._requests_per_s = requests_per_s

    def arrivals(self) -> Iterator[SimRequest]:
        random, now_s = Random(1), 0.0
        for number in range(self._num_requests):
            now_s += random.expovariate(self._requests_per_s)
            yield SimRequest(number, now_s, random.randint(64, 448), random.randint(16, 112))

    def after(self, request: SimRequest, now_s: float) -> SimRequest | None:
        return None


@dataclass(slots=True)
class Counting:
    """The least that listens."""

    num_tokens: int = 0

    def on_tokens(self, time_s: float, numbers: Sequence[int]) -> None:
        self.num_tokens += len(numbers)

    def on_end(self, request: SimRequest, time_s: float, num_cached_tokens: int) -> None:
        pass

    def on_failed(self, request: SimRequest, time_s: float, reason: str) -> None:
        pass

    def on_round(self, record: SimRound) -> None:
        pass

    def on_transfer(self, record: Transferred) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Case:
    """A deployment and how much it is asked."""

    name: str
    topology: Topology
    num_requests: int
    requests_per_s: float


GATED = SchedulerConfig(
    num_blocks=8192,
    block_size=16,
    max_batch_size=64,
    max_scheduled_tokens=8192,
    max_model_len=8192,
    prefill_watermark=9,
)
CASES = (
    Case("fused", Fused(GroupSpec(64, GATED, GateSpec(4, 16))), 100_000, 700.0),
    Case("split", Split(GroupSpec(1, SCHEDULER), GroupSpec(1, SCHEDULER), 400, 600), 20_000, 10_000.0),
)


@dataclass(frozen=True, slots=True)
class Timed:
    """cpu_s: of the process, which has one thread. peak_bytes: of its memory since it started."""

    case: Case
    totals: Totals
    num_tokens: int
    cpu_s: float
    peak_bytes: int


def measure(case: Case, scale: float = 1.0) -> Timed:
    """One run, of `scale` times its requests."""
    observer = Counting()
    workload = Arrivals(max(1, round(case.num_requests * scale)), case.requests_per_s)
    started = process_time()
    totals = Simulation(case.topology, COSTS, workload, observer).run()
    cpu_s = process_time() - started
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Timed(case, totals, observer.num_tokens, cpu_s, peak_bytes)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pdserve.bench.simulator_speed", description=__doc__)
    parser.add_argument("--only", choices=[case.name for case in CASES], help="one of the two")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the requests")
    options = parser.parse_args(arguments)
    table = Table(
        "case", "requests", "tokens", "rank rounds", "simulated, s", "CPU s", "requests / CPU s", "peak MB", "peak live"
    )
    for case in CASES:
        if options.only in (None, case.name):
            table.add_row(*_cells(measure(case, options.scale)))
    Console(width=140).print(table)
    return 0


def _cells(timed: Timed) -> list[str]:
    totals = timed.totals
    return [
        timed.case.name,
        f"{totals.num_ended:,}",
        f"{timed.num_tokens:,}",
        f"{totals.counters['rounds']:,}",
        f"{totals.seconds:.1f}",
        f"{timed.cpu_s:.1f}",
        f"{totals.num_ended / timed.cpu_s:,.0f}",
        f"{timed.peak_bytes / 1e6:,.0f}",
        f"{totals.peak_live:,}",
    ]


if __name__ == "__main__":
    sys.exit(main())
