"""`pdserve bench serve`: tokens a second of real nodes over gRPC, fused and as a prefill with a decode node."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from pdserve.bench.deployed import Deployed, fused, pair
from pdserve.bench.policy_runs import Model
from pdserve.bench.speed.arguments import chosen_cells, speed_parser
from pdserve.bench.speed.cells import Cell
from pdserve.commands.tables import write_json
from pdserve.model import hub
from pdserve.model.progress import show_progress
from pdserve.node_process import interrupted_by_sigterm

DEPLOYMENTS: dict[str, Callable[..., AbstractContextManager[Deployed]]] = {"fused": fused, "pair": pair}


@dataclass(frozen=True, slots=True)
class Row:
    """One cell of one deployment. tokens_per_s: of each repetition."""

    deployment: str
    quantization: str
    cell: str
    tokens_per_s: tuple[float, ...]


def main(argv: list[str]) -> int:
    """0."""
    arguments = _parser().parse_args(argv)
    cells = chosen_cells(arguments)
    kinds = [(name, form) for form in arguments.quantization for name in arguments.deployments]
    rows: list[Row] = []
    console = Console(highlight=False, stderr=arguments.json == "-")
    with interrupted_by_sigterm(), show_progress() as progress:
        model = Model.of(hub.resolve(arguments.model, progress=progress))
        for number, (deployment, quantization) in enumerate(kinds):
            progress("deployments", number, len(kinds))
            rows += _measure(deployment, quantization, model, cells, arguments.repeats)
        progress("deployments", len(kinds), len(kinds))
    _show(rows, console)
    if arguments.json:
        write_json(arguments.json, [asdict(row) for row in rows])
    return 0


def _measure(deployment: str, quantization: str, model: Model, cells: Sequence[Cell], repeats: int) -> list[Row]:
    """Every cell once to warm up, then all of them in turn, as often as is asked."""
    settings: dict[str, Any] = {"quantization": quantization, "max_num_seqs": max(cell.num_streams for cell in cells)}
    speeds: dict[str, list[float]] = {cell.name: [] for cell in cells}
    with DEPLOYMENTS[deployment](model, **settings) as node:
        for repeat in range(repeats + 1):
            for cell in cells:
                speed = cell.tokens_per_s(node.hear_all(cell.calls(model.text, repeat)))
                speeds[cell.name] += [speed] if repeat else []
    return [Row(deployment, quantization, name, tuple(found)) for name, found in speeds.items()]


def _show(rows: Sequence[Row], console: Console) -> None:
    table = Table("nodes", "weights", "", "tokens/s", "of all repeats", box=SIMPLE)
    for row in rows:
        spread = f"{min(row.tokens_per_s):.1f} to {max(row.tokens_per_s):.1f}"
        median = f"{statistics.median(row.tokens_per_s):.1f}"
        table.add_row(row.deployment, row.quantization, row.cell, median, spread)
    console.print(table)


def _parser() -> argparse.ArgumentParser:
    parser = speed_parser("serve", __doc__.partition(": ")[2])
    parser.add_argument(
        "--deployments",
        nargs="+",
        choices=list(DEPLOYMENTS),
        default=list(DEPLOYMENTS),
        help="one node with all cores; a prefill and a decode node with a core each (default: both)",
    )
    return parser
