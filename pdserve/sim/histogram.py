"""Many durations in little memory, and what is said of them: mean, percentiles, the longest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

SHARES = (0.50, 0.95, 0.99)
# All in a bucket are within 1 % of each other, and so of their mean.
_RATIO_LOG = math.log(1.0099)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Seconds; None where nothing was counted. A percentile p is the least value that p % of all do not exceed."""

    num: int = 0
    mean: float | None = None
    p50: float | None = None
    p95: float | None = None
    p99: float | None = None
    max: float | None = None

    def figures(self) -> dict[str, float | int | None]:
        return asdict(self)


class Histogram:
    """Durations in buckets that grow with them: percentiles within 1 %; number, mean and longest exact."""

    def __init__(self) -> None:
        self._buckets: dict[int, list[float]] = {}  # number and total of each
        self._num_zero = 0
        self.num = 0
        self.total = 0.0
        self.longest = 0.0

    def add(self, seconds: float, times: int = 1) -> None:
        """seconds >= 0."""
        if seconds > 0:
            bucket = self._buckets.setdefault(math.floor(math.log(seconds) / _RATIO_LOG), [0, 0.0])
            bucket[0] += times
            bucket[1] += seconds * times
        else:
            self._num_zero += times
        self.num += times
        self.total += seconds * times
        self.longest = max(self.longest, seconds)

    def percentile(self, share: float) -> float | None:
        """The least value that `share` of all do not exceed, within 1 %; None where there is none."""
        if not self.num:
            return None
        left = _rank(share, self.num) - self._num_zero
        if left <= 0:
            return 0.0
        for _, (num, total) in sorted(self._buckets.items()):
            left -= int(num)
            if left <= 0:
                return min(total / num, self.longest)  # a sum of floats may round beyond
        raise AssertionError("more were counted than are in buckets")

    def distribution(self) -> Distribution:
        if not self.num:
            return Distribution()
        p50, p95, p99 = map(self.percentile, SHARES)
        return Distribution(self.num, self.total / self.num, p50, p95, p99, self.longest)


def distribution(values: Sequence[float]) -> Distribution:
    """Of values that are all there: exact."""
    if not values:
        return Distribution()
    ordered = sorted(values)
    p50, p95, p99 = (ordered[_rank(share, len(ordered)) - 1] for share in SHARES)
    return Distribution(len(ordered), math.fsum(ordered) / len(ordered), p50, p95, p99, ordered[-1])


def _rank(share: float, num: int) -> int:
    """Counted from 1. The tolerance keeps 0.95 * 100 at 95, whatever the product of floats is."""
    return max(1, math.ceil(share * num - 1e-9))
