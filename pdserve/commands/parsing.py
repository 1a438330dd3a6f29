"""What the client commands' parsers have in common."""

from __future__ import annotations

import argparse
from typing import NoReturn, cast

from pdserve.client import Client, GenerateOptions
from pdserve.client.channel import DEFAULT_TARGET, target_fault
from pdserve.commands.arguments import Check, real, whole, written_file
from pdserve.errors import StartupError
from pdserve.faults import Fault


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
        type=targets("--target"),
        default=[DEFAULT_TARGET],
        help=f"a fused or decode node; several, comma separated, take turns (default: {DEFAULT_TARGET})",
    )


def targets(flag: str) -> Check:
    """Addresses, comma separated."""

    def check(text: str) -> list[str] | Fault:
        found = [target for target in text.split(",") if target]
        reasons = [reason for target in found if (reason := target_fault(target))]
        if not found:
            reasons = ["must be HOST:PORT, such as " + DEFAULT_TARGET]
        return Fault(flag, text, "; ".join(dict.fromkeys(reasons))) if reasons else found

    return check


def add_json(parser: argparse.ArgumentParser) -> None:
    """The same figures for a program."""
    parser.add_argument(
        "--json",
        metavar="FILE",
        type=written_file("--json", may_be_output=True),
        help="write the figures as JSON; - is standard output",
    )


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """How the answer's tokens are chosen. A flag that isn't given is left to the node."""
    group = parser.add_argument_group("Sampling")
    for flag, kind, text in (
        ("--max-new-tokens", whole, "longest answer in tokens"),
        ("--min-new-tokens", whole, "shortest answer in tokens"),
        ("--temperature", real, "0 takes the likeliest token each time"),
        ("--top-p", real, "from the likeliest tokens that make up this probability"),
        ("--top-k", whole, "from this many likeliest tokens"),
        ("--min-p", real, "from tokens at least this likely compared to the likeliest"),
        ("--frequency-penalty", real, "against tokens by how often they came"),
        ("--presence-penalty", real, "against tokens that came"),
        ("--repetition-penalty", real, "against tokens of prompt and answer; 1 is none"),
        ("--seed", whole, "the same seed gives the same answer"),
    ):
        group.add_argument(flag, type=kind(flag), metavar=METAVARS[kind], default=argparse.SUPPRESS, help=text)
    group.add_argument(
        "--stop", action="append", metavar="TEXT", default=argparse.SUPPRESS, help="ends the answer; may be repeated"
    )


METAVARS = {whole: "N", real: "X"}
SAMPLING = (
    "max_new_tokens", "min_new_tokens", "temperature", "top_p", "top_k", "min_p",
    "frequency_penalty", "presence_penalty", "repetition_penalty", "seed", "stop",
)  # fmt: skip


def sampling_given(arguments: argparse.Namespace) -> GenerateOptions:
    """The sampling flags that were given, named as the SDK names them."""
    given = {name: getattr(arguments, name) for name in SAMPLING if hasattr(arguments, name)}
    return cast(GenerateOptions, given)


def connected(arguments: argparse.Namespace, timeout_s: float | None = None) -> Client:
    """A client of the nodes named by --target."""
    return Client(arguments.target, timeout_s=timeout_s)
