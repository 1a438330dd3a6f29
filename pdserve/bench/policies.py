"""The prefill policies and the KV tiers on a real fused node: what they do, and that no answer changes.

    python -m pdserve.bench.policies [--only gate|pool|files|cadence ...] [--json FILE]

gate     16 streams and scattered prompts, with the gate and without: prefill rounds, windows, worst wait
pool     32 streams that need three times the pool, beside a pool that is large enough
files    200 corruptions of block files between requests, kill -9 while files are written, and the time to the first
         token of a long prompt cold, from device, from host memory and from files
cadence  a stream's gaps beside a prompt of 58 chunks
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from pdserve.bench.policy_cadence import measure_cadence
from pdserve.bench.policy_corruption import measure_corruption
from pdserve.bench.policy_files import measure_files
from pdserve.bench.policy_gate import measure_gate
from pdserve.bench.policy_pool import measure_pool
from pdserve.bench.policy_runs import Model, Outcome
from pdserve.commands.tables import write_json
from pdserve.model import hub
from pdserve.model.progress import show_progress
from pdserve.node_process import interrupted_by_sigterm

MEASUREMENTS: dict[str, Sequence[Callable[[Model], Outcome]]] = {
    "gate": (measure_gate,),
    "pool": (measure_pool,),
    "files": (measure_corruption, measure_files),
    "cadence": (measure_cadence,),
}


def main(argv: list[str] | None = None) -> int:
    """0 when every check is met."""
    arguments = _parser().parse_args(argv)
    console = Console(highlight=False, stderr=arguments.json == "-")
    with interrupted_by_sigterm():
        with show_progress() as progress:
            model = Model.of(hub.resolve("smollm2", progress=progress))
        outcomes = []
        for name in arguments.only or MEASUREMENTS:
            for measure in MEASUREMENTS[name]:
                with console.status(name):
                    outcomes.append(measure(model))
                print_outcome(outcomes[-1], console)
    if arguments.json:
        write_json(arguments.json, [asdict(outcome) for outcome in outcomes])
    return int(not all(check.is_met for outcome in outcomes for check in outcome.checks))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=MEASUREMENTS, help="not all of them; may be repeated")
    parser.add_argument("--json", metavar="FILE", help="also write the figures as JSON; - is standard output")
    return parser


def print_outcome(outcome: Outcome, console: Console) -> None:
    console.print(f"[bold]{outcome.title}[/bold]")
    figures = Table("", *outcome.cases, box=SIMPLE)
    names = dict.fromkeys(name for case in outcome.cases.values() for name in case)
    for name in names:
        figures.add_row(name.replace("_", " "), *(_shown(case.get(name)) for case in outcome.cases.values()))
    console.print(figures)
    checks = Table("check", "found", "wanted", "", box=SIMPLE)
    for check in outcome.checks:
        checks.add_row(check.name, f"{check.found:g}", check.wanted, "ok" if check.is_met else "[red]FAILED[/red]")
    console.print(checks)


def _shown(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) else f"{value:.2f}"


if __name__ == "__main__":
    sys.exit(main())
