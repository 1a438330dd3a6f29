"""Times to first tokens and between tokens, as percentiles; a simulated one against the real ones."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pdserve.bench.listening import Heard

SHARES = {"p50": 0.50, "p95": 0.95, "p99": 0.99}
TOLERANCES = {"p50": 0.15, "p95": 0.25, "p99": 0.25}
# A difference is also met if it is no more than so many times what two real runs differ by.
SPREAD = 2.0


@dataclass(frozen=True, slots=True)
class Compared:
    """One figure of one load on one deployment, in seconds. real_s: mean of the runs; spread_s: their range."""

    name: str
    real_s: float
    spread_s: float
    simulated_s: float
    tolerance: float

    @classmethod
    def of(cls, name: str, real_s: Sequence[float], simulated_s: Sequence[float]) -> Compared:
        tolerance = TOLERANCES[name.split("_")[1]]
        spread_s = max(real_s) - min(real_s)
        return cls(name, statistics.mean(real_s), spread_s, statistics.mean(simulated_s), tolerance)

    @property
    def error(self) -> float:
        """Of the simulator, as a share of what is real."""
        return self.simulated_s / self.real_s - 1

    @property
    def is_met(self) -> bool:
        allowed_s = max(self.tolerance * self.real_s, SPREAD * self.spread_s)
        return abs(self.simulated_s - self.real_s) <= allowed_s


def figures(heard: Sequence[Heard]) -> dict[str, float]:
    """ttft_p50_s ... itl_p99_s of all answers together."""
    times_s = {
        "ttft": sorted(answer.ttft_s for answer in heard),
        "itl": sorted(gap_s for answer in heard for gap_s in answer.gaps_s),
    }
    return {
        f"{kind}_{label}_s": percentile(sorted_s, share)
        for kind, sorted_s in times_s.items()
        for label, share in SHARES.items()
    }


def percentile(sorted_s: Sequence[float], share: float) -> float:
    """Between the two nearest values in proportion; few values make anything else jump."""
    place = share * (len(sorted_s) - 1)
    low = int(place)
    high = min(low + 1, len(sorted_s) - 1)
    return sorted_s[low] + (place - low) * (sorted_s[high] - sorted_s[low])


def compare(real: Sequence[Mapping[str, float]], simulated: Sequence[Mapping[str, float]]) -> list[Compared]:
    """Each figure of the real runs beside those of the simulated ones."""
    return [Compared.of(name, [run[name] for run in real], [run[name] for run in simulated]) for name in real[0]]
