"""How long does a caller wait when the prefill node is killed under its request?

    python -m pdserve.bench.failover [--model DIR] [--tokens N] [--repeats N] [--ucx-tls default|tcp,self] [--json FILE]

From kill -9 of P to the caller's next token, for requests in each phase, with another prefill node at hand and without
one (the decode node then computes the prompt itself). The decode node's health is asked all the while: it never turns.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from pdserve.bench.chaos.fleet import Fleet, Member, make_member
from pdserve.bench.handoff_witness import Phase
from pdserve.bench.tiny_model import NUM_BYTES, QUICK, make_model
from pdserve.bench.waiting import until
from pdserve.commands.tables import write_json
from pdserve.config import Role
from pdserve.node_process import interrupted_by_sigterm

PHASES = (Phase.IDLE, Phase.QUEUED, Phase.PREFILLING, Phase.READING, Phase.FIRST_TOKEN)
SETTINGS: dict[str, Any] = {"block_size": 16, "chunked_prefill_size": 256, "num_kv_blocks": 1024, "max_num_seqs": 8}
NUM_NEW = 8
PHASE_S, ANSWER_S = 10.0, 60.0
POLL_S, HEALTH_S = 0.001, 0.05


@dataclass(frozen=True, slots=True)
class Failover:
    """One kill. reached: the phase the request was in by then. next_token_s: from the kill."""

    num_prefills: int
    aimed_at: str
    reached: str
    next_token_s: float
    placement: str


@dataclass(slots=True)
class Health:
    """Answers of the decode node's health service while prefill nodes die."""

    num_asked: int = 0
    num_bad: int = 0

    async def watch(self, member: Member) -> None:
        assert member.process is not None
        while True:
            self.num_asked += 1
            self.num_bad += not await asyncio.to_thread(member.process.is_serving)
            await asyncio.sleep(HEALTH_S)


@dataclass(slots=True)
class Report:
    transport: str
    num_tokens: int
    undisturbed_ttft_s: dict[str, float] = field(default_factory=dict)
    failovers: list[Failover] = field(default_factory=list)
    health: Health = field(default_factory=Health)

    @property
    def is_good(self) -> bool:
        return self.health.num_bad == 0


