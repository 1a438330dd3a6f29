"""A run as one flat dictionary: stable names with their units, for programs and for tables."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from pdserve.sim.histogram import Distribution
from pdserve.sim.report import Report
from pdserve.sim.totals import Totals


def figures(report: Report, totals: Totals) -> dict[str, Any]:
    """What callers saw, and under `totals` what the nodes counted."""
    return {
        "num_requests": report.num_requests,
        "num_finished": report.num_finished,
        "num_failed": report.num_requests - report.num_finished,
        "failures": report.failures.figures(),
        "elapsed_s": report.elapsed_s,
        "requests_per_s": report.per_s(report.num_finished),
        "output_tokens_per_s": report.per_s(report.num_output_tokens),
        "prompt_tokens_per_s": report.per_s(report.num_prompt_tokens),
        **_spread("ttft", report.ttft),
        **_spread("itl", report.itl),
        **_spread("tpot", report.tpot),
        **{f"gaps_over_{threshold_s:g}_s": num for threshold_s, num in report.gaps_over.items()},
        **goodput_figures(report),
        "cached_share": report.num_cached_tokens / report.num_prompt_tokens if report.num_prompt_tokens else 0.0,
        **{f"rank_{kind}_rounds": num for kind, num in sorted(report.num_rounds.items())},
        **{f"{kind}_busy_s": busy_s for kind, busy_s in sorted(report.busy_s.items())},
        "handoff_bytes": report.num_bytes,
        **_spread("handoff_exposed", report.exposed),
        "totals": asdict(totals),
    }


def goodput_figures(report: Report) -> dict[str, float | None]:
    """Of the SLO that was given; without one all finished requests meet it."""
    return {
        "slo_ttft_s": report.slo.ttft_s,
        "slo_itl_s": report.slo.itl_s,
        "goodput_per_s": report.goodput_per_s,
        "met_share": report.met_share,
    }


def _spread(name: str, found: Distribution) -> dict[str, float | None]:
    values = {"mean": found.mean, "p50": found.p50, "p95": found.p95, "p99": found.p99, "max": found.max}
    return {f"{name}_{measure}_s": value for measure, value in values.items()}
