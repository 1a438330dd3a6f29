"""What the client commands' parsers have in common."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from typing import NoReturn, cast

from pdserve.client import Client, GenerateOptions
from pdserve.errors import NotReady, StartupError

DEFAULT_TARGET = "127.0.0.1:50051"
# How gRPC begins what it says of an address where nobody listens.
UNREACHABLE = "failed to connect to all addresses"


class CommandParser(argparse.ArgumentParser):
    """Takes no abbreviations, and says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        raise StartupError(f"{message}; see {self.prog} --help")


def command_parser(name: str, arguments: str, purpose: str, example: str) -> CommandParser:
    """A parser whose help ends with an example."""
    return CommandParser(
        prog=f"pdserve {name}",
        usage=f"pdserve {name} {arguments} [flags]".replace("  ", " "),
        description=purpose,
        epilog=f"example:\n  {example}",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_target(parser: argparse.ArgumentParser) -> None:
    """The node to ask."""
    parser.add_argument(
        "--target",
        metavar="HOST:PORT",
        default=DEFAULT_TARGET,
        help="a fused or decode node; several, comma separated, take turns (default: %(default)s)",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """The same figures for a program."""
    parser.add_argument("--json", metavar="FILE", help="write the figures as JSON; - is standard output")


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """How the answer's tokens are chosen. A flag that isn't given is left to the node."""
    group = parser.add_argument_group("Sampling")
    for flag, kind, text in (
        ("--max-new-tokens", int, "longest answer in tokens"),
        ("--min-new-tokens", int, "shortest answer in tokens"),
        ("--temperature", float, "0 takes the likeliest token each time"),
        ("--top-p", float, "from the likeliest tokens that make up this probability"),
        ("--top-k", int, "from this many likeliest tokens"),
        ("--min-p", float, "from tokens at least this likely compared to the likeliest"),
        ("--frequency-penalty", float, "against tokens by how often they came"),
        ("--presence-penalty", float, "against tokens that came"),
        ("--repetition-penalty", float, "against tokens of prompt and answer; 1 is none"),
        ("--seed", int, "the same seed gives the same answer"),
    ):
        group.add_argument(flag, type=kind, metavar="N" if kind is int else "X", default=argparse.SUPPRESS, help=text)
    group.add_argument(
        "--stop", action="append", metavar="TEXT", default=argparse.SUPPRESS, help="ends the answer; may be repeated"
    )


SAMPLING = (
    "max_new_tokens", "min_new_tokens", "temperature", "top_p", "top_k", "min_p",
    "frequency_penalty", "presence_penalty", "repetition_penalty", "seed", "stop",
)  # fmt: skip


def sampling_given(arguments: argparse.Namespace) -> GenerateOptions:
    """The sampling flags that were given, named as the SDK names them."""
    given = {name: getattr(arguments, name) for name in SAMPLING if hasattr(arguments, name)}
    return cast(GenerateOptions, given)


@contextlib.contextmanager
def connected(arguments: argparse.Namespace, timeout_s: float | None = None) -> Iterator[Client]:
    """A client of the nodes named by --target. Raises NotReady with the remedy where none of them answers."""
    with Client([target for target in arguments.target.split(",") if target], timeout_s=timeout_s) as client:
        try:
            yield client
        except NotReady as error:
            if not error.message.startswith(UNREACHABLE):
                raise
            reason = f"no node answers at {arguments.target}; start one with `pdserve up smollm2`, or set --target"
            raise NotReady(reason) from None
