"""`pdserve bench flags`: what scheduling flags are worth on real nodes, beside what the simulator says of them."""

from __future__ import annotations

from collections.abc import Iterable

from pdserve.commands.arguments import one_of, real, whole
from pdserve.commands.simulate.flags import Asked, read_flags, simulate_parser
from pdserve.config import flags
from pdserve.faults import Fault
from pdserve.sim.presets import PRESETS

LOAD, NUM_REQUESTS, REPEATS = 0.7, 40, 2


def main(argv: list[str]) -> int:
    """0 when the given flags beat those of the cost file on the real nodes, by goodput of all repetitions together."""
    asked = read_flags(argv, _parser(), more=_misplaced)
    # It takes seconds to import what computes; what is wrong with the arguments is told before.
    from pdserve.bench.flags.run import run

    return run(asked)


def _misplaced(asked: Asked) -> Iterable[Fault]:
    if not asked.has_knobs:
        yield Fault("the command line", None, "has no scheduling flag to compare; give those that tune named")
    if asked.deployment.num_ranks != 1 or asked.deployment.is_split:
        yield Fault("--num-nodes", None, "real nodes have one rank here; leave out the counts of nodes and ranks")


def _parser() -> flags.FlagParser:
    parser = simulate_parser(
        "pdserve bench flags",
        "The same requests to real nodes as the cost file's deployment has them, and with the flags given here.",
        "pdserve bench flags --workload chat --slo-ttft-ms 8000 --slo-itl-ms 400 --prefill-decode-interval 4",
        draws=False,
    )
    group = parser.add_argument_group("Traffic")
    kinds = "; ".join(f"{one.name}: {one.summary}" for one in PRESETS.values())
    group.add_argument(
        "--workload", type=one_of("--workload", PRESETS), metavar="|".join(PRESETS), help=f"{kinds} (default: chat)"
    )
    group.add_argument(
        "--load",
        type=real("--load", above=0, most=10),
        metavar="SHARE",
        help=f"of what the default can take (default: {LOAD})",
    )
    group.add_argument(
        "--requests", type=whole("--requests", 1), metavar="N", help=f"of each run (default: {NUM_REQUESTS})"
    )
    group.add_argument("--repeats", type=whole("--repeats", 1), metavar="N", help=f"runs of each (default: {REPEATS})")
    group.add_argument("--model", metavar="MODEL", dest="served_model", help="what to serve (default: smollm2)")
    return parser
