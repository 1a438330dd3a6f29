"""What handing a prompt over costs: TTFT and the whole answer of P + D beside a fused node's, and where the time goes.

    python -m pdserve.bench.handoff_cost [--model smollm2] [--lengths 128,1024,6000] [--repeats 3] [--json FILE]

P and D have a core each; one fused node has one core too, which is the fair comparison for one prompt at a time, and
another has two. They take turns. Between P and D a witness passes the messages on and notes when each came by, at the
cost of a millisecond.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from pdserve.bench.chaos.fleet import Fleet, Member, make_member
from pdserve.bench.handoff_times import Split, split_of
from pdserve.client import AsyncClient
from pdserve.commands.tables import write_json
from pdserve.config import Role
from pdserve.model import hub
from pdserve.model.model_config import read_config
from pdserve.model.progress import Progress, show_progress
from pdserve.node_process import interrupted_by_sigterm

NUM_NEW = 16
SETTINGS: dict[str, Any] = {"block_size": 64, "chunked_prefill_size": 512, "max_num_seqs": 4}
ANSWER_S = 900.0


@dataclass(frozen=True, slots=True)
class Timed:
    """One request: seconds to its first token, and to its end."""

    num_tokens: int
    ttft_s: float
    total_s: float
    split: Split | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """Medians by nodes and prompt length; of the pair with the split."""

    by_nodes: dict[str, list[Timed]]

    def overhead(self, num_tokens: int, against: str) -> float:
        """TTFT of the pair over the fused node's."""
        ttft_s = {
            nodes: next(timed.ttft_s for timed in timings if timed.num_tokens == num_tokens)
            for nodes, timings in self.by_nodes.items()
        }
        return ttft_s[PAIR] / ttft_s[against]


ONE_CORE, TWO_CORES, PAIR = "fused, one core", "fused, two cores", "P + D, a core each"


