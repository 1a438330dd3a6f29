"""Percentiles of many durations in little memory, against all of them sorted."""

from __future__ import annotations

import math
from random import Random

import pytest

from pdserve.sim.histogram import Distribution, Histogram, distribution


def naive(values: list[float], share: float) -> float:
    """The least value that `share` of all do not exceed."""
    return min(value for value in values if sum(other <= value for other in values) >= share * len(values) - 1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_percentiles_are_within_one_percent_and_the_rest_is_exact(seed: int) -> None:
    random = Random(seed)
    values = [random.lognormvariate(-4, 2) for _ in range(1000)]
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    found = histogram.distribution()
    assert (found.num, found.max) == (1000, max(values))
    assert found.mean == pytest.approx(math.fsum(values) / 1000)
    for share, percentile in ((0.5, found.p50), (0.95, found.p95), (0.99, found.p99)):
        assert percentile == pytest.approx(naive(values, share), rel=0.01)


def test_one_value_many_times_is_itself() -> None:
    histogram = Histogram()
    histogram.add(0.0123, times=1_000_000)
    found = histogram.distribution()
    assert [found.p50, found.p99, found.max] == pytest.approx([0.0123] * 3, rel=1e-9)


def test_zero_is_a_duration_like_others() -> None:
    histogram = Histogram()
    histogram.add(0.0, times=99)
    histogram.add(5.0)
    found = histogram.distribution()
    assert (found.p50, found.p99, found.max) == (0.0, 0.0, 5.0)
    assert found.mean == pytest.approx(0.05)


def test_memory_is_that_of_the_buckets_and_not_of_the_values() -> None:
    histogram = Histogram()
    random = Random(0)
    for _ in range(50_000):
        histogram.add(random.uniform(0.001, 1.0))
    assert len(histogram._buckets) <= math.log(1000) / math.log(1.0099) + 2


def test_values_that_are_all_kept_give_exact_percentiles() -> None:
    values = [float(n) for n in range(100, 0, -1)]
    found = distribution(values)
    assert found == Distribution(100, 50.5, 50.0, 95.0, 99.0, 100.0)
    assert [naive(values, share) for share in (0.5, 0.95, 0.99)] == [50.0, 95.0, 99.0]


def test_nothing_has_no_percentiles() -> None:
    assert Histogram().distribution() == distribution([]) == Distribution(0, None, None, None, None, None)
