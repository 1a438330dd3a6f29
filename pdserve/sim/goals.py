"""What a deployment is tuned for: which of two is better, by figures of several simulations of each."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pdserve.sim.report import Slo

# Smaller is better; compared from the left.
Loss = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Measures:
    """One simulation's figures. met_share: of all requests, those that met the SLO."""

    num_ranks: int
    itl_p99_s: float
    worst_gap_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    output_tokens_per_s: float
    requests_per_s: float
    goodput_per_s: float
    met_share: float
    failed_share: float


@dataclass(frozen=True, slots=True)
class Figure:
    """A field of Measures that decides. is_better_low: whether less of it is better."""

    field: str
    is_better_low: bool

    def of(self, measures: Measures) -> float:
        return float(getattr(measures, self.field))


ITL_P99, TTFT_P99 = Figure("itl_p99_s", True), Figure("ttft_p99_s", True)
GOODPUT, MET_SHARE, RANKS = Figure("goodput_per_s", False), Figure("met_share", False), Figure("num_ranks", True)


class Goal(Protocol):
    """What to tune for. slo: what goodput is counted by."""

    @property
    def slo(self) -> Slo: ...

    @property
    def text(self) -> str:
        """The goal in a few words."""

    def loss(self, runs: Sequence[Measures]) -> Loss:
        """Of one deployment, over its simulations."""

    def is_met(self, measures: Measures) -> bool:
        """Whether this simulation keeps what the goal promises."""

    def deciding(self, default: Sequence[Measures]) -> Figure:
        """The figure that a pick has to better, given what the default does."""


@dataclass(frozen=True, slots=True)
class ItlGoal:
    """p99 of ITL within a limit, in the worst of the simulations; among those, the least p99 of TTFT."""

    limit_s: float
    slo: Slo

    @property
    def text(self) -> str:
        return f"p99 ITL within {self.limit_s * 1e3:g} ms, then the least p99 TTFT"

    def loss(self, runs: Sequence[Measures]) -> Loss:
        excess = max(0.0, max(run.itl_p99_s for run in runs) / self.limit_s - 1)
        return _mean(run.failed_share for run in runs), excess, _mean(run.ttft_p99_s for run in runs)

    def is_met(self, measures: Measures) -> bool:
        return measures.itl_p99_s <= self.limit_s and not measures.failed_share

    def deciding(self, default: Sequence[Measures]) -> Figure:
        return TTFT_P99 if all(run.itl_p99_s <= self.limit_s for run in default) else ITL_P99


@dataclass(frozen=True, slots=True)
class GoodputGoal:
    """The most requests a second within the SLO."""

    slo: Slo

    @property
    def text(self) -> str:
        return f"the most requests a second with {told(self.slo)}"

    def loss(self, runs: Sequence[Measures]) -> Loss:
        # Where two are equal, as where both meet the SLO always, the shorter wait for a first token.
        return -_mean(run.goodput_per_s for run in runs), _mean(run.ttft_p99_s for run in runs)

    def is_met(self, measures: Measures) -> bool:
        return measures.goodput_per_s > 0

    def deciding(self, default: Sequence[Measures]) -> Figure:
        return GOODPUT


@dataclass(frozen=True, slots=True)
class RanksGoal:
    """The fewest ranks with which at least `share` of the requests meet the SLO, in the worst of the simulations."""

    slo: Slo
    share: float

    @property
    def text(self) -> str:
        return f"the fewest ranks that give {self.share:.0%} of the requests {told(self.slo)}"

    def loss(self, runs: Sequence[Measures]) -> Loss:
        missing = max(0.0, self.share - min(run.met_share for run in runs))
        return missing, runs[0].num_ranks, -_mean(run.met_share for run in runs)

    def is_met(self, measures: Measures) -> bool:
        return measures.met_share >= self.share

    def deciding(self, default: Sequence[Measures]) -> Figure:
        return RANKS if all(map(self.is_met, default)) else MET_SHARE


def told(slo: Slo) -> str:
    """The SLO in words."""
    parts = []
    if slo.ttft_s is not None:
        parts.append(f"TTFT within {slo.ttft_s * 1e3:g} ms")
    if slo.itl_s is not None:
        parts.append(f"99 % of their gaps within {slo.itl_s * 1e3:g} ms")
    return " and ".join(parts)


_mean = statistics.fmean