def main(argv: list[str] | None = None) -> int:
    """0."""
    arguments = _parser().parse_args(argv)
    console = Console(highlight=False, stderr=arguments.json == "-")
    lengths = [int(length) for length in arguments.lengths.split(",")]
    with interrupted_by_sigterm(), show_progress() as progress, TemporaryDirectory() as folder:
        model = hub.resolve(arguments.model, progress=progress)
        bench = Bench(model, Path(folder), lengths, arguments.repeats, progress)
        report = asyncio.run(bench.run(arguments.ucx_tls))
    print_report(report, console)
    if arguments.json:
        write_json(arguments.json, asdict(report))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="what to serve (default: %(default)s)")
    parser.add_argument("--lengths", default="128,1024,6000", help="of the prompts, in tokens (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="of each (default: %(default)s)")
    parser.add_argument("--ucx-tls", default="default", metavar="TLS", help="how KV travels: default, or UCX_TLS")
    parser.add_argument("--json", metavar="FILE", help="also write the figures as JSON; - is standard output")
    return parser


@dataclass(frozen=True, slots=True)
class Side:
    """Nodes that are asked through `client`. fleet: of the pair, with its witness."""

    name: str
    client: AsyncClient
    fleet: Fleet | None = None


@dataclass(slots=True)
class Bench:
    """All nodes live as long as the bench, and take turns: those that are not asked sleep."""

    model: Path
    folder: Path
    lengths: Sequence[int]
    num_repeats: int
    progress: Progress

    async def run(self, transport: str) -> Report:
        environment = {} if transport == "default" else {"UCX_TLS": transport}
        async with (
            self._fused(ONE_CORE, [0]) as one_core,
            self._fused(TWO_CORES, [0, 1]) as two_cores,
            self._pair(environment) as pair,
        ):
            sides = (one_core, two_cores, pair)
            by_length = [await self._medians(sides, length) for length in self.lengths]
        return Report({side.name: [medians[side.name] for medians in by_length] for side in sides})

    def _settings(self) -> dict[str, Any]:
        longest = max(self.lengths) + NUM_NEW
        return {**SETTINGS, "num_kv_blocks": 2 * -(-longest // SETTINGS["block_size"]) + 8}

    @asynccontextmanager
    async def _fused(self, name: str, cores: Sequence[int]) -> AsyncIterator[Side]:
        folder = self.folder / str(len(cores))
        folder.mkdir()
        node = make_member(Role.FUSED, 0, self.model, folder, {}, **self._settings())
        node.args = node.args.model_copy(update={"num_threads": len(cores)})
        node.begin()
        _pin(node, cores)
        try:
            await node.recover()
            async with AsyncClient(node.args.address, max_attempts=1) as client:
                yield Side(name, client)
        finally:
            assert node.process is not None
            await asyncio.to_thread(node.process.end)

    @asynccontextmanager
    async def _pair(self, environment: dict[str, str]) -> AsyncIterator[Side]:
        settings = {**self._settings(), "transfer_timeout_s": ANSWER_S}
        decode = make_member(Role.DECODE, 0, self.model, self.folder, environment, **settings)
        prefill = make_member(Role.PREFILL, 0, self.model, self.folder, environment, **self._settings())
        fleet = Fleet([prefill], [decode])
        try:
            await fleet.start(lambda member: _pin(member, [0] if member is prefill else [1]))
            yield Side(PAIR, fleet.clients["D0"], fleet)
        finally:
            await fleet.end()

    async def _medians(self, sides: Sequence[Side], length: int) -> dict[str, Timed]:
        """Of each side's repeats after one that warms up, the one with the median TTFT."""
        timings: dict[str, list[Timed]] = {side.name: [] for side in sides}
        for repeat in range(self.num_repeats + 1):
            self.progress(f"{length} tokens", repeat, self.num_repeats + 1)
            for side in sides:
                timings[side.name].append(await self._time(side.client, length, side.fleet))
        self.progress(f"{length} tokens", self.num_repeats + 1, self.num_repeats + 1)
        return {name: _median(measured[1:]) for name, measured in timings.items()}

    async def _time(self, client: AsyncClient, length: int, fleet: Fleet | None) -> Timed:
        vocab_size = read_config(self.model).vocab_size
        random = Random(time.monotonic_ns())
        prompt = [random.randrange(min(vocab_size, 256)) for _ in range(length)]
        read_before_s = await _read_seconds(client)
        started_s = time.monotonic()
        times_s: list[float] = []
        async with client.stream(
            token_ids=prompt, max_new_tokens=NUM_NEW, temperature=0.0, ignore_eos=True, timeout_s=ANSWER_S
        ) as stream:
            async for _ in stream:
                times_s.append(time.monotonic())
        split = None
        if fleet is not None:
            all_reads_s = await _read_seconds(client) - read_before_s
            split = split_of(fleet.witnesses["P0"].log, started_s, times_s, all_reads_s)
        return Timed(length, times_s[0] - started_s, times_s[-1] - started_s, split)


def _median(timings: Sequence[Timed]) -> Timed:
    return sorted(timings, key=lambda timed: timed.ttft_s)[len(timings) // 2]


async def _read_seconds(client: AsyncClient) -> float:
    """That the node has read KV for; 0 of a node that reads none."""
    (load,) = await client.loads()
    return load.counters.get("kv_read_microseconds_total", 0) / 1e6


def _pin(member: Member, cores: Sequence[int]) -> None:
    """From its first moment, so that its rank and all threads inherit it; as far as this machine has the cores."""
    available = sorted(os.sched_getaffinity(0))
    with suppress(ProcessLookupError):
        os.sched_setaffinity(member.front_pid, {available[core % len(available)] for core in cores})


def print_report(report: Report, console: Console) -> None:
    table = Table("prompt", "nodes", "TTFT, s", f"all {NUM_NEW} tokens, s", "P + D's TTFT over it", box=SIMPLE)
    for nodes, timings in report.by_nodes.items():
        for timed in timings:
            over = "" if nodes == PAIR else f"{report.overhead(timed.num_tokens, nodes):.2f}"
            table.add_row(f"{timed.num_tokens:,}", nodes, f"{timed.ttft_s:.3f}", f"{timed.total_s:.3f}", over)
    console.print(table)
    parts = Table("prompt", "ms:", *Split.names(), "read while P computed", box=SIMPLE)
    for timed in report.by_nodes[PAIR]:
        if timed.split is not None:
            hidden = f"{timed.split.hidden_share:.0%}"
            parts.add_row(f"{timed.num_tokens:,}", "", *(f"{ms:.1f}" for ms in timed.split.parts_ms()), hidden)
    console.print(parts)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        sys.exit(main())
