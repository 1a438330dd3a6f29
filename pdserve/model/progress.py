"""Progress of slow start-up work: a bar on a terminal, one line at the start and the end of a step elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Protocol, TextIO


class Progress(Protocol):
    """Told how far a step is. A step begins with its first call and ends with the one where done >= total."""

    def __call__(self, step: str, done: int, total: int) -> None:
        """`done` of `total` units (bytes, tensors ...) of `step`. Called from one thread."""


def no_progress(step: str, done: int, total: int) -> None:
    """Says nothing."""


class _Lines:
    """One line when a step begins, one with its seconds when it ends."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._started: dict[str, float] = {}

    def __call__(self, step: str, done: int, total: int) -> None:
        if step not in self._started:
            self._started[step] = time.monotonic()
            print(f"{step} ...", file=self._stream, flush=True)
        if done >= total:
            elapsed_s = time.monotonic() - self._started.pop(step)
            print(f"{step}: done in {elapsed_s:.1f} s", file=self._stream, flush=True)


@contextlib.contextmanager
def show_progress(stream: TextIO | None = None) -> Iterator[Progress]:
    """A Progress that draws on `stream` (default: standard error) while the context is open."""
    stream = sys.stderr if stream is None else stream
    if not stream.isatty():
        yield _Lines(stream)
        return
    # Imported here: a node without a terminal never needs it.
    from rich.console import Console
    from rich.progress import BarColumn, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Bars(*columns, console=Console(file=stream)) as bars:
        tasks: dict[str, TaskID] = {}

        def draw(step: str, done: int, total: int) -> None:
            if step not in tasks:
                tasks[step] = bars.add_task(step, total=total)
            bars.update(tasks[step], completed=done, total=total)

        yield draw
