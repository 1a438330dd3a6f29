"""What a round of the scheduler costs: plan() and advance() of decode rounds, beside TokenSpeed's C++ where installed.

    python -m pdserve.bench.scheduler_cost [--json FILE]

Both run in one process, one after the other. Theirs is timed twice: its two calls alone, and with what a Python caller
does around them (read the plan, build an event a row); ours hands out and takes Python objects, so its two calls are
nearly all.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from math import inf
from pathlib import Path
from statistics import mean
from time import perf_counter
from typing import Protocol

from rich.console import Console
from rich.table import Table

from pdserve.request import RequestId
from pdserve.scheduler.config import SchedulerConfig
from pdserve.scheduler.plan import StepDone, Submission
from pdserve.scheduler.scheduler import Scheduler

ROW_COUNTS = (1, 64, 256, 1024)
NUM_WAITING = 10_000
BLOCK_SIZE = 16
PROMPT_TOKENS = 24
ANSWER_TOKENS = 1024
CYCLE = BLOCK_SIZE  # rounds, in one of which every answer fills a block
MAX_CYCLES = 30
CASE_S = 1.0  # then the cycle under way is the last


@dataclass(frozen=True, slots=True)
class RoundTime:
    """µs of a round: of the scheduler's two calls, and with all that its caller has to do for them."""

    calls_us: float
    caller_us: float


@dataclass(frozen=True, slots=True)
class CostRow:
    """One line of the table. waits_for: what the queue lacks; theirs is None where tokenspeed-scheduler is missing."""

    num_rows: int
    num_waiting: int
    waits_for: str
    ours: RoundTime
    theirs: RoundTime | None


class Side(Protocol):
    """A scheduler under way."""

    def submit(self, request_id: str, prompt: Sequence[int], max_new_tokens: int) -> None: ...

    def round(self) -> tuple[RoundTime, int]:
        """What a round took, and how many rows decoded."""
        ...


class Ours:
    def __init__(self, config: SchedulerConfig) -> None:
        self._scheduler = Scheduler(config)

    def submit(self, request_id: str, prompt: Sequence[int], max_new_tokens: int) -> None:
        self._scheduler.submit(Submission(RequestId(request_id), prompt, max_new_tokens))

    def round(self) -> tuple[RoundTime, int]:
        started = perf_counter()
        plan = self._scheduler.plan()
        planned = perf_counter()
        done = StepDone(plan.round_id, [1] * len(plan.sampled_rows))
        told = perf_counter()
        self._scheduler.advance([done])
        ended = perf_counter()
        return _round_time(started, planned, told, ended), len(plan.decode)


class Theirs:
    def __init__(self, config: SchedulerConfig) -> None:
        from pdserve.bench.tokenspeed import TokenSpeed

        self._scheduler = TokenSpeed(config)

    def submit(self, request_id: str, prompt: Sequence[int], max_new_tokens: int) -> None:
        self._scheduler.submit(request_id, prompt, max_new_tokens)

    def round(self) -> tuple[RoundTime, int]:
        started = perf_counter()
        plan = self._scheduler.plan()
        planned = perf_counter()
        done = self._scheduler.read(plan)
        results = self._scheduler.results(done)
        told = perf_counter()
        self._scheduler.advance(results)
        ended = perf_counter()
        return _round_time(started, planned, told, ended), len(done.decodes)


def _round_time(started: float, planned: float, told: float, ended: float) -> RoundTime:
    return RoundTime((planned - started + ended - told) * 1e6, (ended - started) * 1e6)


def measure_scheduler_cost(row_counts: Sequence[int] = ROW_COUNTS, num_waiting: int = NUM_WAITING) -> list[CostRow]:
    """Nobody waits, all wait for a slot, and all wait for blocks while slots are free."""
    cases = ((0, "-"), (num_waiting, "a slot"), (num_waiting, "blocks"))
    return [_measure(num_rows, waiting, lack) for waiting, lack in cases for num_rows in row_counts]


def _measure(num_rows: int, num_waiting: int, waits_for: str) -> CostRow:
    num_blocks = num_rows * -(-(PROMPT_TOKENS + ANSWER_TOKENS) // BLOCK_SIZE)
    config = SchedulerConfig(
        num_blocks=num_blocks + 1,
        block_size=BLOCK_SIZE,
        max_batch_size=num_rows + (waits_for == "blocks"),
        max_scheduled_tokens=max(8192, PROMPT_TOKENS * num_rows),
        max_model_len=PROMPT_TOKENS + ANSWER_TOKENS,
        answer_headroom=ANSWER_TOKENS,
    )
    ours = _time(_under_way(Ours, config, num_rows, num_waiting), num_rows)
    theirs = None
    if find_spec("tokenspeed_scheduler"):
        theirs = _time(_under_way(Theirs, config, num_rows, num_waiting), num_rows)
    return CostRow(num_rows, num_waiting, waits_for, ours, theirs)


def _under_way(
    side: Callable[[SchedulerConfig], Side], config: SchedulerConfig, num_rows: int, num_waiting: int
) -> Side:
    """Every row decodes, and the queue stands behind them."""
    scheduler = side(config)
    for index in range(num_rows + num_waiting):
        prompt = range(index * PROMPT_TOKENS, (index + 1) * PROMPT_TOKENS)
        scheduler.submit(f"r{index}", prompt, ANSWER_TOKENS)
        if index == num_rows - 1:
            scheduler.round()
    scheduler.round()
    return scheduler


def _time(scheduler: Side, num_rows: int) -> RoundTime:
    """Mean over a cycle of rounds; each is the best of its place in many cycles, as the machine has other work too."""
    best = [RoundTime(inf, inf)] * CYCLE
    started = perf_counter()
    for _ in range(MAX_CYCLES):
        for place in range(CYCLE):
            time, num_decoded = scheduler.round()
            assert num_decoded == num_rows, f"{num_decoded} of {num_rows} rows decode"
            best[place] = min(best[place], time, key=lambda each: each.calls_us)
        if perf_counter() - started > CASE_S:
            break
    return RoundTime(mean(time.calls_us for time in best), mean(time.caller_us for time in best))


# ---------------------------------------------------------------- command


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pdserve.bench.scheduler_cost", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows here")
    options = parser.parse_args(arguments)
    rows = measure_scheduler_cost()
    Console().print(_table(rows))
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1), encoding="utf-8")
    return 0


def _table(rows: Sequence[CostRow]) -> Table:
    table = Table(
        "rows", "waiting", "waits for", "ours, µs", "TokenSpeed, µs", "with its caller, µs", "ours / TokenSpeed"
    )
    for row in rows:
        theirs = row.theirs
        shown = (
            (f"{theirs.calls_us:.0f}", f"{theirs.caller_us:.0f}", f"{row.ours.calls_us / theirs.calls_us:.2g}")
            if theirs
            else ("-",) * 3
        )
        table.add_row(str(row.num_rows), str(row.num_waiting), row.waits_for, f"{row.ours.calls_us:.0f}", *shown)
    return table


if __name__ == "__main__":
    sys.exit(main())
