"""`pdserve bench engine`: tokens a second of the engine alone, in this process, and where a round's time goes."""

from __future__ import annotations

import argparse
import resource
import statistics
from dataclasses import asdict

from rich.console import Console

from pdserve.bench.policy_runs import Model
from pdserve.bench.speed.arguments import chosen_cells, speed_parser
from pdserve.bench.speed.cells import Cell
from pdserve.bench.speed.engine_report import Form, Row, show
from pdserve.bench.speed.in_process import Engine, Profile
from pdserve.bench.speed.limits import Limits, compare, measure_limits
from pdserve.bench.speed.model_size import model_size
from pdserve.bench.speed.quality import judge, prose
from pdserve.bench.speed.scaling import measure_scaling
from pdserve.bench.speed.scaling_report import scaling_table
from pdserve.commands.arguments import read, whole
from pdserve.commands.parsing import CommandParser
from pdserve.commands.tables import write_json
from pdserve.config import Quantization, cache_dir
from pdserve.config.environment import num_cores
from pdserve.engine.tokenizer import HfTokenizer
from pdserve.model import hub
from pdserve.model.model_config import read_config
from pdserve.model.native_build import NativeUnavailable
from pdserve.model.progress import Progress, show_progress
from pdserve.request import TokenLogprobs

Figures = dict[str, object]


def main(argv: list[str]) -> int:
    """0."""
    arguments = read(_parser(), argv)
    console = Console(highlight=False, stderr=arguments.json == "-")
    with show_progress() as progress:
        model = Model.of(hub.resolve(arguments.model, progress=progress))
        measure = _measure_scaling if arguments.scaling else _measure_cells
        figures = measure(model, arguments, console, progress)
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    console.print(f"{arguments.threads} threads; at most {peak_mib:,.0f} MiB resident")
    if arguments.json:
        write_json(arguments.json, {"threads": arguments.threads, "peak_mib": peak_mib} | figures)
    return 0


def _measure_scaling(model: Model, arguments: argparse.Namespace, console: Console, progress: Progress) -> Figures:
    found = [
        measure_scaling(model.directory, quantization, model.text, arguments.threads, progress)
        for quantization in arguments.quantization
    ]
    console.print(scaling_table(found))
    return {"scaling": [scaling.figures() for scaling in found]}


def _measure_cells(model: Model, arguments: argparse.Namespace, console: Console, progress: Progress) -> Figures:
    limits = _known_limits(model, arguments.threads, console)
    most_tokens = read_config(model.directory).max_position_embeddings - 1
    text = HfTokenizer(model.directory).encode(prose())[:most_tokens]
    forms: list[Form] = []
    exact: list[TokenLogprobs] | None = None
    # fp32 first: the others are judged by it.
    for quantization in sorted(arguments.quantization, key=lambda form: form != "fp32"):
        engine = _load(model, quantization, arguments, len(text))
        entries = engine.read(text)
        exact = entries if quantization == "fp32" else exact
        quality = judge(entries, exact)
        forms.append(Form(quantization, quality, engine.loaded_s, _rows(engine, model, arguments, limits, progress)))
    show(forms, console)
    return {"limits": limits and asdict(limits), "forms": [asdict(form) for form in forms]}


def _known_limits(model: Model, num_threads: int, console: Console) -> Limits | None:
    """Printed; or why they are not known."""
    if read_config(model.directory).experts is not None:
        console.print("no limits: which weights a mixture of experts reads is up to its tokens")
        return None
    try:
        limits = measure_limits(num_threads, cache_dir())
    except NativeUnavailable as reason:
        console.print(f"no limits: {reason}")
        return None
    console.print(str(limits))
    return limits


def _load(model: Model, quantization: Quantization, arguments: argparse.Namespace, num_text_tokens: int) -> Engine:
    cells = chosen_cells(arguments)
    return Engine(
        model.directory,
        quantization,
        max_tokens=max(num_text_tokens, *(cell.total_tokens for cell in cells)),
        max_num_seqs=max(cell.num_streams for cell in cells),
        num_threads=arguments.threads,
    )


def _rows(
    engine: Engine, model: Model, arguments: argparse.Namespace, limits: Limits | None, progress: Progress
) -> tuple[Row, ...]:
    cells, rows = chosen_cells(arguments), []
    for number, cell in enumerate(cells):
        progress(f"{engine.quantization} cells", number, len(cells))
        rows.append(_measure(engine, model, cell, arguments.repeats, limits))
    progress(f"{engine.quantization} cells", len(cells), len(cells))
    return tuple(rows)


def _measure(engine: Engine, model: Model, cell: Cell, repeats: int, limits: Limits | None) -> Row:
    """The first repetition warms up, the last has its parts timed; neither's speed counts."""
    engine.hear_all(cell.calls(model.text, 0))
    speeds = [cell.tokens_per_s(engine.hear_all(cell.calls(model.text, repeat + 1))) for repeat in range(repeats)]
    profile = engine.profile = Profile()
    with profile.watching():
        engine.hear_all(cell.calls(model.text, repeats + 1))
    compared = None
    if limits is not None:
        size = model_size(read_config(model.directory), engine.quantization)
        compared = compare(size, limits, cell, statistics.median(speeds))
    return Row(cell.name, tuple(speeds), 1e3 * profile.rounds_s / profile.num_rounds, profile.shares(), compared)


def _parser() -> CommandParser:
    purpose = __doc__.partition(": ")[2]
    parser = speed_parser("engine", purpose, "pdserve bench engine --quantization int4 --repeats 1", ["fp32"])
    threads = whole("--threads", least=1, most=1024)
    parser.add_argument("--threads", type=threads, default=num_cores(), metavar="N", help="default: %(default)s")
    scaling = "what a round takes by its rows and their context, instead of the cells"
    parser.add_argument("--scaling", action="store_true", help=scaling)
    return parser
