"""`pdserve bench serve`: servers under load, judged by what their clients saw."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, get_args

from pdserve.bench.peers import installed
from pdserve.commands.arguments import one_of, parsed, picture, read, read_file, real, refuse, whole, written_file
from pdserve.commands.parsing import CommandParser, add_json, command_parser, targets
from pdserve.config import QuantizationSetting
from pdserve.config.fields import FIELDS
from pdserve.config.sources import read_layers
from pdserve.errors import StartupError
from pdserve.faults import Fault
from pdserve.sim.lengths import FORMS, parse_lengths

OURS, LLAMA = ("fused", "pair"), "llama-server"
# By what weights and arithmetic are.
VLLM = {"vllm-fp32": "float32", "vllm-bf16": "bfloat16"}
PEERS: dict[str, Callable[[Path], bool]] = {
    **dict.fromkeys(VLLM, lambda peers: installed.has_library(peers, "vllm")),
    LLAMA: lambda peers: installed.has_llama(peers, LLAMA),
}
MODEL = "smollm2"
SET_OTHERWISE = ("model", "role", "port", "quantization", "num_threads", "prefill_peers", "drain_timeout_s")
STREAMS, SECONDS = (2, 8, 32), 60.0
MOST_STREAMS, MOST_REQUESTS, MOST_REPEATS, MOST_TOKENS = 256, 100_000, 20, 1_000_000
PROMPT, OUTPUT = "lognormal:300:0.9:1500", "uniform:32:128"


def main(argv: list[str]) -> int:
    """0; 1 where a server did not serve to the end, or answered nothing under some load."""
    arguments = read(_parser(), argv, _faults)
    # It takes seconds to import what computes; what is wrong with the arguments is told before.
    from pdserve.bench.serve.run import run

    return run(arguments, argv)


def parse_setting(text: str) -> tuple[str, Any]:
    """A field of `pdserve serve` and its value. Raises StartupError for what is none, or what is set otherwise."""
    name, _, value = text.partition("=")
    if name not in FIELDS or name in SET_OTHERWISE:
        raise StartupError("give FIELD=VALUE of a flag of `pdserve serve` that is not set otherwise here")
    settings, faults = read_layers({"model": MODEL, name: value})
    refuse(faults)
    return name, getattr(settings, name)


def chosen_streams(arguments: argparse.Namespace) -> list[int]:
    """Of the closed loops, each once; none where only other loads are named."""
    has_others = bool(arguments.rate) or arguments.trace is not None
    return list(dict.fromkeys(arguments.streams or (() if has_others else STREAMS)))


def _faults(arguments: argparse.Namespace) -> Iterable[Fault]:
    if arguments.address is not None:
        for name in ("servers", "quantization", "set", "model"):
            if getattr(arguments, name):
                yield Fault(f"--{name}", getattr(arguments, name), "is of servers to start; leave it or --address out")
    most = max(chosen_streams(arguments), default=0)
    if arguments.long_prompt is not None and not most:
        yield Fault("--long-prompt", arguments.long_prompt, "arrives beside streams; give --streams too")
    if arguments.requests is not None and arguments.requests < most:
        yield Fault("--requests", arguments.requests, f"can't keep {most} streams busy; give more, or --seconds")
    yield from _missing_peers(arguments)


def _missing_peers(arguments: argparse.Namespace) -> Iterable[Fault]:
    named = [name for name in PEERS if name in (arguments.servers or ())]
    for name in named:
        if not PEERS[name](Path(arguments.peers)):
            yield Fault("--servers", name, f"isn't in {arguments.peers}; `{installed.INSTALLED_BY}` installs it")
    if LLAMA in named and arguments.model not in (None, MODEL):
        yield Fault("--model", arguments.model, f"is not what {LLAMA} serves, which is {MODEL}; leave one of them out")


def _parser() -> CommandParser:
    parser = command_parser(
        "bench serve",
        "",
        "The same requests to each server, greedy and of exactly the asked length, and what clients saw: TTFT, ITL,\n"
        "TPOT and end to end at p50, p90 and p99, tokens/s, CPU and memory of the server's processes. goodput is the\n"
        "share of requests (and their number a second) with a TTFT within --slo-ttft-ms and a mean gap between tokens\n"
        "within --slo-itl-ms; strict goodput asks that of every gap, as a reader feels a freeze that a mean hides.\n"
        "Requests that fail or are refused count as not good, and the run goes on. CPU and memory are of the server's\n"
        "processes together; memory is the largest sum of their proportional set sizes (PSS), one look a second.",
        "pdserve bench serve --servers fused pair --quantization int4 --streams 2 8 --long-prompt 6000 --png serve.png",
    )
    _add_servers(parser)
    _add_loads(parser)
    _add_output(parser)
    return parser


def _add_servers(parser: CommandParser) -> None:
    group = parser.add_argument_group("Servers")
    names = [*OURS, *PEERS]
    group.add_argument(
        "--servers",
        nargs="+",
        type=one_of("--servers", names),
        metavar="NAME",
        help=f"in turns, of {', '.join(names)} (default: fused and pair)",
    )
    forms = get_args(QuantizationSetting)
    group.add_argument(
        "--quantization",
        nargs="+",
        type=one_of("--quantization", forms),
        metavar="|".join(forms),
        help="of fused and pair; several are as many servers (default: auto)",
    )
    group.add_argument(
        "--set",
        nargs="+",
        type=parsed("--set", parse_setting),
        default=[],
        metavar="FIELD=VALUE",
        help="settings of fused, such as decode_interleave_every=8",
    )
    group.add_argument("--model", help=f"what to serve (default: {MODEL})")
    group.add_argument(
        "--peers",
        default=installed.DIRECTORY,
        metavar="DIR",
        help=f"where the other engines are (default: %(default)s, by `{installed.INSTALLED_BY}`)",
    )
    group.add_argument(
        "--address",
        type=targets("--address"),
        metavar="HOST:PORT",
        help="instead: a pdserve node that runs already; several, comma separated, take turns",
    )
    group.add_argument(
        "--repeats",
        type=whole("--repeats", 1, MOST_REPEATS),
        default=1,
        metavar="N",
        help="turns; medians count (default: %(default)s)",
    )


def _add_loads(parser: CommandParser) -> None:
    group = parser.add_argument_group("Loads", f"lengths: {FORMS}")
    group.add_argument(
        "--streams",
        nargs="+",
        type=whole("--streams", 1, MOST_STREAMS),
        metavar="N",
        help="so many clients, each asks when it has been answered (default: 2 8 32 if no other load is given)",
    )
    group.add_argument(
        "--rate",
        nargs="+",
        type=real("--rate", above=0, most=1000),
        default=[],
        metavar="R",
        help="requests a second on average, at random moments (Poisson), whoever has been answered",
    )
    group.add_argument(
        "--trace",
        type=read_file("--trace"),
        metavar="FILE",
        help="recorded traffic in Mooncake's format; other engines' prefix caches are off",
    )
    group.add_argument(
        "--rate-scale",
        type=real("--rate-scale", above=0),
        default=0.1,
        metavar="X",
        help="of the trace: 2 = arrivals twice as dense (default: %(default)s)",
    )
    group.add_argument(
        "--length-scale",
        type=real("--length-scale", above=0, most=10),
        default=0.05,
        metavar="X",
        help="of the trace: 2 = prompts, their common pieces and answers twice as long (default: %(default)s)",
    )
    group.add_argument(
        "--long-prompt",
        type=whole("--long-prompt", 1, MOST_TOKENS),
        metavar="TOKENS",
        help="also each number of streams with one prompt of so many tokens that arrives beside them",
    )
    group.add_argument(
        "--seconds",
        type=real("--seconds", above=0, most=86_400),
        metavar="S",
        help=f"in which each load asks (default: {SECONDS:g} without --requests)",
    )
    group.add_argument(
        "--requests", type=whole("--requests", 1, MOST_REQUESTS), metavar="N", help="of each load, at most"
    )
    for flag, default, what in (("--prompt-tokens", PROMPT, "prompts"), ("--output-tokens", OUTPUT, "answers")):
        lengths = partial(parse_lengths, flag=flag)
        group.add_argument(
            flag,
            type=parsed(flag, lengths),
            default=lengths(default),
            metavar="LENGTH",
            help=f"of {what} but a trace's (default: {default})",
        )
    group.add_argument(
        "--seed",
        type=whole("--seed", 0),
        default=0,
        metavar="N",
        help="of lengths, prompts and moments; a node at --address may have the prompts of a seed in its cache by then",
    )
    group.add_argument(
        "--timeout-s",
        type=real("--timeout-s", above=0, most=900),
        default=300.0,
        metavar="S",
        help="a request without a whole answer by then has failed (default: %(default)s)",
    )


def _add_output(parser: CommandParser) -> None:
    group = parser.add_argument_group("Output")
    for flag, default, what in (
        ("--slo-ttft-ms", 2000.0, "longest time to first token"),
        ("--slo-itl-ms", 150.0, "longest mean gap between tokens; strictly: longest gap"),
    ):
        group.add_argument(
            flag, type=real(flag, above=0), default=default, metavar="MS", help=f"{what} (default: {default:g})"
        )
    group.add_argument("--png", type=picture("--png"), metavar="FILE", help="draw how TTFT and gaps are distributed")
    group.add_argument("--markdown", type=written_file("--markdown"), metavar="FILE", help="write the tables")
    add_json(parser)
