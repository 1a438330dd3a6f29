"""Python's share of a round: the rank loop's time outside the model's forward, at several batch sizes.

    python -m pdserve.bench.rounds [--json FILE]

A real RankLoop with its scheduler serves requests that decode side by side, over a real channel whose other end is
another process. A round is counted from one forward to the next: messages in, plan, batch building, sampling, advance,
messages out. Two runners:

fake     FakeRunner, less the hashing that is its forward.
sampler  all of a real model's runner but the model, on made-up logits. Over a small vocabulary this is Python's share;
         over a real one the sampler's passes over rows x vocabulary numbers come on top, which are arithmetic as the
         forward's last product is.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from pdserve.bench.rounds_front import Work
from pdserve.commands.tables import write_json
from pdserve.engine.channel import RankChannel, private_directory
from pdserve.engine.messages import FromRank, Loading, ToRank
from pdserve.engine.rank import RankLoop
from pdserve.kv.layout import KVLayout
from pdserve.kv.storage import KVStorage
from pdserve.model.batch import Batch, SlotTable
from pdserve.model.fake import Cells, FakeRunner
from pdserve.model.noise import Words
from pdserve.model.runner import ModelRunner, RoundResult
from pdserve.model.sampler import Sampler
from pdserve.request import TokenRequest
from pdserve.scheduler.config import SchedulerConfig
from pdserve.scheduler.plan import RoundPlan, SlotStart
from pdserve.scheduler.scheduler import Scheduler

BATCH_SIZES = (1, 32, 256)
SMALL_VOCAB, REAL_VOCAB = 512, 49152
MAX_MODEL_LEN = 512
BLOCK_SIZE = 64
LIMIT_MS = 3.0


@dataclass(frozen=True, slots=True)
class Case:
    """vocab_size None: FakeRunner."""

    name: str
    vocab_size: int | None
    temperature: float = 0.0
    is_limited: bool = False
    num_rounds: int = 300


CASES = (
    Case("fake runner", None, is_limited=True),
    Case("sampler, greedy", SMALL_VOCAB, is_limited=True),
    Case("sampler, temperature 0.8 and top-p 0.95", SMALL_VOCAB, 0.8),
    Case(f"sampler, greedy, {REAL_VOCAB} tokens in the vocabulary", REAL_VOCAB, num_rounds=40),
    Case(f"sampler, temperature 0.8 and top-p 0.95, {REAL_VOCAB}", REAL_VOCAB, 0.8, num_rounds=40),
)


@dataclass(frozen=True, slots=True)
class RoundTime:
    """Milliseconds a decode round of batch_size rows spends outside the forward."""

    case: str
    batch_size: int
    p50_ms: float
    p99_ms: float
    is_limited: bool

    @property
    def is_good(self) -> bool:
        return not self.is_limited or self.p50_ms < LIMIT_MS


@dataclass(slots=True)
class Stopwatch:
    """Adds up what lies between forwards. `pause` and `resume` stand around what is not counted."""

    rounds_s: list[float] = field(default_factory=list)
    batch_sizes: list[int] = field(default_factory=list)
    _since: float = 0.0
    _before_s: float = 0.0

    def begin_round(self, batch_size: int) -> None:
        """The round before ends here too."""
        now = time.perf_counter()
        if self.batch_sizes:
            self.rounds_s.append(self._before_s + now - self._since)
        self.batch_sizes.append(batch_size)
        self._since, self._before_s = now, 0.0

    def pause(self) -> None:
        self._before_s += time.perf_counter() - self._since

    def resume(self) -> None:
        self._since = time.perf_counter()

    def milliseconds(self, batch_size: int) -> list[float]:
        """Of each round with that many rows whose next round had as many: nobody came and nobody left."""
        pairs = zip(self.batch_sizes, self.batch_sizes[1:], self.rounds_s, strict=False)
        return [1e3 * elapsed_s for rows, next_rows, elapsed_s in pairs if rows == next_rows == batch_size]


class TimedFakeRunner(FakeRunner):
    """A FakeRunner whose rounds are counted, less what it does in the forward's place."""

    def __init__(self, max_slots: int, stopwatch: Stopwatch) -> None:
        layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=2, block_size=BLOCK_SIZE)
        super().__init__(KVStorage(layout, _num_blocks(max_slots)), SMALL_VOCAB, max_slots, MAX_MODEL_LEN)
        self._stopwatch = stopwatch

    def execute(self, plan: RoundPlan) -> RoundResult:
        self._stopwatch.begin_round(plan.batch_size)
        return super().execute(plan)

    def _write(self, batch: Batch) -> Cells:
        self._stopwatch.pause()
        return super()._write(batch)

    def _read(self, batch: Batch) -> Words:
        sums = super()._read(batch)
        self._stopwatch.resume()
        return sums


