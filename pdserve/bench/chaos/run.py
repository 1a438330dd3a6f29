"""A run of `pdserve bench chaos`: the nodes, the faults, the checks, and what is shown."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from pdserve.bench.chaos.answers import Answered, judge
from pdserve.bench.chaos.checks import Fate, fate_checks, fates_of, growth_checks, hit_checks, routes_of
from pdserve.bench.chaos.drive import Drive, ask_reference
from pdserve.bench.chaos.faults import Fault, shares_over
from pdserve.bench.chaos.fleet import Fleet, Growth, Member, make_fleet, make_member
from pdserve.bench.chaos.requests import hang_s_of, make_chaos_asks
from pdserve.bench.processes import is_running
from pdserve.bench.stream_checks import Check, exactly, in_use
from pdserve.bench.tiny_model import QUICK, make_model
from pdserve.client import AsyncClient
from pdserve.commands.tables import write_json
from pdserve.config import Role
from pdserve.errors import PdserveError
from pdserve.model import hub
from pdserve.model.progress import Progress, show_progress
from pdserve.node_process import interrupted_by_sigterm
from pdserve.request import RankLoad

SETTINGS: dict[str, Any] = {
    "block_size": 16,
    "chunked_prefill_size": 256,
    "num_kv_blocks": 1024,
    "max_num_seqs": 12,
}
NODE_NAMES = ("P0", "P1", "D0", "D1")
SETTLE_S = 60.0
SETTLE_LOOK_S = 0.2


@dataclass(frozen=True, slots=True)
class Report:
    """What came of a run."""

    transport: str
    elapsed_s: float
    start_s: float
    fates: list[Fate]
    faults: list[Fault]
    counters: dict[str, dict[str, int]]
    checks: list[Check]

    @property
    def is_good(self) -> bool:
        return all(check.is_met for check in self.checks)

    def figures(self) -> dict[str, object]:
        remarkable = [fate for fate in self.fates if fate.is_failed or fate.answered is not Answered.RIGHT]
        return {
            "transport": self.transport,
            "elapsed_s": round(self.elapsed_s, 1),
            "num_requests": len(self.fates),
            "num_touched": sum(fate.is_touched for fate in self.fates),
            "checks": [check.figures() for check in self.checks],
            "faults": [fault.figures(self.start_s) for fault in self.faults],
            "not_as_usual": [fate.figures() for fate in remarkable],
            "counters": self.counters,
        }


def run(arguments: argparse.Namespace) -> int:
    """0 when every check is met."""
    console = Console(highlight=False, stderr=arguments.json == "-")
    with interrupted_by_sigterm(), show_progress() as progress, _folder(arguments.keep) as folder:
        if arguments.model:
            model = hub.resolve(arguments.model, progress=progress)
        else:
            model = make_model(folder / "model", QUICK)
        report = asyncio.run(_run(arguments, model, folder, progress))
    print_report(report, console)
    if arguments.json:
        write_json(arguments.json, report.figures())
    return int(not report.is_good)


@contextlib.contextmanager
def _folder(keep: str | None) -> Iterator[Path]:
    if keep is not None:
        Path(keep).mkdir(parents=True, exist_ok=True)
        yield Path(keep)
        return
    with TemporaryDirectory() as folder:
        yield Path(folder)


async def _run(arguments: argparse.Namespace, model: Path, folder: Path, progress: Progress) -> Report:
    asks = make_chaos_asks(arguments.requests, arguments.seed)
    environment = {} if arguments.ucx_tls == "default" else {"UCX_TLS": arguments.ucx_tls}
    async with _fused(model, folder) as (node, fused):
        references = await ask_reference(
            fused, asks, 12, lambda num_done: progress("reference answers", num_done, len(asks))
        )
        undisturbed = node.growth()
    fleet = make_fleet(model, folder, environment, SETTINGS)
    try:
        await fleet.start()
        start_s = time.monotonic()
        random, shares = Random(f"faults {arguments.seed}"), shares_over(arguments.ucx_tls)
        hang_s = hang_s_of(references.values())
        drive = Drive(fleet, asks, arguments.faults, arguments.streams, hang_s, random, shares)
        drive.on_done = lambda requests, faults: progress(f"requests, {faults} faults", requests, len(asks))
        faults = await drive.run()
        elapsed_s = time.monotonic() - start_s
        checks, counters = await _node_checks(fleet, undisturbed)
    finally:
        await fleet.end()
    checks.append(exactly("processes left behind", _num_left(fleet), 0))
    async with _fused(model, folder) as (_, fused):
        verdicts = await judge(drive.done, references, fused)
    fates = fates_of(drive.done, verdicts, faults, routes_of(fleet))
    checks = [*fate_checks(fates), *hit_checks(faults, arguments.faults), *checks]
    return Report(arguments.ucx_tls, elapsed_s, start_s, fates, faults, counters, checks)


@contextlib.asynccontextmanager
async def _fused(model: Path, folder: Path) -> AsyncIterator[tuple[Member, AsyncClient]]:
    """A node that nothing disturbs; it never lives beside the others, whose cores it would take."""
    node = make_member(Role.FUSED, 0, model, folder, {}, **SETTINGS)
    node.begin()
    try:
        await node.recover()
        async with AsyncClient(node.args.address, max_attempts=1) as client:
            yield node, client
    finally:
        assert node.process is not None
        await asyncio.to_thread(node.process.end)


# ---------------------------------------------------------------- what the nodes kept


async def _node_checks(fleet: Fleet, undisturbed: Growth) -> tuple[list[Check], dict[str, dict[str, int]]]:
    checks: list[Check] = []
    counters: dict[str, dict[str, int]] = {}
    for member in fleet.members:
        load, broken = await _settled(member)
        checks.append(exactly(f"{member.name}: tables that disagree", int(bool(broken)), 0))
        if load is not None:
            checks += [exactly(f"{member.name}: {name}", count, 0) for name, count in in_use(load).items()]
            counters[member.name] = {name: count for name, count in load.counters.items() if count}
    for member in fleet.members:
        checks += growth_checks(member.name, member.growth(), undisturbed)
    return checks, counters


async def _settled(member: Member) -> tuple[RankLoad | None, str]:
    """Its load once nothing is in use, or after SETTLE_S as it is; and what is wrong with it, if anything."""
    deadline_s = time.monotonic() + SETTLE_S
    async with AsyncClient(member.args.address, timeout_s=SETTLE_S) as client:
        while True:
            try:
                (load,) = await client.loads(check_integrity=True)
            except PdserveError as error:
                return None, error.message
            if not any(in_use(load).values()) or time.monotonic() > deadline_s:
                return load, ""
            await asyncio.sleep(SETTLE_LOOK_S)


def _num_left(fleet: Fleet) -> int:
    return sum(is_running(pid) for member in fleet.members for pid in member.pids)


# ---------------------------------------------------------------- what is shown


def print_report(report: Report, console: Console) -> None:
    console.rule(f"UCX_TLS {report.transport}: {len(report.fates)} requests, {report.elapsed_s:.0f} s")
    for title, counts in _counts(report).items():
        table = Table(title, "", box=SIMPLE)
        for name, count in counts.most_common():
            table.add_row(name, str(count))
        console.print(table)
    of_nodes = [check for check in report.checks if check.name[:2] in NODE_NAMES and check.is_met]
    checks = Table("check", "found", "wanted", "", box=SIMPLE)
    for check in (check for check in report.checks if check not in of_nodes):
        checks.add_row(check.name, f"{check.found:,}", check.wanted, "ok" if check.is_met else "[red]FAILED[/red]")
    console.print(checks)
    console.print(f"  and {len(of_nodes)} more that are met: what each node holds, and how it has grown")


def _counts(report: Report) -> dict[str, Counter[str]]:
    errors = (type(fate.attempted.error).__name__ for fate in report.fates if fate.attempted.error)
    places = (
        placement.partition(";")[0] + (";" + placement.partition(";")[2] if "local" in placement else "")
        for fate in report.fates
        for placement in fate.attempted.placements
    )
    return {
        "fault": Counter(fault.kind.value for fault in report.faults),
        "phase hit": Counter(phase for fault in report.faults for phase in fault.hit),
        "prefilled": Counter(places),
        "failed with": Counter(errors),
    }
