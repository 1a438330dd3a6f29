"""Simulations of candidate deployments, each run once, within a budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pdserve.sim.deployment import Deployment
from pdserve.sim.goals import Measures
from pdserve.sim.report import Report, Slo
from pdserve.sim.simulation import Simulation
from pdserve.sim.traffic import Sample, Traffic
from pdserve.sim.workload import Workload

# (simulations run, what is going on)
OnProgress = Callable[[int, str], None]


def silent(num_run: int, stage: str) -> None:
    """Tells nobody."""


def measure(deployment: Deployment, workload: Workload, slo: Slo, seed: int) -> Measures:
    """One simulation. A figure that nothing was counted for is 0."""
    report = Report(slo)
    Simulation(deployment.topology(), deployment.costs, workload, report, seed).run()
    itl, ttft = report.itl, report.ttft
    return Measures(
        num_ranks=deployment.num_ranks,
        itl_p99_s=itl.p99 or 0.0,
        worst_gap_s=itl.max or 0.0,
        ttft_p50_s=ttft.p50 or 0.0,
        ttft_p99_s=ttft.p99 or 0.0,
        output_tokens_per_s=report.per_s(report.num_output_tokens),
        requests_per_s=report.per_s(report.num_finished),
        goodput_per_s=report.goodput_per_s,
        met_share=report.met_share,
        failed_share=1 - report.num_finished / report.num_requests if report.num_requests else 0.0,
    )


class Trials:
    """budget: simulations after which `is_spent`; what is asked for is run even then."""

    def __init__(self, traffic: Traffic, slo: Slo, budget: int, on_progress: OnProgress = silent) -> None:
        self._traffic = traffic
        self._slo = slo
        self._budget = budget
        self._on_progress = on_progress
        self._known: dict[tuple[Deployment, Sample], Measures] = {}
        self.stage = ""
        self.num_run = 0

    @property
    def is_spent(self) -> bool:
        return self.num_run >= self._budget

    def runs(self, deployment: Deployment, samples: Sequence[Sample]) -> list[Measures]:
        """Its measures under each sample of the traffic."""
        return [self._run(deployment, sample) for sample in samples]

    def knows(self, deployment: Deployment, samples: Sequence[Sample]) -> bool:
        """Whether its runs are there already."""
        return all((deployment, sample) in self._known for sample in samples)

    def _run(self, deployment: Deployment, sample: Sample) -> Measures:
        key = (deployment, sample)
        if key not in self._known:
            self._on_progress(self.num_run, self.stage)
            self._known[key] = measure(deployment, self._traffic.workload(sample), self._slo, sample.seed)
            self.num_run += 1
        return self._known[key]
