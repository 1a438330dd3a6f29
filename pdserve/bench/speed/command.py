"""`pdserve bench speed`: tokens a second of pdserve and of the other engines, in turns on the same cores."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from pdserve.bench.peers.installed import DIRECTORY, INSTALLED_BY, has_library, has_llama
from pdserve.bench.speed.arguments import FORMS, speed_parser
from pdserve.commands.arguments import one_of, read, written_file
from pdserve.commands.parsing import CommandParser
from pdserve.faults import Fault

OURS = ("engine", "fused", "pair")
# Whether each peer is there, by the folder of their environments.
PEERS: dict[str, Callable[[Path], bool]] = {
    "transformers": partial(has_library, name="transformers"),
    "ctranslate2-fp32": partial(has_library, name="ctranslate2"),
    "ctranslate2-int8": partial(has_library, name="ctranslate2"),
    "llama.cpp": lambda peers: has_llama(peers, "llama-bench", "llama-batched-bench"),
    "llama-server": lambda peers: has_llama(peers, "llama-server"),
    "vllm-fp32": partial(has_library, name="vllm"),
    "vllm-bf16": partial(has_library, name="vllm"),
}
# Their model is the embedded one's GGUF.
OF_THE_EMBEDDED_MODEL, EMBEDDED = ("llama.cpp", "llama-server"), "smollm2"


def main(argv: list[str]) -> int:
    """0, also where an engine failed in a cell: the table says so."""
    arguments = read(_parser(), argv, _not_installed)
    # It takes seconds to import what computes; what is wrong with the arguments is told before.
    from pdserve.bench.speed.run import run

    return run(arguments, chosen_engines(arguments), argv)


def chosen_engines(arguments: argparse.Namespace) -> list[str]:
    """Those asked for, or pdserve and all peers that are there."""
    if arguments.engines:
        return list(dict.fromkeys(arguments.engines))
    peers = Path(arguments.peers)
    return [*OURS, *(name for name, is_there in PEERS.items() if is_there(peers) and _has_model(name, arguments))]


def _not_installed(arguments: argparse.Namespace) -> Iterable[Fault]:
    for name in arguments.engines or ():
        if name in PEERS and not PEERS[name](Path(arguments.peers)):
            yield Fault("--engines", name, f"is not in {arguments.peers}; `{INSTALLED_BY}` installs it")
        elif not _has_model(name, arguments):
            yield Fault("--engines", name, f"runs the embedded model only; leave --model {arguments.model} out")


def _has_model(name: str, arguments: argparse.Namespace) -> bool:
    return name not in OF_THE_EMBEDDED_MODEL or arguments.model == EMBEDDED


def _parser() -> CommandParser:
    parser = speed_parser(
        "speed",
        "Tokens a second of prompts and of answers: pdserve's engine alone, a fused node and a pair of nodes over\n"
        "gRPC, and the other engines that are installed. A repeat starts each engine once, measures all cells and\n"
        "ends it, so that the repeats alternate. Only ratios within one run count; let nothing else run.",
        "pdserve bench speed --engines fused llama.cpp --quantization int4 --repeats 1",
        FORMS,
    )
    names = (*OURS, *PEERS)
    parser.add_argument(
        "--engines",
        nargs="+",
        type=one_of("--engines", names),
        metavar="ENGINE",
        help=f"of {', '.join(names)} (default: all that are installed)",
    )
    parser.add_argument(
        "--peers", default=DIRECTORY, metavar="DIR", help="the folder of the peers' environments (default: %(default)s)"
    )
    parser.add_argument(
        "--markdown",
        type=written_file("--markdown"),
        metavar="FILE",
        help="also write the tables into this file, between the lines that mark them",
    )
    return parser
