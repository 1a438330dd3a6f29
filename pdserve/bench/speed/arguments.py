"""What both benches of speed are told on the command line."""

from __future__ import annotations

import argparse
from typing import get_args

from pdserve.bench.speed.cells import CELLS, QUICK, Cell
from pdserve.commands.arguments import whole
from pdserve.config import Quantization


def speed_parser(name: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"pdserve bench {name}", description=description)
    parser.add_argument("--model", default="smollm2", help="as `pdserve serve` takes it (default: %(default)s)")
    forms = get_args(Quantization)
    parser.add_argument("--quantization", nargs="+", choices=forms, default=["fp32"], help="default: fp32")
    parser.add_argument(
        "--repeats",
        type=whole("--repeats", least=1, most=100),
        default=3,
        metavar="N",
        help="the median counts (default: %(default)s)",
    )
    parser.add_argument(
        "--cells", nargs="+", choices=[cell.name for cell in CELLS], metavar="CELL", help=f"default: {', '.join(QUICK)}"
    )
    parser.add_argument("--json", metavar="FILE", help="also write the figures as JSON; - is standard output")
    return parser


def chosen_cells(arguments: argparse.Namespace) -> list[Cell]:
    return [cell for cell in CELLS if cell.name in (arguments.cells or QUICK)]
