"""`pdserve bench fidelity`: the simulator against real nodes under the same requests."""

from __future__ import annotations

from pdserve.commands.arguments import one_of, parsed, read, real, whole
from pdserve.commands.parsing import CommandParser, add_json, command_parser
from pdserve.sim import cost_files

COSTS = "smollm2-cpu"
# Of the loads that real nodes are asked.
LOAD_NAMES = ("chat", "long", "burst")
ARRIVALS_S, QUICK_ARRIVALS_S = 60.0, 15.0


def main(argv: list[str]) -> int:
    """0 when every figure is within its tolerance."""
    arguments = read(_parser(), argv)
    # It takes seconds to import what computes; what is wrong with the arguments is told before.
    from pdserve.bench.fidelity.run import run

    return run(arguments)


def _parser() -> CommandParser:
    parser = command_parser(
        "bench fidelity",
        "",
        "The simulator against real nodes: three loads that no cost was fitted to, a fused node and a pair, the same\n"
        "requests at the same moments. Takes about 18 minutes with nothing else running; --quick 6.",
        "pdserve bench fidelity --costs my-machine.json",
    )
    parser.add_argument(
        "--costs",
        type=parsed("--costs", cost_files.load),
        metavar="NAME|FILE",
        default=COSTS,
        help="(default: smollm2-cpu)",
    )
    parser.add_argument("--model", default="smollm2", help="what to serve (default: %(default)s)")
    parser.add_argument(
        "--only",
        action="append",
        type=one_of("--only", LOAD_NAMES),
        metavar="|".join(LOAD_NAMES),
        help="may be repeated",
    )
    parser.add_argument(
        "--repeats", type=whole("--repeats", 2), default=2, metavar="N", help="real runs of each (default: %(default)s)"
    )
    parser.add_argument(
        "--seconds",
        type=real("--seconds", above=0),
        default=ARRIVALS_S,
        metavar="S",
        help="in which requests come (default: %(default)s)",
    )
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ARRIVALS_S:g} s of requests")
    add_json(parser)
    return parser
