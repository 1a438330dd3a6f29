"""The bench of the simulator's speed, with a few requests of its many."""

from __future__ import annotations

import pytest

from pdserve.bench.simulator_speed import CASES, Case, measure


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_case_answers_everything_it_asks(case: Case) -> None:
    scale = 40 / case.num_requests
    timed = measure(case, scale)
    assert (timed.totals.num_ended, timed.totals.is_complete) == (40, True)
    assert timed.num_tokens == timed.totals.counters["output_tokens"]
    assert timed.cpu_s > 0
    assert timed.peak_bytes > 0
