"""`pdserve bench engine`: tokens a second of the engine alone, in this process, and where a round's time goes."""

from __future__ import annotations

import argparse
import resource
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from pdserve.bench.policy_runs import Model
from pdserve.bench.speed.arguments import chosen_cells, speed_parser
from pdserve.bench.speed.cells import Cell
from pdserve.bench.speed.in_process import Engine, Profile
from pdserve.commands.arguments import read, whole
from pdserve.commands.parsing import CommandParser
from pdserve.commands.tables import write_json
from pdserve.config import Quantization
from pdserve.config.environment import num_cores
from pdserve.model import hub
from pdserve.model.progress import Progress, show_progress

# Of the text that the quality is taken from.
NUM_TEXT_TOKENS = 4000


@dataclass(frozen=True, slots=True)
class Row:
    """One cell. tokens_per_s: of each repetition. round_ms: mean. shares: of the rounds' time, by part."""

    cell: str
    tokens_per_s: tuple[float, ...]
    round_ms: float
    shares: dict[str, float]


@dataclass(frozen=True, slots=True)
class Form:
    """One form of the weights. nll: mean -log(probability) of a text's tokens, in nats."""

    quantization: str
    nll: float
    loaded_s: float
    rows: tuple[Row, ...]


def main(argv: list[str]) -> int:
    """0."""
    arguments = read(_parser(), argv)
    cells = chosen_cells(arguments)
    console = Console(highlight=False, stderr=arguments.json == "-")
    with show_progress() as progress:
        model = Model.of(hub.resolve(arguments.model, progress=progress))
        forms = []
        for quantization in arguments.quantization:
            forms.append(_measure_form(quantization, model, cells, arguments, progress))
    _show(forms, console)
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    console.print(f"{arguments.threads} threads; at most {peak_mib:,.0f} MiB resident")
    if arguments.json:
        figures = {"threads": arguments.threads, "peak_mib": peak_mib}
        write_json(arguments.json, figures | {"forms": [asdict(form) for form in forms]})
    return 0


def _measure_form(
    quantization: Quantization, model: Model, cells: Sequence[Cell], arguments: argparse.Namespace, progress: Progress
) -> Form:
    engine = Engine(
        model.directory,
        quantization,
        max_tokens=max(NUM_TEXT_TOKENS, *(cell.total_tokens for cell in cells)),
        max_num_seqs=max(cell.num_streams for cell in cells),
        num_threads=arguments.threads,
    )
    nll = engine.nll(model.text[:NUM_TEXT_TOKENS])
    rows = []
    for number, cell in enumerate(cells):
        progress(f"{quantization} cells", number, len(cells))
        rows.append(_measure(engine, model, cell, arguments.repeats))
    progress(f"{quantization} cells", len(cells), len(cells))
    return Form(quantization, nll, engine.loaded_s, tuple(rows))


def _measure(engine: Engine, model: Model, cell: Cell, repeats: int) -> Row:
    """The first repetition warms up, the last has its parts timed; neither's speed counts."""
    engine.hear_all(cell.calls(model.text, 0))
    speeds = [cell.tokens_per_s(engine.hear_all(cell.calls(model.text, repeat + 1))) for repeat in range(repeats)]
    profile = engine.profile = Profile()
    with profile.watching():
        engine.hear_all(cell.calls(model.text, repeats + 1))
    return Row(cell.name, tuple(speeds), 1e3 * profile.rounds_s / profile.num_rounds, profile.shares())


def _show(forms: Sequence[Form], console: Console) -> None:
    speeds = Table("weights", "", "tokens/s", "of all repeats", "round, ms", box=SIMPLE)
    for form in forms:
        for row in form.rows:
            spread = f"{min(row.tokens_per_s):.1f} to {max(row.tokens_per_s):.1f}"
            median = f"{statistics.median(row.tokens_per_s):.1f}"
            speeds.add_row(form.quantization, row.cell, median, spread, f"{row.round_ms:.1f}")
    console.print(speeds)
    parts = list(dict.fromkeys(part for form in forms for row in form.rows for part in row.shares))
    shares = Table("weights", "% of a round", *parts, box=SIMPLE)
    for form in forms:
        for row in form.rows:
            shares.add_row(form.quantization, row.cell, *(f"{100 * row.shares.get(part, 0.0):.0f}" for part in parts))
    console.print(shares)
    quality = Table("weights", "nll, nats a token", "loaded in, s", box=SIMPLE)
    for form in forms:
        quality.add_row(form.quantization, f"{form.nll:.4f}", f"{form.loaded_s:.1f}")
    console.print(quality)


def _parser() -> CommandParser:
    purpose = __doc__.partition(": ")[2]
    parser = speed_parser("engine", purpose, "pdserve bench engine --quantization int4 --repeats 1", ["fp32"])
    threads = whole("--threads", least=1, most=1024)
    parser.add_argument("--threads", type=threads, default=num_cores(), metavar="N", help="default: %(default)s")
    return parser
