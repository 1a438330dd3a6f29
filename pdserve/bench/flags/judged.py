"""What real clients heard, told to the simulator's own report, so that both are judged by the same figures."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.bench.listening import Heard
from pdserve.sim.report import Report, Slo
from pdserve.sim.workload import SimRequest


def judge(requests: Sequence[SimRequest], heard: Sequence[Heard], slo: Slo) -> Report:
    """requests, heard: of the same numbers in the same order. A request's arrival is when its client called."""
    report = Report(slo)
    start_s = min(answer.called_s for answer in heard)
    moments = sorted((at_s - start_s, answer.number) for answer in heard for at_s in answer.arrivals_s)
    for at_s, number in moments:
        report.on_tokens(at_s, [number])
    for request, answer in zip(requests, heard, strict=True):
        called = SimRequest(
            request.number, answer.called_s - start_s, request.num_prompt_tokens, len(answer.arrivals_s)
        )
        report.on_end(called, answer.arrivals_s[-1] - start_s, answer.num_cached_tokens)
    return report
