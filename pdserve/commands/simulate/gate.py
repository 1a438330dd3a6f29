"""`pdserve simulate gate`: what the prefill gate of a group gives and costs, over its intervals and the fill."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from pdserve.commands.arguments import real, whole
from pdserve.commands.simulate.flags import Asked, read_flags, simulate_parser
from pdserve.commands.simulate.output import console_of, describe
from pdserve.commands.tables import write_json
from pdserve.faults import Fault
from pdserve.sim.deployment import Deployment
from pdserve.sim.economics import Point, Users, grid, sweep

# What the experiment is of, where the flags say nothing else: a group, with slots left free for the gate to choose.
GROUP_RANKS, SLOTS_OF_RANK = 8, 32
COSTS = "seed-context"


def gate(argv: list[str]) -> int:
    """0."""
    parser = simulate_parser(
        "pdserve simulate gate",
        f"A group of {GROUP_RANKS} ranks with every gate of a grid, users who ask again and again. --png draws it.",
        "pdserve simulate gate --png gate.png",
    )
    group = parser.add_argument_group("Users")
    default = Users()
    group.add_argument(
        "--users-of-rank",
        type=whole("--users-of-rank", 1),
        metavar="N",
        help=f"for each rank (default: {default.of_rank})",
    )
    group.add_argument(
        "--think-s",
        type=real("--think-s", least=0),
        metavar="S",
        help=f"pause, on average (default: {default.think_s:g})",
    )
    group.add_argument(
        "--requests", type=whole("--requests", 1), metavar="N", help=f"of each run (default: {default.num_requests})"
    )
    asked = read_flags(argv, parser, COSTS, _misplaced)
    deployments = list(grid(_group(asked)))
    users = _users(asked)
    points = sweep(deployments, users, asked.seed, _progress(len(deployments)))
    _tell(asked, deployments[0], users, points)
    return 0


def _misplaced(asked: Asked) -> Iterable[Fault]:
    if asked.html is not None:
        yield Fault("--html", asked.html, "draws rounds, and these are many runs; give --png for the figure")
    if asked.deployment.is_split:
        yield Fault("--num-prefill-nodes", None, "asks for a pair, and a gate is of fused nodes; leave it out")


def _group(asked: Asked) -> Deployment:
    """The deployment as asked for; of one rank, a group of eight such ranks."""
    deployment = asked.deployment
    if deployment.num_ranks > 1:
        return deployment
    return deployment.replace(data_parallel_size=GROUP_RANKS, max_num_seqs=GROUP_RANKS * SLOTS_OF_RANK)


def _users(asked: Asked) -> Users:
    own, default = vars(asked.own), Users()
    return Users(
        own.get("users_of_rank", default.of_rank),
        own.get("think_s", default.think_s),
        own.get("requests", default.num_requests),
    )


def _progress(total: int) -> Callable[[int], None]:
    is_watched = sys.stderr.isatty()

    def tell(done: int) -> None:
        if is_watched:
            print(f"\r{done + 1} of {total} ", end="\n" if done + 1 == total else "", file=sys.stderr, flush=True)

    return tell


def _tell(asked: Asked, deployment: Deployment, users: Users, points: Sequence[Point]) -> None:
    title = (
        f"the prefill gate of {deployment.data_parallel_size} ranks, {users.of_rank} users each who think "
        f"{users.think_s:g} s; costs {deployment.costs.name}"
    )
    _print(points, title, console_of(asked))
    if asked.png is not None:
        from pdserve.sim.drawing import economics_png

        economics_png.write(points, title, asked.png)
    if asked.json:
        found: dict[str, Any] = {**describe(asked), "deployment": deployment.describe(), "users_of_rank": users.of_rank}
        write_json(asked.json, found | {"points": [point.figures() for point in points]})


def _print(points: Sequence[Point], title: str, console: Console) -> None:
    console.print(f"[bold]{title}[/bold]")
    columns = ("output\ntokens/s", "p99 ITL\nms", "worst gap\nms", "p50 TTFT\ns", "p99 TTFT\ns")
    table = Table("A", "N", "fill", *columns, box=SIMPLE, pad_edge=False)
    for point in points:
        one = point.measures
        knobs = (point.attempt_interval, point.any_interval, point.fill)
        table.add_row(
            *("–" if knob is None else str(knob) for knob in knobs),
            f"{one.output_tokens_per_s:,.0f}",
            f"{one.itl_p99_s * 1e3:,.0f}",
            f"{one.worst_gap_s * 1e3:,.0f}",
            f"{one.ttft_p50_s:.2f}",
            f"{one.ttft_p99_s:.2f}",
        )
    console.print(table)
