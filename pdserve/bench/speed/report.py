"""The table of speeds, its spread, and how far pdserve is ahead of the best of its peers."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from pdserve.bench.speed.turns import Row

FAILED = "failed"

# Of a table; the first holds the heads of its columns.
Lines = list[list[str]]


def show(rows: Sequence[Row], console: Console) -> None:
    for title, (head, *lines) in tables(rows):
        table = Table(*head, box=SIMPLE, title=title, title_justify="left")
        for line in lines:
            table.add_row(*line)
        console.print(table)
    for told in failures(rows):
        console.print(told, markup=False)


def tables(rows: Sequence[Row]) -> list[tuple[str, Lines]]:
    """Each with its title."""
    cells = list(rows[0].tokens_per_s)
    medians = [["", *cells, "start, s", "MiB"], *([*_figures(row, _median), *_costs(row)] for row in rows)]
    spreads = [["", *cells], *(_figures(row, _spread) for row in rows)]
    found = [("tokens/s, medians", medians), ("tokens/s, least and most of all repeats", spreads)]
    if compared := ratios(rows):
        lines = [[name, *(_ratio(of_cell.get(cell)) for cell in cells)] for name, of_cell in compared.items()]
        peers = ["best peer", *(_name(best_peer(rows, cell)) for cell in cells)]
        found.append(("over gRPC, as a multiple of the best peer", [["", *cells], *lines, peers]))
    return found


def best_peer(rows: Sequence[Row], cell: str) -> tuple[str, float] | None:
    """Its name and median; None where no peer has a figure."""
    medians = [(row.title, median) for row in rows if row.is_peer and (median := row.median(cell)) is not None]
    return max(medians, key=lambda one: one[1], default=None)


def ratios(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Of pdserve over gRPC to the best peer, by engine and cell, where both have a figure."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        for cell in row.tokens_per_s:
            best, ours = best_peer(rows, cell), row.median(cell)
            if row.is_over_grpc and best is not None and ours is not None:
                found.setdefault(row.title, {})[cell] = ours / best[1]
    return found


def failures(rows: Sequence[Row]) -> list[str]:
    return [f"{row.title}, {cell}: {FAILED}: {reason}" for row in rows for cell, reason in row.reasons.items()]


def _figures(row: Row, figure: Callable[[Row, str], str]) -> list[str]:
    return [row.title, *(FAILED if cell in row.reasons else figure(row, cell) for cell in row.tokens_per_s)]


def _median(row: Row, cell: str) -> str:
    return f"{statistics.median(row.tokens_per_s[cell]):.1f}"


def _spread(row: Row, cell: str) -> str:
    return f"{min(row.tokens_per_s[cell]):.1f}–{max(row.tokens_per_s[cell]):.1f}"


def _costs(row: Row) -> list[str]:
    """Blank where there is none: a tool that is called for each cell has no start."""
    started = f"{statistics.median(row.started_s):.1f}" if row.started_s else ""
    return [started, f"{max(row.peak_mib):,.0f}" if row.peak_mib else ""]


def _name(best: tuple[str, float] | None) -> str:
    return "none" if best is None else best[0]


def _ratio(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"
