"""Engines in turns: each repeat starts every engine once, measures all cells, and ends it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from pdserve.bench.peers.http_server import ServerFailed
from pdserve.bench.serve.usage import Usage
from pdserve.bench.speed.cells import Cell, NeverTogether
from pdserve.bench.speed.engines import Engine, EngineFailed, Running
from pdserve.errors import PdserveError
from pdserve.model.progress import Progress

MIB = 2**20
# What a start or a cell may end with; the others go on.
FAILURES = (EngineFailed, NeverTogether, ServerFailed, PdserveError, OSError, ExceptionGroup)


@dataclass(slots=True)
class Row:
    """One engine's figures, of each repeat in which there was one; reasons: why there was none, by cell.

    started_s: from its start until it is warm. peak_mib: resident, of all its processes.
    """

    engine: str
    weights: str
    version: str
    is_peer: bool
    is_over_grpc: bool
    tokens_per_s: dict[str, list[float]]
    reasons: dict[str, str] = field(default_factory=dict)
    started_s: list[float] = field(default_factory=list)
    peak_mib: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, engine: Engine, cells: Iterable[Cell]) -> Row:
        speeds: dict[str, list[float]] = {cell.name: [] for cell in cells}
        return cls(engine.name, engine.weights, engine.version, engine.is_peer, engine.is_over_grpc, speeds)

    @property
    def title(self) -> str:
        return f"{self.engine} {self.weights}"

    def median(self, cell: str) -> float | None:
        """Tokens a second; None where it failed in a repeat."""
        found = self.tokens_per_s[cell]
        return statistics.median(found) if found and cell not in self.reasons else None


def take_turns(
    engines: Sequence[Engine], cells: Sequence[Cell], text: Sequence[int], repeats: int, progress: Progress
) -> list[Row]:
    rows = [Row.of(engine, cells) for engine in engines]
    for repeat in range(repeats):
        for engine, row in zip(engines, rows, strict=True):
            step = f"{engine.title}, repeat {repeat + 1}"
            progress(step, 0, len(cells))
            _turn(engine, row, cells, text, repeat, partial(progress, step))
            progress(step, len(cells), len(cells))
    return rows


def _turn(
    engine: Engine,
    row: Row,
    cells: Sequence[Cell],
    text: Sequence[int],
    repeat: int,
    progress: Callable[[int, int], None],
) -> None:
    """What fails is noted in the row."""
    try:
        engine.prepare()
        begun_s = time.monotonic()
        with Usage() as usage, engine.start() as running:
            if not engine.is_called_anew:
                row.started_s.append(time.monotonic() - begun_s)
            for number, cell in enumerate(cells):
                progress(number, len(cells))
                _measure(running, row, cell, text, repeat)
    except FAILURES as error:
        row.reasons.update({cell.name: _told(error) for cell in cells if cell.name not in row.reasons})
        return
    row.peak_mib.append(usage.peak_bytes / MIB)


def _measure(running: Running, row: Row, cell: Cell, text: Sequence[int], repeat: int) -> None:
    try:
        row.tokens_per_s[cell.name].append(running.speed(cell, text, repeat))
    except FAILURES as error:
        row.reasons[cell.name] = _told(error)


def _told(error: BaseException) -> str:
    """In one line; of several, the first."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return " ".join(str(error).split()) or type(error).__name__
