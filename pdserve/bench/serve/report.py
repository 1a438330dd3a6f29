"""Results as tables: on a terminal, as JSON, as Markdown. A table a load, a row a figure, a column a server."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pdserve.bench.serve.figures import SHARES, Slo
from pdserve.bench.serve.results import Measured, Results
from pdserve.bench.speed.machine import this_machine
from pdserve.errors import StartupError

MS, SHARE = 1e3, 1e2


def _percentile_rows(kind: str, heading: str, unit: str, scale: float, form: str) -> list[tuple[str, str, float, str]]:
    return [(f"{kind}_{label}_s", f"{heading} {label}, {unit}", scale, form) for label in SHARES]


# The figure's name, and how it reads.
ROWS = (
    ("num_requests", "requests", 1, ".0f"),
    ("num_failed", "failed", 1, ".0f"),
    ("num_refused", "of them refused", 1, ".0f"),
    ("goodput", "goodput, %", SHARE, ".0f"),
    ("goodput_per_s", "goodput, requests/s", 1, ".2f"),
    ("strict_goodput", "strict goodput, %", SHARE, ".0f"),
    ("strict_goodput_per_s", "strict goodput, requests/s", 1, ".2f"),
    *_percentile_rows("ttft", "TTFT", "s", 1, ".2f"),
    *_percentile_rows("itl", "ITL", "ms", MS, ".0f"),
    *_percentile_rows("tpot", "TPOT", "ms", MS, ".0f"),
    *_percentile_rows("e2e", "end to end", "s", 1, ".2f"),
    ("worst_gap_s", "worst gap, s", 1, ".2f"),
    ("prompt_tokens_per_s", "prompt tokens/s", 1, ".0f"),
    ("output_tokens_per_s", "answer tokens/s", 1, ".0f"),
    ("num_cached_tokens", "prompt tokens from a cache", 1, ",.0f"),
    ("cpu_s", "CPU, s", 1, ".0f"),
    ("peak_mib", "peak memory (PSS), MiB", 1, ",.0f"),
    ("long_ttft_s", "long prompt: TTFT, s", 1, ".2f"),
    ("beside_worst_gap_s", "worst gap beside it, s", 1, ".2f"),
    ("beside_worst_wait_s", "worst TTFT beside it, s", 1, ".2f"),
)


def print_results(results: Results, slo: Slo, console: Console) -> None:
    console.print(_slo_line(slo))
    for load in results.loads:
        table = Table(escape(load), *map(escape, results.servers), box=SIMPLE)
        for cells in _rows(results, load):
            table.add_row(*cells)
        console.print(table)
    for line in _faults(results):
        console.print(line, style="red", markup=False)


def as_markdown(results: Results, slo: Slo, command: str) -> str:
    lines = [f"`{command}`", "", f"On {this_machine()}. {_slo_line(slo)}.", ""]
    for load in results.loads:
        lines += [_line([load, *results.servers]), _line(["---", *["---:"] * len(results.servers)])]
        lines += [*map(_line, _rows(results, load)), ""]
    return "\n".join([*lines, *(f"- {line}" for line in _faults(results))]).rstrip() + "\n"


def write_markdown(destination: str, text: str) -> None:
    """Raises StartupError where it can't be written."""
    try:
        Path(destination).write_text(text, encoding="utf-8")
    except OSError as error:
        raise StartupError(f"--markdown {destination} can't be written ({error.strerror}); check the path") from None


def as_json(results: Results, slo: Slo) -> dict[str, Any]:
    """Medians and each repetition, by load and server."""
    return {
        "machine": asdict(this_machine()),
        "slo_ttft_s": slo.ttft_s,
        "slo_itl_s": slo.itl_s,
        "broken": results.broken,
        "loads": {
            load: {server: _figures(one) for server, one in by_server.items()}
            for load, by_server in results.measured.items()
        },
    }


def _figures(measured: Measured) -> dict[str, Any]:
    return {
        "medians": measured.medians,
        "repeats": [run.figures for run in measured.runs],
        "failures": measured.failures().figures(),
    }


def _slo_line(slo: Slo) -> str:
    return (
        f"Goodput: TTFT within {slo.ttft_s:g} s and a mean gap within {slo.itl_s * MS:g} ms; "
        f"strict goodput: every gap within {slo.itl_s * MS:g} ms"
    )


def _rows(results: Results, load: str) -> Iterator[list[str]]:
    """Those that any server has a figure for."""
    by_server = [results.measured[load][server] for server in results.servers]
    for name, heading, scale, form in ROWS:
        if any(one.values(name) for one in by_server):
            yield [heading, *(_cell([scale * value for value in one.values(name)], form) for one in by_server)]


def _cell(values: list[float], form: str) -> str:
    """The median, and the range where there are several."""
    if not values:
        return "–"
    median = format(statistics.median(values), form)
    return median if len(values) == 1 else f"{median} ({min(values):{form}}–{max(values):{form}})"


def _faults(results: Results) -> Iterator[str]:
    for server, reason in results.broken.items():
        yield f"{server} did not serve to the end: {reason}"
    for load, by_server in results.measured.items():
        for server, measured in by_server.items():
            for one in measured.failures().figures():
                yield f"{load}, {server}: {one['num']} failed: {one['example']}"


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
