"""What does it cost to be in a group?

    python -m pdserve.bench.group_cost [--tokens N] [--idle-s S] [--json FILE]

One stream on the first of 1, 2 and 4 ranks in step, whose others have nothing to do: time between its tokens, and how
much of each round is the gather. Then one token now and then, for which all of them wake. Then nothing at all: how much
of a core each process takes asleep.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from pdserve.bench.deployed import Deployed
from pdserve.bench.listening import Call, unique_prompt
from pdserve.bench.processes import children, cpu_s
from pdserve.bench.streams import running
from pdserve.bench.tiny_model import NUM_BYTES, QUICK, make_model
from pdserve.commands.tables import write_json
from pdserve.config import ServerArgs
from pdserve.config.ports import free_port
from pdserve.node_process import NodeProcess, interrupted_by_sigterm

SIZES = (1, 2, 4)
NUM_PROMPT_TOKENS = 64
NUM_WAKES, WAKE_EVERY_S = 30, 0.2
REST_S = 1.0  # after the last answer, before a group counts as idle


@dataclass(frozen=True, slots=True)
class Cost:
    """gap_ms: median between tokens. gather_us: mean of a round of the first rank. wake_ms: median TTFT of one token,
    asked of a group asleep. idle_share: of a core, a process."""

    num_ranks: int
    gap_ms: float
    num_rounds: int
    gather_us: float | None
    wake_ms: float
    idle_share: float


def measure(node: NodeProcess, num_tokens: int, idle_s: float) -> Cost:
    args = node.args
    deployed = Deployed(args.address, args.block_size, args.chunked_prefill_size)
    calls = [Call(number, unique_prompt(range(NUM_BYTES), NUM_PROMPT_TOKENS, number), 8, rank=0) for number in range(2)]
    deployed.hear_all(calls[:1])
    before = deployed.loads()[0].counters
    (heard,) = deployed.hear_all([Call(1, calls[1].prompt, num_tokens, rank=0)])
    after = deployed.loads()[0].counters
    num_rounds = after.get("group_rounds_total", 0) - before.get("group_rounds_total", 0)
    gather_us = after.get("group_gather_microseconds_total", 0) - before.get("group_gather_microseconds_total", 0)
    return Cost(
        args.num_ranks,
        1000 * statistics.median(heard.gaps_s),
        num_rounds,
        gather_us / num_rounds if num_rounds else None,
        1000 * wake_s(deployed),
        idle_share(children(node.pid), idle_s),
    )


def wake_s(deployed: Deployed) -> float:
    """Median, from a call that finds everybody asleep to its token."""
    prompts = [unique_prompt(range(NUM_BYTES), 1, f"wake {number}") for number in range(NUM_WAKES)]
    calls = [Call(number, prompt, 1, WAKE_EVERY_S * number, rank=0) for number, prompt in enumerate(prompts)]
    return statistics.median(heard.ttft_s for heard in deployed.hear_all(calls))


def idle_share(pids: Sequence[int], during_s: float) -> float:
    """Of a core, that each of the processes takes on average."""
    time.sleep(REST_S)
    start_s, before_s = time.monotonic(), sum(map(cpu_s, pids))
    time.sleep(during_s)
    return (sum(map(cpu_s, pids)) - before_s) / (time.monotonic() - start_s) / len(pids)


def run(model: Path, num_tokens: int, idle_s: float) -> list[Cost]:
    costs = []
    for num_ranks in SIZES:
        args = ServerArgs(
            model=str(model),
            port=free_port(),
            num_threads=1,
            max_num_seqs=8,
            num_kv_blocks=256,
            data_parallel_size=num_ranks,
            prefill_attempt_interval=4,
            prefill_any_attempt_interval=16,
        )
        args.validate()
        with running([args], {}) as (node,):
            costs.append(measure(node, num_tokens, idle_s))
    return costs


def show(costs: Sequence[Cost], console: Console) -> None:
    table = Table(
        "ranks",
        "ITL p50, ms",
        "rounds",
        "gather, µs a round",
        "woken for a token, ms",
        "asleep, % of a core a rank",
        box=SIMPLE,
    )
    for cost in costs:
        gather = "-" if cost.gather_us is None else f"{cost.gather_us:.0f}"
        idle = f"{100 * cost.idle_share:.2f}"
        table.add_row(
            str(cost.num_ranks), f"{cost.gap_ms:.2f}", str(cost.num_rounds), gather, f"{cost.wake_ms:.2f}", idle
        )
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=500, metavar="N", help="of the stream (default: %(default)s)")
    parser.add_argument("--idle-s", type=float, default=20.0, metavar="S", help="asleep (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="also write the figures as JSON; - is standard output")
    asked = parser.parse_args()
    console = Console(highlight=False, stderr=asked.json == "-")
    with interrupted_by_sigterm(), TemporaryDirectory(prefix="pdserve-group-cost-") as folder:
        costs = run(make_model(Path(folder) / "model", QUICK), asked.tokens, asked.idle_s)
    show(costs, console)
    if asked.json:
        write_json(asked.json, [asdict(cost) for cost in costs])
    return 0


if __name__ == "__main__":
    sys.exit(main())
