"""`pdserve simulate --calibrate FILE`: measures what this machine costs on real nodes, and writes a cost file.

Controlled requests, times at the client, and a fit of their relative errors. Nothing else should run on the machine
meanwhile.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from pdserve.commands.arguments import read, written_file
from pdserve.commands.parsing import CommandParser


def main(argv: list[str]) -> int:
    """argv: `--calibrate FILE` and more. Shows how well the model fits, and writes the file."""
    arguments = read(_parser(), argv)
    # It takes seconds to import what computes; what is wrong with the arguments is told before.
    from pdserve.bench.calibration.run import run

    return run(Path(arguments.calibrate), arguments.model)


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
    parser.add_argument(
        "--calibrate", type=written_file("--calibrate"), metavar="FILE", required=True, help="the cost file to write"
    )
    parser.add_argument("--model", default="smollm2", help="what to serve (default: %(default)s)")
    return parser