def main(argv: list[str] | None = None) -> int:
    """0 when the decode node stayed healthy throughout."""
    arguments = _parser().parse_args(argv)
    console = Console(highlight=False, stderr=arguments.json == "-")
    with interrupted_by_sigterm(), TemporaryDirectory() as folder:
        model = Path(arguments.model) if arguments.model else make_model(Path(folder) / "model", QUICK)
        report = asyncio.run(_run(arguments, model, Path(folder)))
    print_report(report, console)
    if arguments.json:
        write_json(arguments.json, asdict(report))
    return int(not report.is_good)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", metavar="DIR", help="a byte model's directory (default: one with random weights)")
    parser.add_argument("--tokens", type=int, default=2048, metavar="N", help="of each prompt (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="kills a phase (default: %(default)s)")
    parser.add_argument("--ucx-tls", default="default", metavar="TLS", help="how KV travels: default, or UCX_TLS")
    parser.add_argument("--json", metavar="FILE", help="also write the figures as JSON; - is standard output")
    return parser


async def _run(arguments: argparse.Namespace, model: Path, folder: Path) -> Report:
    environment = {} if arguments.ucx_tls == "default" else {"UCX_TLS": arguments.ucx_tls}
    report = Report(arguments.ucx_tls, arguments.tokens)
    for num_prefills in (1, 2):
        prefills = [make_member(Role.PREFILL, n, model, folder, environment, **SETTINGS) for n in range(num_prefills)]
        decode = make_member(Role.DECODE, 0, model, folder, environment, **SETTINGS)
        fleet = Fleet(prefills, [decode])
        try:
            await fleet.start()
            await _measure(fleet, report, arguments.repeats)
        finally:
            await fleet.end()
    return report


async def _measure(fleet: Fleet, report: Report, num_repeats: int) -> None:
    (decode,) = fleet.decodes
    random = Random(f"failover {len(fleet.prefills)}")
    watching = asyncio.create_task(report.health.watch(decode))
    try:
        undisturbed = [Asking(fleet, _prompt(random, report)) for _ in range(num_repeats)]
        for asking in undisturbed:
            await asking.run()
        ttft_s = statistics.median(asking.wait_s(asking.started_s) for asking in undisturbed)
        report.undisturbed_ttft_s[str(len(fleet.prefills))] = ttft_s
        for phase in [phase for phase in PHASES for _ in range(num_repeats)]:
            killed = await kill_under(phase, fleet, _prompt(random, report))
            report.failovers.append(
                Failover(len(fleet.prefills), phase.value, killed.reached.value, killed.next_token_s, killed.place)
            )
            await asyncio.gather(*(member.recover() for member in fleet.members))
    finally:
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching


def _prompt(random: Random, report: Report) -> list[int]:
    return [random.randrange(NUM_BYTES) for _ in range(report.num_tokens)]


@dataclass(slots=True)
class Asking:
    """One request through the fleet's decode node. piece_times_s: of each piece, on the monotonic clock."""

    fleet: Fleet
    prompt: Sequence[int]
    started_s: float = 0.0
    piece_times_s: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    placement: str = ""

    async def run(self) -> None:
        self.started_s = time.monotonic()
        (client,) = self.fleet.clients.values()
        async with client.stream(
            token_ids=self.prompt, max_new_tokens=NUM_NEW, temperature=0.0, ignore_eos=True, timeout_s=ANSWER_S
        ) as stream:
            async for piece in stream:
                self.piece_times_s.append(time.monotonic())
                self.token_ids += piece.token_ids
            self.placement = ", ".join(await stream.placements())

    def wait_s(self, since_s: float) -> float:
        """From then to the next piece."""
        return next(at_s for at_s in self.piece_times_s if at_s > since_s) - since_s


@dataclass(frozen=True, slots=True)
class KilledUnder:
    """A request whose prefill node was killed at killed_s, when the request was as far as `reached`."""

    asking: Asking
    killed_s: float
    reached: Phase

    @property
    def next_token_s(self) -> float:
        return self.asking.wait_s(self.killed_s)

    @property
    def place(self) -> str:
        """Where the prompt was computed in the end, without the peer's name."""
        return self.asking.placement.partition(";peer")[0]


async def kill_under(phase: Phase, fleet: Fleet, prompt: Sequence[int]) -> KilledUnder:
    """P is killed when the request is that far; idle: before it is asked. Returns when the request is answered."""
    asking = Asking(fleet, prompt)
    victim, reached = fleet.prefills[0], phase
    if phase is Phase.IDLE:
        killed_s = _kill(victim)
        await asking.run()
    else:
        running = asyncio.create_task(asking.run())
        await until(lambda: _is_at(fleet, phase) or running.done(), poll_s=POLL_S, timeout_s=PHASE_S)
        name, reached = next(iter(fleet.prompt_phases().values()), (victim.name, Phase.DECODING))
        victim = next(member for member in fleet.prefills if member.name == name)
        killed_s = _kill(victim)
        await running
    return KilledUnder(asking, killed_s, reached)


def _is_at(fleet: Fleet, phase: Phase) -> bool:
    """Or beyond: some phases pass between two looks."""
    order = list(Phase)
    return any(order.index(at) >= order.index(phase) for _, at in fleet.prompt_phases().values())


def _kill(member: Member) -> float:
    member.is_down = True
    member.send(signal.SIGKILL, [member.front_pid])
    return time.monotonic()


def print_report(report: Report, console: Console) -> None:
    console.rule(f"UCX_TLS {report.transport}: prompts of {report.num_tokens} tokens")
    table = Table("prefill nodes", "P killed", "next token, s (median)", "longest", "prefilled", box=SIMPLE)
    for number, ttft_s in report.undisturbed_ttft_s.items():
        table.add_row(number, "never: TTFT", f"{ttft_s:.3f}", "", "remote")
    keys = dict.fromkeys((failover.num_prefills, failover.aimed_at) for failover in report.failovers)
    for num_prefills, phase in keys:
        of_phase = [f for f in report.failovers if (f.num_prefills, f.aimed_at) == (num_prefills, phase)]
        waits_s = [failover.next_token_s for failover in of_phase]
        places = ", ".join(sorted({failover.placement for failover in of_phase}))
        table.add_row(str(num_prefills), phase, f"{statistics.median(waits_s):.3f}", f"{max(waits_s):.3f}", places)
    console.print(table)
    health = report.health
    console.print(f"the decode node's health was asked {health.num_asked} times, and was bad {health.num_bad} times")


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        sys.exit(main())
