"""Many concurrent streams through a prefill and a decode node, some given up at random moments: is every answer right,
is everything given back, did any process grow?

    python -m pdserve.bench.streams [--ucx-tls default] [--ucx-tls tcp,self] [--json FILE]

Each finished answer must be the fused node's greedy answer. One that parts from it at a position where the fused
node's two best tokens lie within 1e-3 is a counted tie; more than 0.5 % ties, or any other difference, fails.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from pdserve.bench.asking import EXACT, Reply, ask_all, verdicts
from pdserve.bench.processes import children, resident_bytes
from pdserve.bench.stream_checks import (
    Check,
    answer_checks,
    byte_checks,
    growth_checks,
    in_use,
    place_checks,
    rest_checks,
)
from pdserve.bench.workload import Ask, make_asks
from pdserve.client import Client
from pdserve.commands.tables import write_json
from pdserve.config import Role, ServerArgs
from pdserve.config.ports import free_port
from pdserve.demo_prompts import diary
from pdserve.errors import PdserveError
from pdserve.model import hub
from pdserve.model.model_config import read_config
from pdserve.model.progress import Progress, show_progress
from pdserve.node_process import NodeProcess, interrupted_by_sigterm, wait_until_ready
from pdserve.request import RankLoad

NUM_KV_BLOCKS = 192
CANCELLED_SHARE = 0.2
SETTLE_S = 30.0
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Run:
    """What came of one run over one transport. resident_mib: of each process, before and after each half."""

    transport: str
    elapsed_s: float
    verdicts: dict[str, int]
    num_given_up: int
    prefill_load: RankLoad
    decode_load: RankLoad
    resident_mib: dict[str, list[float]]
    checks: list[Check]

    @property
    def is_good(self) -> bool:
        return all(check.is_met for check in self.checks)

    def figures(self) -> dict[str, object]:
        return {**asdict(self), "checks": [check.figures() for check in self.checks]}


def main(argv: list[str] | None = None) -> int:
    """0 when every check of every run is met."""
    arguments = _parser().parse_args(argv)
    console = Console(highlight=False, stderr=arguments.json == "-")
    with interrupted_by_sigterm(), show_progress() as progress:
        bench = Bench(arguments.model, arguments.streams, progress)
        asks, references = bench.make_references(arguments.requests, arguments.seed)
        runs = [bench.run_pair(asks, references, transport) for transport in arguments.ucx_tls or ["default"]]
    for run in runs:
        print_run(run, console)
    if arguments.json:
        write_json(arguments.json, [run.figures() for run in runs])
    return int(not all(run.is_good for run in runs))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="what to serve (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=160, metavar="N", help="how many (default: %(default)s)")
    parser.add_argument("--streams", type=int, default=64, metavar="N", help="at a time (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of lengths, prompts and cancellations")
    parser.add_argument(
        "--ucx-tls", action="append", metavar="TLS", help="how KV travels: default, or UCX_TLS; may be repeated"
    )
    parser.add_argument("--json", metavar="FILE", help="also write the figures as JSON; - is standard output")
    return parser


class Bench:
    """Nodes live as long as their part of the bench: never the fused one beside the pair."""

    def __init__(self, model: str, num_streams: int, progress: Progress) -> None:
        self._model = model
        self._directory = hub.resolve(model, progress=progress)
        self._num_streams = num_streams
        self._progress = progress

    def make_references(self, num_asks: int, seed: int) -> tuple[list[Ask], dict[int, Reply]]:
        """The requests, and a fused node's greedy answers with the two best tokens of each position."""
        fused = self._args(Role.FUSED)
        with running([fused], {}):
            with Client(fused.address) as client:
                text = client.tokenize(diary())
            asks = make_asks(text, num_asks, CANCELLED_SHARE, seed)
            replies = self._ask("fused answers", fused.address, asks, gives_up=False, with_logprobs=True)
        return asks, replies

    def run_pair(self, asks: Sequence[Ask], references: Mapping[int, Reply], transport: str) -> Run:
        """All requests through a new pair, in two halves."""
        prefill = self._args(Role.PREFILL, num_threads=1)
        decode = self._args(Role.DECODE, num_threads=1, prefill_peers=(prefill.address,))
        environment = {} if transport == "default" else {"UCX_TLS": transport}
        half = len(asks) // 2
        with running([prefill, decode], environment) as nodes:
            sizes = [resident_mib(nodes)]
            started = time.monotonic()
            replies: dict[int, Reply] = {}
            for name, part in (("first half", asks[:half]), ("second half", asks[half:])):
                replies |= self._ask(f"{name} over {transport}", decode.address, part)
                sizes.append(resident_mib(nodes))
            elapsed_s = time.monotonic() - started
            loads = settled_load(prefill), settled_load(decode)
        by_process = {name: [size[name] for size in sizes] for name in sizes[0]}
        judged = verdicts(replies, references)
        block_bytes = read_config(self._directory).kv_layout(decode.block_size).block_bytes
        return Run(
            transport,
            elapsed_s,
            dict(Counter(verdict.value for verdict in judged.values())),
            sum(reply.finish is None for reply in replies.values()),
            *loads,
            by_process,
            [
                *answer_checks(judged),
                *place_checks(asks, replies, loads[1]),
                *byte_checks(asks, replies, loads[1], decode.block_size, block_bytes),
                *rest_checks(*loads),
                *growth_checks(by_process, NUM_KV_BLOCKS * block_bytes / MIB),
            ],
        )

    def _ask(self, step: str, address: str, asks: Sequence[Ask], **how: Any) -> dict[int, Reply]:
        self._progress(step, 0, len(asks))
        num_replies = 0

        def on_reply() -> None:
            nonlocal num_replies
            num_replies += 1
            self._progress(step, num_replies, len(asks))

        return asyncio.run(ask_all(address, asks, self._num_streams, on_reply=on_reply, **how))

    def _args(self, role: Role, **settings: Any) -> ServerArgs:
        own = {"num_kv_blocks": NUM_KV_BLOCKS, **EXACT, **settings}
        args = ServerArgs(model=self._model, role=role, port=free_port(), **own)
        args.validate()
        return args


