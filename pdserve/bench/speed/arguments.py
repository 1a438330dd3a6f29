"""What both benches of speed are told on the command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import get_args

from pdserve.bench.speed.cells import CELLS, QUICK, Cell
from pdserve.commands.arguments import one_of, whole
from pdserve.commands.parsing import CommandParser, add_json, command_parser
from pdserve.config import Quantization

FORMS: tuple[Quantization, ...] = get_args(Quantization)


def speed_parser(name: str, purpose: str, example: str, forms: Sequence[Quantization]) -> CommandParser:
    """forms: the weights' where none are given."""
    parser = command_parser(f"bench {name}", "", purpose, example)
    parser.add_argument("--model", default="smollm2", help="as `pdserve serve` takes it (default: %(default)s)")
    parser.add_argument(
        "--quantization",
        nargs="+",
        type=one_of("--quantization", FORMS),
        default=list(forms),
        metavar="|".join(FORMS),
        help=f"forms of pdserve's weights (default: {' '.join(forms)})",
    )
    parser.add_argument(
        "--repeats",
        type=whole("--repeats", least=1, most=100),
        default=3,
        metavar="N",
        help="the median counts (default: %(default)s)",
    )
    parser.add_argument(
        "--cells",
        nargs="+",
        type=one_of("--cells", [cell.name for cell in CELLS]),
        default=list(QUICK),
        metavar="CELL",
        help=f"of {', '.join(cell.name for cell in CELLS)} (default: {', '.join(QUICK)})",
    )
    add_json(parser)
    return parser


def chosen_cells(arguments: argparse.Namespace) -> list[Cell]:
    return [cell for cell in CELLS if cell.name in arguments.cells]