class SamplerRunner:
    """All of a real model's runner but the model."""

    def __init__(self, vocab_size: int, max_slots: int, stopwatch: Stopwatch) -> None:
        self._stopwatch = stopwatch
        self._slot_table = SlotTable(max_slots, MAX_MODEL_LEN, BLOCK_SIZE)
        self._sampler = Sampler(vocab_size, max_slots, ())
        self._logits = made_up_logits(max_slots, vocab_size)

    def start(self, start: SlotStart, request: TokenRequest) -> None:
        self._slot_table.start(start, request)
        self._sampler.start(start, request)

    def execute(self, plan: RoundPlan) -> RoundResult:
        self._stopwatch.begin_round(plan.batch_size)
        batch = self._slot_table.build(plan)
        self._stopwatch.pause()
        logits = self._logits[: len(batch.sampled_rows)].clone()  # as the sampler changes what it is given
        self._stopwatch.resume()
        positions = self._slot_table.output_positions(batch)
        drawn = self._sampler.draw(logits, batch.slots[batch.sampled_rows], positions)
        self._slot_table.append(batch, drawn.tokens)
        return RoundResult(drawn.tokens.tolist(), drawn.logprobs)

    def idle(self) -> None:
        """There is one rank."""


def made_up_logits(num_rows: int, vocab_size: int) -> torch.Tensor:
    """[num_rows, vocab_size] float32: the token of rank r has a probability near r^-2, as peaked as those of text."""
    generator = torch.Generator().manual_seed(1)
    ranks = torch.rand(num_rows, vocab_size, generator=generator).argsort(dim=1) + 1
    return -2 * ranks.float().log()


def measure_rounds(case: Case, batch_size: int) -> RoundTime:
    stopwatch = Stopwatch()
    serve(Work(batch_size, case.num_rounds, case.temperature), lambda: _runner(case, batch_size, stopwatch))
    times = sorted(stopwatch.milliseconds(batch_size))
    return RoundTime(case.name, batch_size, statistics.median(times), times[99 * len(times) // 100], case.is_limited)


def _runner(case: Case, max_slots: int, stopwatch: Stopwatch) -> ModelRunner:
    if case.vocab_size is not None:
        return SamplerRunner(case.vocab_size, max_slots, stopwatch)
    return TimedFakeRunner(max_slots, stopwatch)


def _num_blocks(num_requests: int) -> int:
    return num_requests * -(-MAX_MODEL_LEN // BLOCK_SIZE)


def serve(work: Work, make_runner: Callable[[], ModelRunner]) -> None:
    """Run a rank loop in this thread until the front's process has had every answer."""
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=_num_blocks(work.num_requests),
            block_size=BLOCK_SIZE,
            max_batch_size=work.num_requests,
            max_scheduled_tokens=512,
            max_model_len=MAX_MODEL_LEN,
        )
    )
    with private_directory() as folder:
        endpoint = f"ipc://{folder}/loop"
        front = subprocess.Popen([sys.executable, "-m", "pdserve.bench.rounds_front", endpoint, work.words()])
        channel: RankChannel[ToRank, FromRank] = RankChannel(endpoint, ToRank)
        try:
            channel.send(Loading("waiting for requests", 1, 1))
            RankLoop(scheduler, make_runner(), channel, eos_token_ids=()).run()
        finally:
            front.kill()
            front.wait()
            channel.close()


def print_times(times: list[RoundTime], console: Console) -> None:
    table = Table("outside the forward, a round", "rows", "p50 ms", "p99 ms", "limit", box=SIMPLE)
    for row in times:
        limit = "" if not row.is_limited else f"{LIMIT_MS:g} ms" if row.is_good else f"[red]{LIMIT_MS:g} ms[/red]"
        table.add_row(row.case, str(row.batch_size), f"{row.p50_ms:.2f}", f"{row.p99_ms:.2f}", limit)
    console.print(table)


def main(argv: list[str] | None = None) -> int:
    """0 when every limited case is below LIMIT_MS."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="also write the figures as JSON; - is standard output")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    times = [measure_rounds(case, batch_size) for case in CASES for batch_size in BATCH_SIZES]
    print_times(times, Console(highlight=False, stderr=arguments.json == "-"))
    if arguments.json:
        write_json(arguments.json, [asdict(row) for row in times])
    return int(not all(row.is_good for row in times))


if __name__ == "__main__":
    sys.exit(main())
