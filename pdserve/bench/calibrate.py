"""`pdserve simulate --calibrate FILE`: measures what this machine costs on real nodes, and writes a cost file.

Controlled requests, times at the client, and a fit of their relative errors. Nothing else should run on the machine
meanwhile.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from pdserve.bench.calibration.measure import calibrate
from pdserve.bench.policy_runs import Model
from pdserve.commands.parsing import CommandParser
from pdserve.errors import StartupError
from pdserve.model import hub
from pdserve.model.progress import show_progress
from pdserve.node_process import interrupted_by_sigterm
from pdserve.sim import cost_files


def main(argv: list[str]) -> int:
    """argv: `--calibrate FILE` and more. Shows how well the model fits, and writes the file."""
    arguments = _parser().parse_args(argv)
    path = Path(arguments.calibrate)
    if not path.parent.is_dir():  # before five minutes are spent
        raise StartupError(f"--calibrate {path}: there is no directory {path.parent}; make it first")
    console = Console(highlight=False)
    with interrupted_by_sigterm(), show_progress() as progress:
        model = Model.of(hub.resolve(arguments.model, progress=progress))
        name = path.name.removesuffix(cost_files.ENDING)
        found, table = calibrate(model, name, arguments.model, progress)
    console.print(table)
    cost_files.save(found, path)
    console.print(f"wrote {path}; use it with --costs {path}")
    return 0


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="pdserve simulate",
        usage="pdserve simulate --calibrate FILE [--model MODEL]",
        description="Measure on real nodes what this machine costs the simulator, about 5 minutes with nothing else\n"
        "running, and write a cost file.",
        epilog="example:\n  pdserve simulate --calibrate my-machine.json",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--calibrate", metavar="FILE", required=True, help="the cost file to write")
    parser.add_argument("--model", default="smollm2", help="what to serve (default: %(default)s)")
    return parser
