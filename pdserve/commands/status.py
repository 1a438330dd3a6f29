"""`pdserve status`: whether nodes serve, and what each of their ranks has on its hands."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NoReturn

from pdserve.client.channel import DEFAULT_TARGET
from pdserve.commands.arguments import read, real
from pdserve.commands.look import Look, look_at
from pdserve.commands.parsing import CommandParser, add_json, command_parser, targets
from pdserve.commands.tables import write_json
from pdserve.faults import Fault

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

# A rank in the middle of a long round reports late; the node says so after 10 s.
TIMEOUT_S = 15.0
# Counters of more ranks than these are told as total, least and most.
MOST_COLUMNS = 4
ABSENT = "–"


def main(argv: list[str]) -> int:
    """0 when every node serves, and with --check-integrity says that its tables agree."""
    arguments = read(_parser(), argv, _misplaced)
    nodes = [target for listed in arguments.target or [[DEFAULT_TARGET]] for target in listed]

    def look() -> list[Look]:
        return look_at(nodes, arguments.timeout_s, arguments.check_integrity)

    if arguments.watch is not None:
        watch(look, arguments.watch, arguments.counters)
    looks = look()
    if arguments.json != "-":
        show(looks, _console(), arguments.counters)
    if arguments.json:
        write_json(arguments.json, [one.figures() for one in looks])
    return int(not all(one.is_well for one in looks))


def _parser() -> CommandParser:
    parser = command_parser(
        "status",
        "",
        "Do nodes serve, and what do they have on their hands? 0 is the exit status where every one serves.",
        "pdserve status --target 10.0.0.1:50051 --target 10.0.0.2:50052 --watch 2",
    )
    parser.add_argument(
        "--target",
        metavar="HOST:PORT",
        action="append",
        type=targets("--target"),
        help=f"a node of any kind; may be repeated, or comma separated (default: {DEFAULT_TARGET})",
    )
    parser.add_argument("--counters", action="store_true", help="all counters too")
    parser.add_argument("--check-integrity", action="store_true", help="each rank compares its tables first")
    parser.add_argument(
        "--watch", type=real("--watch", above=0), metavar="S", help="look again S seconds later, until Ctrl-C"
    )
    parser.add_argument(
        "--timeout-s",
        type=real("--timeout-s", above=0),
        default=TIMEOUT_S,
        metavar="S",
        help="give up on a node after this long (default: %(default)g)",
    )
    add_json(parser)
    return parser


def _misplaced(arguments: argparse.Namespace) -> Iterable[Fault]:
    if arguments.watch is not None and arguments.json:
        yield Fault("--json", arguments.json, "takes the figures of one look; leave --watch out")


def watch(
    look: Callable[[], list[Look]], pause_s: float, with_counters: bool, pause: Callable[[float], None] = time.sleep
) -> NoReturn:
    """Looks until Ctrl-C, each on a clean terminal. The last look stays while the next is taken."""
    console = _console()
    while True:
        looks = look()
        if console.is_terminal:
            console.clear()
        console.print(time.strftime("%H:%M:%S"), style="dim")
        show(looks, console, with_counters)
        pause(pause_s)


# ---------------------------------------------------------------- what is shown


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False)


def show(looks: Sequence[Look], console: Console, with_counters: bool) -> None:
    """Tables that fit a terminal of 80 columns, and beneath them what is wrong."""
    console.print(_nodes(looks))
    if any(one.ranks for one in looks):
        console.print(_ranks(looks))
    for one in looks:
        for reason in one.reasons:
            console.print(f"{one.target}: {reason}", style="red" if not one.is_well else "yellow", markup=False)
    if with_counters:
        for one in looks:
            if one.ranks:
                console.print(_counters(one))


def _table(*headings: str, title: str | None = None) -> Table:
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(box=SIMPLE, pad_edge=False, padding=(0, 1, 0, 0), title=title, title_justify="left")
    for number, heading in enumerate(headings):
        table.add_column(heading, overflow="fold", justify="left" if number == 0 else "right")
    return table


def _nodes(looks: Sequence[Look]) -> Table:
    table = _table("node", "health", "role", "model", "incarnation", "up")
    for column in table.columns:
        column.justify = "left"
    for one in looks:
        style = "green" if one.is_well else "red"
        known = (one.role, one.model, (one.incarnation or "")[:8], _lasted(one.uptime_s))
        table.add_row(one.target, f"[{style}]{one.health}[/{style}]", *(text or ABSENT for text in known))
    return table


def _ranks(looks: Sequence[Look]) -> Table:
    table = _table("node", "rank", "run", "wait", "blocks\nheld/all", "leases", "trans-\nfers", "peers\nready")
    for one in looks:
        for load in one.ranks:
            blocks = f"{load.num_held_blocks:,}/{load.num_blocks:,}"
            queues = (str(load.num_running), str(load.num_waiting))
            cells = (*queues, blocks, str(load.num_live_leases), str(load.num_open_transfers))
            table.add_row(one.target if load is one.ranks[0] else "", str(load.rank), *cells, _peers(load.counters))
    return table


def _peers(counters: dict[str, int]) -> str:
    """Of the prefill nodes that it knows, those it can use; only a decode node has any."""
    if "num_peers" not in counters:
        return ABSENT
    return f"{counters.get('num_ready_peers', 0)}/{counters['num_peers']}"


def _counters(one: Look) -> Table:
    names = sorted({name for load in one.ranks for name in load.counters})
    if len(one.ranks) > MOST_COLUMNS:
        columns: dict[str, Callable[[list[int]], int]] = {"total": sum, "least": min, "most": max}
    else:
        columns = {f"rank {load.rank}": _nth(number) for number, load in enumerate(one.ranks)}
    table = _table(f"counters of {one.target}", *columns)
    for name in names:
        values = [load.counters.get(name, 0) for load in one.ranks]
        table.add_row(name, *(f"{column(values):,}" for column in columns.values()))
    return table


def _nth(number: int) -> Callable[[list[int]], int]:
    return lambda values: values[number]


def _lasted(seconds: float | None) -> str:
    if seconds is None:
        return ""
    for size, unit, smaller, name in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit} {seconds % size // smaller:.0f} {name}"
    return f"{seconds:.0f} s"
