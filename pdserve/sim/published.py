"""Published figures of "interleave decode steps into long prefill runs" (PR 484, issue 483) beside simulated ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from pdserve.sim.deployment import Deployment
from pdserve.sim.interference import Interference, interfere
from pdserve.sim.pair import Pair

ALONE, UNSET = "victim alone", "unset"
INTERVALS = (16, 8, 4)
TOLERANCE = 0.02
# The source multiplies 58 / n by this many seconds a decode step; its own 59.4 tokens/s make it a tenth of that.
SOURCE_DECODE_S = 0.17
FLAT, CONTEXT = "seed-flat", "seed-context"


def case_of(interval: int) -> str:
    """One decode round after so many chunks."""
    return f"n = {interval}"


@dataclass(frozen=True, slots=True)
class Published:
    """low..high: what was published, one number or two. tolerance: relative; 0 = exact, as of counts."""

    case: str
    figure: str
    low: float
    high: float
    tolerance: float
    simulated: Callable[[Interference], float]
    unit: str = "s"

    def check(self, outcome: Interference) -> Check:
        return Check(self, self.simulated(outcome))


@dataclass(frozen=True, slots=True)
class Check:
    """A published figure and the simulated one."""

    published: Published
    simulated: float

    @property
    def deviation(self) -> float:
        """Relative, from the nearer end of what was published; 0 within. A published 0 is compared as it is."""
        low, high = self.published.low, self.published.high
        nearest = min(max(self.simulated, low), high)
        return (self.simulated - nearest) / (nearest or 1.0)

    @property
    def is_met(self) -> bool:
        return abs(self.deviation) <= self.published.tolerance

    def figures(self) -> dict[str, object]:
        """Under stable names."""
        wanted = self.published
        return {
            "case": wanted.case,
            "figure": wanted.figure,
            "unit": wanted.unit,
            "published": [wanted.low, wanted.high],
            "simulated": self.simulated,
            "deviation": self.deviation,
            "tolerance": wanted.tolerance,
            "is_met": self.is_met,
        }


def run_cases(deployment: Deployment, pair: Pair, seed: int = 0) -> dict[str, Interference]:
    """The source's runs on this deployment: the victim alone, and with the attacker under each interval."""
    bare = deployment.without_policies()
    alone = Pair(pair.victim_prompt_tokens, pair.victim_output_tokens, has_attacker=False)
    cases = {ALONE: interfere(bare, alone, seed), UNSET: interfere(bare, pair, seed)}
    for interval in INTERVALS:
        cases[case_of(interval)] = interfere(bare.replace(decode_interleave_every=interval), pair, seed)
    return cases


def checks(costs_name: str, cases: Mapping[str, Interference]) -> list[Check]:
    """The table's lines for one of the two cost files: each has the worst gap that it was made for."""
    worst = {FLAT: {16: 21.6, 8: 10.8, 4: 5.4}, CONTEXT: {8: 13.03}}[costs_name]
    rows = [*_stream_rows(), *_gap_rows(worst), *_price_rows()]
    return [row.check(run) for case, run in cases.items() for row in rows if row.case == case]


def _stream_rows() -> Iterator[Published]:
    """The victim's stream, from its first token to its last."""
    for case, low, high in ((ALONE, 11.7, 11.8), (UNSET, 90.4, 90.4), (case_of(8), 90.6, 90.6)):
        yield Published(case, "stream", low, high, TOLERANCE, lambda run: run.victim_stream_s)


def _gap_rows(worst: Mapping[int, float]) -> Iterator[Published]:
    yield Published(UNSET, "chunks", 58, 58, 0, lambda run: run.num_chunks, "")
    yield Published(UNSET, "worst gap", 77.0, 77.0, TOLERANCE, lambda run: run.worst_gap_s)
    for case, over_5, over_20 in ((UNSET, 1, 1), (case_of(8), 7, 0)):
        yield Published(case, "gaps > 5 s", over_5, over_5, 0, lambda run: run.gaps_over(5), "")
        yield Published(case, "gaps > 20 s", over_20, over_20, 0, lambda run: run.gaps_over(20), "")
    for interval, gap_s in worst.items():
        yield Published(case_of(interval), "worst gap", gap_s, gap_s, TOLERANCE, lambda run: run.worst_gap_s)


def _price_rows() -> Iterator[Published]:
    for interval, num, percent in zip(INTERVALS, (3, 7, 14), (0.8, 1.6, 3.2), strict=True):
        case = case_of(interval)
        yield Published(case, "decodes between", num, num, 0, lambda run: run.num_decode_rounds, "")
        added = _SourceEstimate(interval)
        yield Published(case, "added, estimated", percent, percent, TOLERANCE, added, "%")


@dataclass(frozen=True, slots=True)
class _SourceEstimate:
    """As the source reckons it: chunks / n decode steps, no whole number, of 0.17 s each, over the prefill's time."""

    interval: int

    def __call__(self, run: Interference) -> float:
        return 100 * run.num_chunks / self.interval * SOURCE_DECODE_S / run.prefill_s