@contextlib.contextmanager
def running(
    settings: Sequence[ServerArgs], environment: Mapping[str, str], cores: Sequence[Collection[int]] = ()
) -> Iterator[list[NodeProcess]]:
    """Nodes that serve, ended however the block is left. What they logged is shown if it is left by an error.

    cores: those that each node may run on; all where none are named.
    """
    with TemporaryDirectory() as folder, contextlib.ExitStack() as ending:
        logs = [Path(folder) / f"{args.role}.log" for args in settings]
        try:
            nodes = []
            for args, log, allowed in zip(settings, logs, cores or [()] * len(logs), strict=True):
                with log.open("wb") as file:
                    nodes.append(NodeProcess(args, file, environment, allowed))
                ending.callback(nodes[-1].end)
            wait_until_ready(nodes, lambda node: None)
            yield nodes
        except (PdserveError, ExceptionGroup):
            for log in logs:
                print(log.read_text(errors="replace")[-4000:], file=sys.stderr)
            raise


def resident_mib(nodes: Sequence[NodeProcess]) -> dict[str, float]:
    """Of the front and the rank of each node."""
    sizes = {}
    for node in nodes:
        (rank,) = children(node.pid)
        sizes[f"{node.args.role} front"] = resident_bytes(node.pid) / MIB
        sizes[f"{node.args.role} rank"] = resident_bytes(rank) / MIB
    return sizes


def settled_load(args: ServerArgs) -> RankLoad:
    """The node's load once nothing is in use, or as it is after SETTLE_S; its tables are checked each time."""
    deadline = time.monotonic() + SETTLE_S
    with Client(args.address, timeout_s=SETTLE_S) as client:
        while True:
            (load,) = client.loads(check_integrity=True)
            if not any(in_use(load).values()) or time.monotonic() > deadline:
                return load
            time.sleep(0.1)


def print_run(run: Run, console: Console) -> None:
    judged = ", ".join(f"{count} {name}" for name, count in sorted(run.verdicts.items()))
    console.rule(f"UCX_TLS {run.transport}: {judged}; {run.num_given_up} given up; {run.elapsed_s:.0f} s")
    table = Table("check", "found", "wanted", "", box=SIMPLE)
    for check in run.checks:
        table.add_row(check.name, f"{check.found:,}", check.wanted, "ok" if check.is_met else "[red]FAILED[/red]")
    console.print(table)
    sizes = Table("resident MiB", "before", "after 1st half", "after 2nd half", box=SIMPLE)
    for name, mib in run.resident_mib.items():
        sizes.add_row(name, *(f"{size:.0f}" for size in mib))
    console.print(sizes)


if __name__ == "__main__":
    sys.exit(main())
