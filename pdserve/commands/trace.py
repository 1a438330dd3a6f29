"""`pdserve trace`: what the ranks of nodes ran, round by round, and when the prefill gate let them prefill."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TextIO

from pdserve.client.channel import DEFAULT_TARGET
from pdserve.commands.arguments import STANDARD_OUTPUT, read, real, whole, written_file
from pdserve.commands.parsing import CommandParser, command_parser, targets
from pdserve.commands.perfetto import trace_of
from pdserve.commands.rounds import HEADING, LEGEND, Noted, figures, letter, line_of, noted, rank_name, read_rounds
from pdserve.errors import StartupError
from pdserve.faults import Fault
from pdserve.rounds import NUM_KEPT, RankRounds

# A rank in the middle of a long round tells after it.
TIMEOUT_S = 15.0
DEFAULT_LAST = 32
MOST_NODES = 26  # as many as there are letters
MOST_SECONDS = 3600.0


def main(argv: list[str]) -> int:
    """0 when every node told its rounds."""
    arguments = read(_parser(), argv, _misplaced)
    nodes = _nodes(arguments)
    is_shown = arguments.json != STANDARD_OUTPUT and not arguments.perfetto
    with _output(arguments.json) as json_file:
        trace = Trace(nodes, json_file, is_shown=is_shown, is_live=arguments.seconds is not None)
        read_rounds(nodes, _last(arguments), arguments.seconds, arguments.timeout_s, trace.add)
        trace.end()
    if arguments.perfetto:
        _write(arguments.perfetto, json.dumps(trace_of(trace.rounds, nodes)))
        count = f"{len(trace.rounds):,} rounds"
        advice = "open it in https://ui.perfetto.dev" if trace.rounds else "none ran meanwhile, --last has earlier ones"
        print(f"{arguments.perfetto}: {count}; {advice}", file=sys.stderr)
    return 0


def _parser() -> CommandParser:
    parser = command_parser(
        "trace",
        "[NODE ...]",
        "What did the ranks of nodes run, round by round, and when did the prefill gate let them prefill?",
        "pdserve trace 10.0.0.1:50051 --seconds 10 --perfetto rounds.json",
    )
    parser.add_argument(
        "nodes",
        nargs="*",
        metavar="NODE",
        type=targets("NODE"),
        help=f"HOST:PORT of a node of any kind; several are shown on one clock (default: {DEFAULT_TARGET})",
    )
    parser.add_argument(
        "--last",
        type=whole("--last", least=0, most=NUM_KEPT),
        metavar="N",
        help=f"rounds of each rank that are over already, {NUM_KEPT} at most (default: {DEFAULT_LAST}; all with "
        "--perfetto; none with --seconds)",
    )
    parser.add_argument(
        "--seconds",
        type=real("--seconds", above=0, most=MOST_SECONDS),
        metavar="S",
        help="go on with rounds as they come, for S seconds",
    )
    parser.add_argument(
        "--perfetto",
        metavar="FILE",
        type=written_file("--perfetto"),
        help="write a trace for ui.perfetto.dev, one track a rank, instead of lines",
    )
    parser.add_argument(
        "--json",
        metavar="FILE",
        type=written_file("--json", may_be_output=True),
        help="write the rounds as JSON, one a line; - is standard output",
    )
    parser.add_argument(
        "--timeout-s",
        type=real("--timeout-s", above=0),
        default=TIMEOUT_S,
        metavar="S",
        help="without --seconds: give up on a node after this long (default: %(default)g)",
    )
    return parser


def _misplaced(arguments: argparse.Namespace) -> Iterable[Fault]:
    if arguments.last == 0 and arguments.seconds is None:
        yield Fault("--last", "0", "asks for nothing; give more, or --seconds")
    if len(_nodes(arguments)) > MOST_NODES:
        yield Fault("NODE", None, f"may be given {MOST_NODES} times at most")


def _nodes(arguments: argparse.Namespace) -> list[str]:
    listed = [one for one in arguments.nodes or [] if not isinstance(one, Fault)] or [[DEFAULT_TARGET]]
    return [target for several in listed for target in several]


def _last(arguments: argparse.Namespace) -> int:
    if arguments.last is not None:
        return int(arguments.last)
    if arguments.seconds is not None:
        return 0
    return NUM_KEPT if arguments.perfetto else DEFAULT_LAST


class Trace:
    """Shows what comes: at once where it is live, else in the order of time at the end, whichever rank it is of.

    json_file: gets every round too. is_shown: as lines on standard output.
    """

    def __init__(self, nodes: Sequence[str], json_file: TextIO | None, *, is_shown: bool, is_live: bool) -> None:
        self.rounds: list[Noted] = []
        self._nodes = nodes
        self._json_file = json_file
        self._is_shown = is_shown
        self._is_live = is_live
        self._lost: dict[str, int] = {}
        self._has_heading = False

    def add(self, node: int, batch: RankRounds) -> None:
        new = noted(node, batch)
        self.rounds += new
        if batch.num_lost:
            name = rank_name(node, batch.rank, len(self._nodes))
            self._lost[name] = self._lost.get(name, 0) + batch.num_lost
        if self._is_live:
            self._show(new)

    def end(self) -> None:
        if not self._is_live:
            self._show(sorted(self.rounds, key=lambda one: one.start_unix_us))
        if self._is_shown:
            self._head()
            print(LEGEND)
        for name, count in self._lost.items():
            print(f"rank {name}: {count:,} rounds came too fast to be read", file=sys.stderr)

    def _head(self) -> None:
        """Once, as soon as a node has answered."""
        if self._has_heading:
            return
        self._has_heading = True
        for number, target in enumerate(self._nodes if len(self._nodes) > 1 else ()):
            print(f"{letter(number)}: {target}")
        print(HEADING)

    def _show(self, rounds: Sequence[Noted]) -> None:
        for one in rounds:
            if self._is_shown:
                self._head()
                print(line_of(one, len(self._nodes)))
            if self._json_file is not None:
                print(json.dumps(figures(one, self._nodes[one.node])), file=self._json_file)


@contextmanager
def _output(destination: str | None) -> Iterator[TextIO | None]:
    """Where JSON goes, if anywhere. Raises StartupError where it can't be written."""
    if destination is None or destination == STANDARD_OUTPUT:
        yield None if destination is None else sys.stdout
        return
    with ExitStack() as stack:
        with _written("--json", destination):
            file = stack.enter_context(Path(destination).open("w", encoding="utf-8"))
        yield file


def _write(destination: str, text: str) -> None:
    with _written("--perfetto", destination):
        Path(destination).write_text(text, encoding="utf-8")


@contextmanager
def _written(flag: str, destination: str) -> Iterator[None]:
    """Raises StartupError where the file can't be written."""
    try:
        yield
    except OSError as error:
        raise StartupError(f"{flag} {destination} can't be written ({error.strerror}); check the path") from None
