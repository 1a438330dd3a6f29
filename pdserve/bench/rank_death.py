"""What happens to a group under load when one of its processes is killed?

    python -m pdserve.bench.rank_death [--model DIR] [--repeats N] [--json FILE]

From kill -9 of one process to the moment each stream's caller is told, to NOT_SERVING, and to SERVING again; then the
same prompts are asked again, and every table of every rank is looked at.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from pdserve.bench.asking import EXACT
from pdserve.bench.processes import children
from pdserve.bench.streams import running
from pdserve.bench.tiny_model import NUM_BYTES, QUICK, make_model
from pdserve.client import AsyncClient
from pdserve.commands.tables import write_json
from pdserve.config import ServerArgs
from pdserve.config.ports import free_port
from pdserve.errors import PdserveError
from pdserve.node_process import NodeProcess, interrupted_by_sigterm
from pdserve.request import RankLoad

STREAMS_A_RANK = 2
NUM_PROMPT_TOKENS, NUM_NEW = 200, 2000
# Tokens that every stream has got before the kill, and that it asks for after it.
NUM_BEFORE = 8
START_S, END_S, POLL_S = 120.0, 60.0, 0.01
GATE: Mapping[str, Any] = {"prefill_attempt_interval": 4, "prefill_any_attempt_interval": 16}
GRIDS: Mapping[str, Mapping[str, Any]] = {
    "dp 4, gate": {"data_parallel_size": 4, **GATE},
    "dp 2, tp 2, gate": {"data_parallel_size": 2, "tensor_parallel_size": 2, **GATE},
}


@dataclass(frozen=True, slots=True)
class Death:
    """Seconds from the kill. told_s: of each stream. errors: their kinds, counted. num_wrong: of the answers after it.

    num_leaked_blocks: held by any rank when all was over.
    """

    grid: str
    killed: int
    told_s: tuple[float, ...]
    errors: Mapping[str, int]
    not_serving_s: float
    serving_again_s: float
    num_wrong: int
    num_leaked_blocks: int


Tokens = tuple[int, ...]


@dataclass(slots=True)
class Stream:
    """One long answer. tokens: so far. error: what it ended with, at ended_s."""

    prompt: Tokens
    rank: int
    tokens: Tokens = ()
    error: str = ""
    ended_s: float = 0.0

    async def run(self, client: AsyncClient) -> None:
        try:
            async with client.stream(
                token_ids=self.prompt,
                max_new_tokens=NUM_NEW,
                temperature=0.0,
                ignore_eos=True,
                data_parallel_rank=self.rank,
            ) as pieces:
                async for piece in pieces:
                    self.tokens += piece.token_ids
        except PdserveError as error:
            self.error = type(error).__name__
        self.ended_s = time.monotonic()


async def moment_of(is_so: Callable[[], bool], limit_s: float, what: str) -> float:
    """When it was. Raises TimeoutError that says what was not."""
    deadline_s = time.monotonic() + limit_s
    while not await asyncio.to_thread(is_so):
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{what} within {limit_s:.0f} s")
        await asyncio.sleep(POLL_S)
    return time.monotonic()


async def kill_one(grid: str, node: NodeProcess, victim: int, seed: int) -> Death:
    """victim: which of the node's processes, in their order."""
    random, num_ranks = Random(seed), node.args.data_parallel_size
    prompts = [tuple(random.choices(range(NUM_BYTES), k=NUM_PROMPT_TOKENS)) for _ in range(STREAMS_A_RANK * num_ranks)]
    streams = [Stream(prompt, number % num_ranks) for number, prompt in enumerate(prompts)]
    async with AsyncClient(node.args.address, timeout_s=END_S, max_attempts=1) as client:
        listening = [asyncio.create_task(stream.run(client)) for stream in streams]
        await moment_of(lambda: all(len(s.tokens) >= NUM_BEFORE for s in streams), END_S, "no stream got going")
        killed_s = time.monotonic()
        os.kill(sorted(children(node.pid))[victim], signal.SIGKILL)
        not_serving_s = await moment_of(lambda: not node.is_serving(), END_S, "the node did not turn NOT_SERVING")
        async with asyncio.timeout(END_S):
            await asyncio.gather(*listening)
        again_s = await moment_of(node.is_serving, START_S, "the node did not serve again")
        num_wrong = await _num_wrong(client, streams)
        loads = await client.loads(check_integrity=True)
    return Death(
        grid,
        victim,
        tuple(stream.ended_s - killed_s for stream in streams),
        dict(Counter(stream.error or "none" for stream in streams)),
        not_serving_s - killed_s,
        again_s - killed_s,
        num_wrong,
        num_held(loads),
    )


def num_held(loads: Sequence[RankLoad]) -> int:
    return sum(load.num_held_blocks + load.num_quarantined_blocks for load in loads)


async def _num_wrong(client: AsyncClient, streams: Sequence[Stream]) -> int:
    """Of the same prompts, asked again: answers that do not begin as the ones before the kill."""
    answers = await asyncio.gather(
        *(
            client.generate(token_ids=stream.prompt, max_new_tokens=NUM_BEFORE, temperature=0.0, ignore_eos=True)
            for stream in streams
        )
    )
    return sum(answer.token_ids != stream.tokens[:NUM_BEFORE] for answer, stream in zip(answers, streams, strict=True))


def run(model: Path, repeats: int) -> list[Death]:
    """Every grid as often; another process is killed each time, the first one among them."""
    deaths = []
    for grid, settings in GRIDS.items():
        args = ServerArgs(model=str(model), port=free_port(), max_num_seqs=16, **{**EXACT, **settings})
        args.validate()
        with running([args], {}) as (node,):
            for repeat in range(repeats):
                deaths.append(asyncio.run(kill_one(grid, node, repeat % args.num_ranks, repeat)))
    return deaths


def show(deaths: Sequence[Death], console: Console) -> None:
    """Medians and the worst of each grid."""
    columns = ("kills", "told", "NOT_SERVING", "SERVING", "errors", "wrong", "leaked")
    table = Table("median, worst in s", *columns, box=SIMPLE)
    for grid in GRIDS:
        mine = [death for death in deaths if death.grid == grid]
        errors = sum((Counter(death.errors) for death in mine), Counter[str]())
        table.add_row(
            grid,
            str(len(mine)),
            _spread([told_s for death in mine for told_s in death.told_s]),
            _spread([death.not_serving_s for death in mine]),
            _spread([death.serving_again_s for death in mine]),
            ", ".join(f"{name} {count}" for name, count in errors.items()),
            str(sum(death.num_wrong for death in mine)),
            str(sum(death.num_leaked_blocks for death in mine)),
        )
    console.print(table)


def _spread(times_s: Sequence[float]) -> str:
    return f"{statistics.median(times_s):.2f}, {max(times_s):.2f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", metavar="DIR", help="a byte model's directory (default: one with random weights)")
    parser.add_argument("--repeats", type=int, default=4, metavar="N", help="kills a grid (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="also write the figures as JSON; - is standard output")
    asked = parser.parse_args()
    console = Console(highlight=False, stderr=asked.json == "-")
    with interrupted_by_sigterm(), TemporaryDirectory(prefix="pdserve-rank-death-") as folder:
        model = Path(asked.model) if asked.model else make_model(Path(folder) / "model", QUICK)
        deaths = run(model, asked.repeats)
    show(deaths, console)
    if asked.json:
        write_json(asked.json, [asdict(death) for death in deaths])
    return int(any(death.num_wrong or death.num_leaked_blocks for death in deaths))


if __name__ == "__main__":
    sys.exit(main())
