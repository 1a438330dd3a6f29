"""A run of `pdserve bench flags`: the same requests to two deployments, and what is shown of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from pdserve.bench.deployed import fused
from pdserve.bench.fidelity.loads import calls
from pdserve.bench.flags.command import LOAD, NUM_REQUESTS, REPEATS
from pdserve.bench.flags.judged import judge
from pdserve.bench.policy_runs import Model
from pdserve.bench.simulated import hear_simulated
from pdserve.commands.simulate.flags import Asked
from pdserve.commands.tables import write_json
from pdserve.model import hub
from pdserve.model.progress import show_progress
from pdserve.node_process import interrupted_by_sigterm
from pdserve.sim.deployment import DEFAULTS, SETTINGS, Deployment
from pdserve.sim.presets import preset
from pdserve.sim.report import Report, Slo
from pdserve.sim.traffic import preset_traffic
from pdserve.sim.workload import SimRequest


@dataclass(frozen=True, slots=True)
class Case:
    """One deployment under the same requests. real: one report a repetition; simulated: with the cost file."""

    flags: str
    real: list[Report]
    simulated: Report


def run(asked: Asked) -> int:
    """0 when the given flags beat those of the cost file on the real nodes, by goodput of all repetitions together."""
    own = vars(asked.own)
    num_requests, repeats = own.get("requests", NUM_REQUESTS), own.get("repeats", REPEATS)
    default, given = asked.cost_file.deployment, asked.deployment
    chosen = preset(own.get("workload", "chat"))
    traffic = preset_traffic(chosen, default, own.get("load", LOAD), num_requests)
    requests = list(chosen.workload(traffic.longest_request, traffic.rate_per_s, num_requests, asked.seed).arrivals())
    with interrupted_by_sigterm(), show_progress() as progress:
        model = Model.of(hub.resolve(own.get("served_model", "smollm2"), progress=progress))
        cases = [measure(model, one, requests, asked.slo, repeats) for one in (default, given)]
    console = Console(highlight=False, stderr=asked.json == "-")
    console.print(f"{traffic.text}, {repeats} times each, on this machine")
    _print(cases, console)
    if asked.json:
        write_json(asked.json, _figures(asked, cases))
    before, after = (sum(report.num_met for report in case.real) for case in cases)
    console.print(f"requests within the SLO on real nodes: {before} as the cost file has it, {after} with the flags")
    return int(after <= before)


def measure(model: Model, deployment: Deployment, requests: Sequence[SimRequest], slo: Slo, repeats: int) -> Case:
    """The requests on fresh real nodes, every repetition with other prompts of the same lengths."""
    settings = {name: getattr(deployment, name) for name in SETTINGS if getattr(deployment, name) != DEFAULTS[name]}
    with fused(model, block_size=deployment.costs.block_size, **settings) as node:
        real = [
            judge(requests, node.hear_all(calls(requests, model, "flags", repeat)), slo) for repeat in range(repeats)
        ]
    simulated = judge(requests, hear_simulated(deployment, requests, seed=0), slo)
    return Case(deployment.describe(), real, simulated)


def _print(cases: Sequence[Case], console: Console) -> None:
    times = ("TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "worst gap")
    table = Table("seconds", "", *times, "within SLO", "per s", box=SIMPLE)
    for name, case in zip(("cost file", "flags"), cases, strict=True):
        for kind, report in [
            *((f"real {n}", one) for n, one in enumerate(case.real, 1)),
            ("simulated", case.simulated),
        ]:
            table.add_row(name, kind, *_cells(report))
    console.print(table)
    for case in cases:
        console.print(case.flags, style="dim")


def _cells(report: Report) -> list[str]:
    figures = _figures_of(report)
    times = [f"{figures[name]:.2f}" for name in TIMES]
    return [*times, f"{report.num_met}/{report.num_requests}", f"{report.goodput_per_s:.3f}"]


TIMES = ("ttft_p50_s", "ttft_p99_s", "itl_p50_s", "itl_p99_s", "worst_gap_s")


def _figures_of(report: Report) -> dict[str, float]:
    ttft, itl = report.ttft, report.itl
    times = (ttft.p50, ttft.p99, itl.p50, itl.p99, itl.max)
    return {
        **{name: time_s or 0.0 for name, time_s in zip(TIMES, times, strict=True)},
        "num_met": report.num_met,
        "num_requests": report.num_requests,
        "goodput_per_s": report.goodput_per_s,
    }


def _figures(asked: Asked, cases: Sequence[Case]) -> dict[str, object]:
    return {
        "costs": asked.cost_file.costs.name,
        "cases": [
            {
                "flags": case.flags,
                "real": [_figures_of(report) for report in case.real],
                "simulated": _figures_of(case.simulated),
            }
            for case in cases
        ],
    }
