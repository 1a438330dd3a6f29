"""Real answers judged by the simulator's report."""

from __future__ import annotations

import pytest

from pdserve.bench.flags.judged import judge
from pdserve.bench.listening import Heard
from pdserve.sim.report import Slo
from pdserve.sim.workload import SimRequest

REQUESTS = [SimRequest(0, 0.0, 10, 3), SimRequest(1, 1.0, 20, 2)]
# Called at 100 and 101 of some clock; the second waits 2 s for its first token.
HEARD = [Heard(0, 100.0, (100.5, 100.6, 100.8)), Heard(1, 101.0, (103.0, 103.1))]


def test_what_was_heard_is_told_as_a_simulation_would() -> None:
    report = judge(REQUESTS, HEARD, Slo(ttft_s=1.0, itl_s=0.5))
    assert report.num_requests == 2
    assert report.num_output_tokens == 5
    assert report.num_prompt_tokens == 30
    assert report.ttft.max == pytest.approx(2.0)
    assert report.itl.max == pytest.approx(0.2)
    assert report.num_met == 1
    assert report.elapsed_s == pytest.approx(3.1)


def test_a_late_token_misses_the_slo_too() -> None:
    assert judge(REQUESTS, HEARD, Slo(ttft_s=5.0, itl_s=0.15)).num_met == 1
    assert judge(REQUESTS, HEARD, Slo()).num_met == 2
