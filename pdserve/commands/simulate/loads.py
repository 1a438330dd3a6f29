"""`pdserve simulate poisson|closed`: made-up traffic, of callers who come by chance or of users who wait."""

from __future__ import annotations

import argparse
from functools import partial

from pdserve.commands.arguments import parsed, real, whole
from pdserve.commands.simulate.flags import Asked, read_flags, simulate_parser
from pdserve.commands.simulate.output import run_and_tell
from pdserve.config import flags
from pdserve.sim.arrivals import ClosedLoop, OpenLoop, Shape
from pdserve.sim.lengths import FORMS, parse_lengths

PROMPT, OUTPUT = "lognormal:512:1.0:4096", "lognormal:128:0.7:1024"
NUM_REQUESTS = 1000
# Half of what two cores do with the small model.
RATE = 0.2


def poisson(argv: list[str]) -> int:
    """An open loop; 1 where requests failed."""
    parser = simulate_parser(
        "pdserve simulate poisson",
        "Requests by chance, so many a second whatever the answers take.",
        "pdserve simulate poisson --rate 0.3 --prompt-tokens lognormal:512:1.0:4096 --decode-interleave-every 8",
    )
    group = _add_shape_flags(parser)
    group.add_argument("--rate", type=real("--rate", above=0), metavar="X", help=f"requests a second (default: {RATE})")
    group.add_argument(
        "--burstiness",
        type=real("--burstiness", above=0),
        metavar="X",
        help="shape of the gaps' gamma distribution: 1 = Poisson (default), less = bursts",
    )
    asked = read_flags(argv, parser)
    own = vars(asked.own)
    rate, burstiness = own.get("rate", RATE), own.get("burstiness", 1.0)
    workload = OpenLoop(rate, own.get("requests", NUM_REQUESTS), _shape(asked), burstiness, asked.seed)
    bursts = "" if burstiness == 1 else f", burstiness {burstiness:g}"
    return run_and_tell(asked, workload, f"{workload.num_requests:,} requests, {rate:g} a second{bursts}")


def closed(argv: list[str]) -> int:
    """A closed loop; 1 where requests failed."""
    parser = simulate_parser(
        "pdserve simulate closed",
        "Users who ask, read, think and ask again.",
        "pdserve simulate closed --users 16 --think-s 5 --requests 500",
    )
    group = _add_shape_flags(parser)
    group.add_argument("--users", type=whole("--users", 1), metavar="N", help="how many (default: 8)")
    group.add_argument(
        "--think-s",
        type=real("--think-s", least=0),
        metavar="S",
        help="mean of the pause before each question (default: 0)",
    )
    asked = read_flags(argv, parser)
    own = vars(asked.own)
    users, num_requests, think_s = own.get("users", 8), own.get("requests", NUM_REQUESTS), own.get("think_s", 0.0)
    workload = ClosedLoop(users, num_requests, _shape(asked), think_s, asked.seed)
    return run_and_tell(asked, workload, f"{num_requests:,} requests of {users:,} users, thinking {think_s:g} s")


def _add_shape_flags(parser: flags.FlagParser) -> argparse._ArgumentGroup:
    group = parser.add_argument_group("Traffic", f"lengths: {FORMS}")
    group.add_argument(
        "--requests", type=whole("--requests", 1), metavar="N", help=f"how many in all (default: {NUM_REQUESTS})"
    )
    for flag, default in (("--prompt-tokens", PROMPT), ("--output-tokens", OUTPUT)):
        lengths = parsed(flag, partial(parse_lengths, flag=flag))
        group.add_argument(flag, type=lengths, metavar="LENGTH", help=f"(default: {default})")
    return group


def _shape(asked: Asked) -> Shape:
    own = vars(asked.own)
    prompt, output = own.get("prompt_tokens"), own.get("output_tokens")
    return Shape(
        prompt or parse_lengths(PROMPT, "--prompt-tokens"),
        output or parse_lengths(OUTPUT, "--output-tokens"),
    )
