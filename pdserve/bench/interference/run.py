"""A run of `pdserve bench interference`: every case on real nodes, and what is shown of it."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from pdserve.bench.interference.cases import Experiment
from pdserve.bench.interference.outcome import Figures, all_figures, count_checks, time_checks
from pdserve.bench.interference.picture import write_png
from pdserve.bench.interference.predicted import predict
from pdserve.bench.interference.served import Served, serve_all
from pdserve.bench.policy_runs import Model
from pdserve.bench.stream_checks import Check
from pdserve.commands.tables import write_json
from pdserve.model import hub
from pdserve.model.progress import show_progress
from pdserve.node_process import interrupted_by_sigterm

# Heading, the figure's name, and how it reads.
COLUMNS = (
    ("worst gap s", "worst_gap_s", ".2f"),
    ("gap p50 ms", "gap_p50_s", "ms"),
    ("long gaps", "long_gaps", "d"),
    ("whole runs", "whole_runs", "d"),
    ("victim wall s", "victim_wall_s", ".1f"),
    ("tokens", "victim_tokens", "d"),
    ("attacker TTFT s", "attacker_ttft_s", ".1f"),
)


def run(arguments: argparse.Namespace, experiment: Experiment) -> int:
    """0 when every check is met; with --quick the times are shown and not judged."""
    costs = arguments.costs.costs if arguments.costs else None
    with interrupted_by_sigterm(), show_progress() as progress:
        model = Model.of(hub.resolve(arguments.model, progress=progress))
        served = serve_all(model, experiment, progress, repeats=1 if arguments.quick else arguments.repeats)
    found = all_figures(served.rows, experiment, served.shape)
    predicted = None
    if costs is not None:
        rows = [predict(row, experiment, costs) for row in served.rows]
        predicted = all_figures(rows, experiment, served.shape)
    checks = count_checks(served.rows, found, experiment)
    checks += [] if arguments.quick else time_checks(served)
    _print(served, found, predicted, checks, Console(highlight=False, stderr=arguments.json == "-"))
    if arguments.json:
        write_json(arguments.json, _as_json(experiment, served, found, predicted, checks))
    if arguments.png:
        write_png(arguments.png, served.rows)
    return int(not all(check.is_met for check in checks))


def _print(
    served: Served,
    found: Mapping[str, Figures],
    predicted: Mapping[str, Figures] | None,
    checks: Sequence[Check],
    console: Console,
) -> None:
    table = Table("", *(heading for heading, _, _ in COLUMNS), box=SIMPLE)
    for row in served.rows:
        table.add_row(row.case.flags, *_cells(found[row.case.name]))
        if predicted is not None:
            table.add_row("  simulated", *_cells(predicted[row.case.name]), style="dim")
    console.print(table)
    judged = Table("check", "found", "wanted", "", box=SIMPLE)
    for check in checks:
        judged.add_row(check.name, f"{check.found:g}", check.wanted, "ok" if check.is_met else "[red]FAILED[/red]")
    console.print(judged)


def _cells(figures: Figures) -> list[str]:
    return [_cell(figures.get(name), form) for _, name, form in COLUMNS]


def _cell(value: float | None, form: str) -> str:
    if value is None:
        return "–"
    return f"{value * 1e3:.1f}" if form == "ms" else format(int(value) if form == "d" else value, form)


def _as_json(
    experiment: Experiment,
    served: Served,
    found: Mapping[str, Figures],
    predicted: Mapping[str, Figures] | None,
    checks: Sequence[Check],
) -> dict[str, object]:
    return {
        "experiment": dataclasses.asdict(experiment),
        "chunk": dataclasses.asdict(served.shape),
        "cases": {
            row.case.name: {
                "flags": row.case.flags,
                "measured": found[row.case.name],
                "simulated": predicted[row.case.name] if predicted is not None else None,
                "gaps_s": row.victim.gaps_s,
            }
            for row in served.rows
        },
        "walls_s": served.walls_s,
        "split_worst_gaps_s": served.split_worst_gaps_s,
        "checks": [check.figures() for check in checks],
    }
