"""`pdserve bench interference`: a stream and a long prompt on real nodes, policy by policy, beside the simulator."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable

from pdserve.bench.interference.cases import QUICK, Experiment
from pdserve.commands.arguments import parsed, picture, read, whole
from pdserve.commands.parsing import CommandParser, add_json, command_parser
from pdserve.faults import Fault
from pdserve.sim import cost_files


def main(argv: list[str]) -> int:
    """0 when every check is met; with --quick the times are shown and not judged."""
    arguments = read(_parser(), argv, _too_long)
    # It takes seconds to import what computes; what is wrong with the arguments is told before.
    from pdserve.bench.interference.run import run

    return run(arguments, _experiment(arguments))


def _experiment(arguments: argparse.Namespace) -> Experiment:
    experiment = QUICK if arguments.quick else Experiment()
    given = {name: getattr(arguments, name) for name in ("num_chunks", "chunk") if getattr(arguments, name) is not None}
    return dataclasses.replace(experiment, **given)


def _too_long(arguments: argparse.Namespace) -> Iterable[Fault]:
    """A prompt that no node of the experiment could hold beside the stream."""
    one = _experiment(arguments)
    room = one.num_kv_blocks * one.block_size - one.victim_prompt - one.num_streamed - 2 * one.block_size
    if one.attacker_prompt > room:
        reason = f"with --chunk {one.chunk} the prompt has {one.attacker_prompt:,} tokens, the nodes hold {room:,}"
        yield Fault("--num-chunks", one.num_chunks, f"{reason}; give fewer or smaller ones")


def _parser() -> CommandParser:
    parser = command_parser(
        "bench interference",
        "",
        "One stream beside one long prompt on real nodes: the stream's gaps without a policy, with each, and with\n"
        "prefill and decode on nodes of their own. Takes about 15 minutes with nothing else running; --quick 3.",
        "pdserve bench interference --costs smollm2-cpu --png gaps.png",
    )
    parser.add_argument("--model", default="smollm2", help="what to serve (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="18 chunks instead of 58; times are not judged")
    parser.add_argument(
        "--repeats",
        type=whole("--repeats", 1),
        default=3,
        metavar="N",
        help="of what is compared in seconds (default: %(default)s)",
    )
    parser.add_argument("--num-chunks", type=whole("--num-chunks", 1), metavar="N", help="of the prompt (default: 58)")
    parser.add_argument("--chunk", type=whole("--chunk", 1), metavar="N", help="its tokens (default: 128)")
    parser.add_argument(
        "--costs",
        type=parsed("--costs", cost_files.load),
        metavar="NAME|FILE",
        help="also simulate each row with these costs",
    )
    parser.add_argument("--png", type=picture("--png"), metavar="FILE", help="draw the gaps over time")
    add_json(parser)
    return parser
