"""What a simulation came to, in the figures that a person who serves a model is asked for.

TTFT        from a client's call to its first token
ITL         a gap between two tokens of a stream, at its client; all gaps of all streams
TPOT        the mean gap of a request that had two tokens or more
goodput     requests a second that met the SLO: TTFT within its limit, and their own p99 of ITL within its limit,
            which is to say that at most one in a hundred of a request's gaps was longer; all others, failed ones
            too, did not meet it
"""

from __future__ import annotations

import math
import re
from array import array
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from pdserve.sim.histogram import Distribution, Histogram, distribution
from pdserve.sim.observer import SimRound, Transferred
from pdserve.sim.workload import SimRequest

GAP_THRESHOLDS_S = (1.0, 5.0, 20.0)
# A gap in a hundred.
LATE_SHARE = 100


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits in seconds; None = not looked at."""

    ttft_s: float | None = None
    itl_s: float | None = None


@dataclass(slots=True)
class _Stream:
    """A live request's tokens so far."""

    first_s: float
    last_s: float
    num_late: int = 0


@dataclass(slots=True)
class Failures:
    """Requests that were refused or given up, by reason; reasons that differ in numbers alone are one."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def add(self, reason: str) -> None:
        kind = re.sub(r"\d[\d,.]*", "N", reason)
        self.counts[kind] += 1
        self.examples.setdefault(kind, reason)

    def figures(self) -> list[dict[str, Any]]:
        return [{"num": num, "example": self.examples[kind]} for kind, num in self.counts.most_common()]


class Report:
    """An Observer. Memory is that of the live streams, and 16 bytes for each finished request.

    watched: numbers of requests whose gaps are kept one by one. gap_thresholds_s: gaps over each are counted.
    """

    def __init__(
        self,
        slo: Slo = Slo(),
        watched: Collection[int] = (),
        gap_thresholds_s: Sequence[float] = GAP_THRESHOLDS_S,
    ) -> None:
        self.slo = slo
        self.watched_gaps_s: dict[int, list[float]] = {number: [] for number in watched}
        self.failures = Failures()
        self.num_finished = 0
        self.num_met = 0
        self.num_output_tokens = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.busy_s: defaultdict[str, float] = defaultdict(float)
        self.num_rounds: Counter[str] = Counter()
        self.num_bytes = 0
        self._late_s = math.inf if slo.itl_s is None else slo.itl_s
        self._gap_counts = dict.fromkeys(sorted(gap_thresholds_s), 0)
        self._rare_s = min([self._late_s, *gap_thresholds_s], default=math.inf)
        self._streams: dict[int, _Stream] = {}
        self._itl = Histogram()
        self._ttft_s = array("d")
        self._tpot_s = array("d")
        self._exposed = Histogram()
        self._first_call_s = math.inf
        self._last_end_s = 0.0

    # ------------------------------------------------------------------------------------------------ what is told

    def on_tokens(self, time_s: float, numbers: Sequence[int]) -> None:
        """Streams of one batch mostly had their last token together, and so share a gap."""
        streams, watched_gaps_s = self._streams, self.watched_gaps_s
        shared_s, num_shared = 0.0, 0
        for number in numbers:
            stream = streams.get(number)
            if stream is None:
                streams[number] = _Stream(time_s, time_s)
                continue
            gap_s = time_s - stream.last_s
            stream.last_s = time_s
            if gap_s == shared_s:
                num_shared += 1
            else:
                if num_shared:
                    self._itl.add(shared_s, num_shared)
                shared_s, num_shared = gap_s, 1
            if gap_s > self._rare_s:
                self._on_long_gap(gap_s, stream)
            if watched_gaps_s and number in watched_gaps_s:
                watched_gaps_s[number].append(gap_s)
        if num_shared:
            self._itl.add(shared_s, num_shared)
        self.num_output_tokens += len(numbers)

    def _on_long_gap(self, gap_s: float, stream: _Stream) -> None:
        stream.num_late += gap_s > self._late_s
        for threshold_s in self._gap_counts:
            self._gap_counts[threshold_s] += gap_s > threshold_s

    def on_end(self, request: SimRequest, time_s: float, num_cached_tokens: int) -> None:
        stream = self._streams.pop(request.number)
        self._see_times(request, time_s)
        self.num_finished += 1
        self.num_prompt_tokens += request.num_prompt_tokens
        self.num_cached_tokens += num_cached_tokens
        ttft_s, num_gaps = stream.first_s - request.arrival_s, request.num_output_tokens - 1
        self._ttft_s.append(ttft_s)
        if num_gaps:
            self._tpot_s.append((stream.last_s - stream.first_s) / num_gaps)
        is_early = self.slo.ttft_s is None or ttft_s <= self.slo.ttft_s
        self.num_met += is_early and stream.num_late * LATE_SHARE <= num_gaps

    def on_failed(self, request: SimRequest, time_s: float, reason: str) -> None:
        self._streams.pop(request.number, None)
        self._see_times(request, time_s)
        self.failures.add(reason)

    def _see_times(self, request: SimRequest, time_s: float) -> None:
        self._first_call_s = min(self._first_call_s, request.arrival_s)
        self._last_end_s = max(self._last_end_s, time_s)

    def on_round(self, record: SimRound) -> None:
        self.busy_s[record.kind] += record.busy_s
        if record.num_prefill_rows:
            self.num_rounds["mixed" if record.num_decode_rows else "prefill"] += 1
        elif record.num_decode_rows:
            self.num_rounds["decode"] += 1
        self.num_rounds["held"] += record.is_held

    def on_transfer(self, record: Transferred) -> None:
        self.num_bytes += record.num_bytes
        self._exposed.add(max(0.0, record.exposed_s))

    # ---------------------------------------------------------------------------------------------- what came of it

    @property
    def ttft(self) -> Distribution:
        return distribution(self._ttft_s)

    @property
    def itl(self) -> Distribution:
        return self._itl.distribution()

    @property
    def tpot(self) -> Distribution:
        return distribution(self._tpot_s)

    @property
    def exposed(self) -> Distribution:
        """How long handoffs kept a drawn first token's stream waiting."""
        return self._exposed.distribution()

    @property
    def gaps_over(self) -> dict[float, int]:
        """Gaps longer than each threshold in seconds."""
        return dict(self._gap_counts)

    @property
    def num_requests(self) -> int:
        """All that came to an end, of either kind."""
        return self.num_finished + self.failures.counts.total()

    @property
    def elapsed_s(self) -> float:
        """From the first call to the last end; 0 where nothing ended."""
        return max(0.0, self._last_end_s - self._first_call_s) if self.num_requests else 0.0

    @property
    def goodput_per_s(self) -> float:
        """Requests a second that met the SLO; without one, all that finished."""
        return self.per_s(self.num_met)

    @property
    def met_share(self) -> float:
        return self.num_met / self.num_requests if self.num_requests else 0.0

    def per_s(self, number: int) -> float:
        return number / self.elapsed_s if self.elapsed_s else 0.0
