"""A run of `pdserve bench peers`: the engines in turns, and what each did."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from pdserve.bench.asking import TIMEOUT_S
from pdserve.bench.deployed import WARM_UP_LENGTHS, WARM_UP_TOKENS, pair
from pdserve.bench.listening import Call, Heard, hear
from pdserve.bench.peers.kills import Killed, kill_ours, kill_theirs
from pdserve.bench.peers.rows import Engine, Row, measure, median_row
from pdserve.bench.peers.vllm import vllm_pair
from pdserve.bench.policy_runs import Model
from pdserve.client import AsyncClient
from pdserve.commands.tables import write_json
from pdserve.model import hub
from pdserve.model.progress import Progress, show_progress
from pdserve.node_process import interrupted_by_sigterm

# Room for eight long answers beside the longest prompt.
OUR_SETTINGS = {"num_kv_blocks": 800, "max_num_seqs": 16, "chunked_prefill_size": 512}
OURS, THEIRS = "pdserve", "vLLM"


@dataclass(frozen=True, slots=True)
class Compared:
    """Both engines' medians of one row."""

    ours: Row
    theirs: Row

    def ratios(self) -> dict[str, float]:
        """Theirs over ours: above 1 we are ahead."""
        return {
            name: getattr(self.theirs, name) / getattr(self.ours, name) for name in ("ttft_s", "itl_s", "worst_gap_s")
        }

    @property
    def is_ahead(self) -> bool:
        return all(ratio > 1 for ratio in self.ratios().values())


@dataclass(frozen=True, slots=True)
class Ours:
    """Our pair as an engine."""

    client: AsyncClient

    async def hear(self, call: Call, is_enough: Callable[[int], bool]) -> Heard:
        return await hear(self.client, call, is_enough)


def run(arguments: argparse.Namespace) -> int:
    """0 when we are ahead in every row."""
    environment = Path(arguments.vllm_env).absolute()
    console = Console(highlight=False, stderr=arguments.json == "-")
    with interrupted_by_sigterm(), show_progress() as progress, TemporaryDirectory() as folder:
        model = Model.of(hub.resolve(arguments.model, progress=progress))
        compared = [] if arguments.only == "kills" else _rows(arguments, environment, model, Path(folder), progress)
        killed = [] if arguments.only == "rows" else _kills(environment, model, Path(folder), progress)
    _print(compared, killed, console)
    if arguments.json:
        figures = [{**asdict(row), "theirs_over_ours": row.ratios()} for row in compared]
        write_json(arguments.json, {"rows": figures, "kills": [asdict(one) for one in killed]})
    return int(not all(row.is_ahead for row in compared))


def _rows(
    arguments: argparse.Namespace, environment: Path, model: Model, folder: Path, progress: Progress
) -> list[Compared]:
    """The engines in turns: each repeat is a start of the one, and of the other."""
    cases = [(length, streams) for length in arguments.lengths for streams in arguments.streams]
    found: dict[str, dict[tuple[int, int], list[Row]]] = {OURS: {}, THEIRS: {}}
    for repeat in range(arguments.repeats):
        turns = {OURS: _our_turn(model, cases, repeat, progress)}
        turns[THEIRS] = _their_turn(environment, model, folder, cases, repeat, progress)
        for engine, rows in turns.items():
            for row in rows:
                found[engine].setdefault((row.num_tokens, row.num_streams), []).append(row)
    return [Compared(median_row(found[OURS][case]), median_row(found[THEIRS][case])) for case in cases]


def _our_turn(model: Model, cases: Sequence[tuple[int, int]], repeat: int, progress: Progress) -> list[Row]:
    async def run(address: str) -> list[Row]:
        async with AsyncClient(address, timeout_s=TIMEOUT_S, max_attempts=1) as client:
            await client.server_info()
            return await _measure_all(Ours(client), OURS, model, cases, repeat, progress)

    with pair(model, **OUR_SETTINGS) as node:
        return asyncio.run(run(node.address))


def _their_turn(
    environment: Path, model: Model, folder: Path, cases: Sequence[tuple[int, int]], repeat: int, progress: Progress
) -> list[Row]:
    with vllm_pair(environment, model.directory, folder, progress) as engine:
        for length in WARM_UP_LENGTHS:
            asyncio.run(engine.hear(Call(0, model.text[:length], WARM_UP_TOKENS)))
        return asyncio.run(_measure_all(engine, THEIRS, model, cases, repeat, progress))


async def _measure_all(
    engine: Engine,
    name: str,
    model: Model,
    cases: Sequence[tuple[int, int]],
    repeat: int,
    progress: Progress,
) -> list[Row]:
    rows = []
    for number, (length, streams) in enumerate(cases):
        progress(f"{name}, turn {repeat + 1}", number, len(cases))
        rows.append(await measure(engine, model.text, length, streams, repeat))
    progress(f"{name}, turn {repeat + 1}", len(cases), len(cases))
    return rows


def _kills(environment: Path, model: Model, folder: Path, progress: Progress) -> list[Killed]:
    ours = asyncio.run(kill_ours(model.directory, model.text, folder, progress))
    with vllm_pair(environment, model.directory, folder, progress) as engine:
        return [*ours, *asyncio.run(kill_theirs(engine, model.text, progress))]


def _print(compared: Sequence[Compared], killed: Sequence[Killed], console: Console) -> None:
    if compared:
        table = Table("prompt", "streams", "engine", "TTFT, s", "ITL p50, ms", "worst gap, ms", box=SIMPLE)
        for row in compared:
            for engine, one in ((OURS, row.ours), (THEIRS, row.theirs)):
                table.add_row(f"{one.num_tokens:,}", str(one.num_streams), engine, *_figures(one))
            ratios = [f"{ratio:.2f}" for ratio in row.ratios().values()]
            table.add_row("", "", "vLLM / pdserve", *ratios, style="bold" if row.is_ahead else "red")
        console.print(table)
        same = sum(row.ours.first_tokens == row.theirs.first_tokens for row in compared)
        console.print(f"the prompt's answer was the same in {same} of {len(compared)} rows")
    if killed:
        table = Table("prefill node killed", "engine", "the caller got", "after, s", box=SIMPLE)
        for kill in sorted(killed, key=lambda kill: kill.moment):
            table.add_row(kill.moment, kill.engine, kill.outcome, f"{kill.after_s:.2f}")
        console.print(table)


def _figures(row: Row) -> tuple[str, str, str]:
    return f"{row.ttft_s:.2f}", f"{row.itl_s * 1000:.0f}", f"{row.worst_gap_s * 1000:.0f}"
