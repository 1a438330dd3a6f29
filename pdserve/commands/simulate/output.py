"""What a simulation came to: on the terminal, as JSON, and drawn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from pdserve.commands.simulate.flags import Asked
from pdserve.commands.tables import write_json
from pdserve.errors import StartupError
from pdserve.sim.broadcast import Broadcast
from pdserve.sim.figures import figures
from pdserve.sim.report import Report
from pdserve.sim.simulation import Simulation
from pdserve.sim.timeline import Timeline
from pdserve.sim.workload import Workload

MEASURES = ("mean", "p50", "p95", "p99", "max")


def console_of(asked: Asked) -> Console:
    """Where tables go: not between the lines of a JSON on standard output."""
    return Console(highlight=False, stderr=asked.json == "-")


def timeline_of(asked: Asked, title: str) -> Timeline | None:
    """A listener for the pictures that were asked for; None without any."""
    if asked.png is None and asked.html is None:
        return None
    return Timeline(topology=asked.deployment.topology(), title=title)


def write_pictures(asked: Asked, timeline: Timeline | None) -> None:
    """Raises StartupError where one can't be written."""
    if timeline is None:
        return
    for flag, name, write in (("--png", asked.png, timeline.write_png), ("--html", asked.html, timeline.write_html)):
        if name is None:
            continue
        try:
            write(Path(name))
        except OSError as error:
            raise StartupError(f"{flag} {name} can't be written ({error.strerror}); check the path") from None


def run_and_tell(asked: Asked, workload: Workload, title: str) -> int:
    """Simulates the workload; 0, or 1 where requests failed."""
    report, timeline = Report(asked.slo), timeline_of(asked, title)
    observer = Broadcast([report, timeline]) if timeline else report
    deployment = asked.deployment
    totals = Simulation(deployment.topology(), deployment.costs, workload, observer, asked.seed).run()
    found = {"workload": title, **describe(asked), **figures(report, totals)}
    print_figures(found, console_of(asked))
    write_pictures(asked, timeline)
    if asked.json:
        write_json(asked.json, found)
    return int(found["num_failed"] > 0)


def describe(asked: Asked) -> dict[str, Any]:
    """What was simulated."""
    costs, deployment = asked.deployment.costs, asked.deployment
    return {
        "costs": costs.name,
        "deployment": deployment.describe(),
        "num_ranks": deployment.num_ranks,
        "seed": asked.seed,
    }


def print_figures(found: dict[str, Any], console: Console) -> None:
    """The table of one run."""
    console.print(f"[bold]{found['workload']}[/bold] on {found['num_ranks']} rank(s), costs {found['costs']}")
    console.print(found["deployment"], style="dim")
    table = Table("ms", *MEASURES, box=SIMPLE)
    for name in ("ttft", "itl", "tpot", "handoff_exposed"):
        values = [found[f"{name}_{measure}_s"] for measure in MEASURES]
        if values[0] is not None:
            table.add_row(LABELS[name], *map(_ms, values))
    console.print(table)
    for line in _lines(found):
        console.print(line)


LABELS = {
    "ttft": "TTFT",
    "itl": "ITL (gaps)",
    "tpot": "TPOT (of a request)",
    "handoff_exposed": "exposed handoff",
}


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}" if seconds < 1 else f"{seconds * 1e3:,.0f}"


def _lines(found: dict[str, Any]) -> Sequence[str]:
    gaps = ", ".join(f"{num:,} over {name[10:-2]} s" for name, num in found.items() if name.startswith("gaps_over_"))
    lines = [
        f"{found['num_finished']:,} of {found['num_requests']:,} requests finished in {found['elapsed_s']:,.1f} s: "
        f"{found['requests_per_s']:.2f} requests/s, {found['output_tokens_per_s']:,.0f} output tokens/s, "
        f"{found['prompt_tokens_per_s']:,.0f} prompt tokens/s ({found['cached_share']:.0%} cached)",
        f"gaps: {gaps}",
    ]
    if found["slo_ttft_s"] is not None or found["slo_itl_s"] is not None:
        lines.append(f"SLO met by {found['met_share']:.1%}: goodput {found['goodput_per_s']:.2f} requests/s")
    lines += _node_lines(found["totals"])
    lines += [f"[red]failed[/red] {item['num']:,}: {item['example']}" for item in found["failures"]]
    return lines


def _node_lines(totals: dict[str, Any]) -> list[str]:
    """Of the nodes' own counters, those that say something of this run."""
    counters = totals["counters"]
    parts = [
        f"KV held: {totals['mean_occupancy']:.0%} on average, {totals['peak_occupancy']:.0%} at most",
        f"retractions: {counters['retractions']:,}",
    ]
    if held := counters.get("gate_rounds_held"):
        parts.append(f"rounds that held a prompt: {held:,}")
    if num_bytes := totals["num_handoff_bytes"]:
        parts.append(f"KV handed over: {num_bytes / 1e9:,.2f} GB")
    return ["; ".join(parts)]
