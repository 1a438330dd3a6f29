"""What is measured: engines that can be started, and that say how fast they are in a cell while they run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pdserve.bench.deployed import WARM_UP_LENGTHS, WARM_UP_TOKENS
from pdserve.bench.listening import Call, Heard, unique_prompt
from pdserve.bench.policy_runs import Model
from pdserve.bench.speed.cells import Cell

WARM_UP_ROOM = max(WARM_UP_LENGTHS) + WARM_UP_TOKENS


class EngineFailed(Exception):
    """An engine gave no figure; why."""


class Running(Protocol):
    """An engine that is up."""

    def speed(self, cell: Cell, text: Sequence[int], repeat: int) -> float:
        """Tokens a second. Raises EngineFailed, ServerFailed, or what a client of ours raises."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What every engine is started with. peers: the folder of the others' environments; folder: for logs."""

    model: Model
    cells: Sequence[Cell]
    peers: Path
    folder: Path
    num_threads: int

    @property
    def most_streams(self) -> int:
        return max(cell.num_streams for cell in self.cells)

    @property
    def most_tokens(self) -> int:
        """Of all prompts and answers of a cell, or of what warms up."""
        return max(WARM_UP_ROOM, *(cell.total_tokens for cell in self.cells))

    def stream_tokens(self, num_streams: int) -> int:
        """The longest prompt with its answer of cells with so many streams, or of what warms up."""
        cells = [cell for cell in self.cells if cell.num_streams == num_streams]
        return max(WARM_UP_ROOM, *(cell.num_prompt_tokens + cell.num_tokens for cell in cells))


@dataclass(frozen=True, slots=True)
class Engine:
    """start: until its block ends it runs, and is warm where it is more than a tool that is called for each cell.

    prepare: makes what it needs beside the model, the first time; not a part of its start.
    is_peer: not ours. is_over_grpc: a client measures it, through the whole system.
    """

    name: str
    weights: str
    version: str
    start: Callable[[], AbstractContextManager[Running]]
    prepare: Callable[[], object] = lambda: None
    is_peer: bool = False
    is_over_grpc: bool = False
    is_called_anew: bool = False

    @property
    def title(self) -> str:
        return f"{self.name} {self.weights}"


@dataclass(frozen=True, slots=True)
class Answering:
    """An engine that answers calls, whose arrivals are heard here."""

    hear_all: Callable[[Sequence[Call]], list[Heard]]

    def speed(self, cell: Cell, text: Sequence[int], repeat: int) -> float:
        return cell.tokens_per_s(self.hear_all(cell.calls(text, repeat)))

    def warm(self, text: Sequence[int]) -> None:
        """What bench.deployed asks of our nodes, one prompt after the other."""
        for length in WARM_UP_LENGTHS:
            self.hear_all([Call(0, unique_prompt(text, length, f"warm-up {length}"), WARM_UP_TOKENS)])


class Hearing(Protocol):
    """A server or a child process that is up."""

    def hear_all(self, calls: Sequence[Call]) -> list[Heard]:
        """Every answer, in the order of `calls`."""


@contextlib.contextmanager
def warmed(starting: AbstractContextManager[Hearing], text: Sequence[int]) -> Iterator[Answering]:
    with starting as running:
        answering = Answering(running.hear_all)
        answering.warm(text)
        yield answering
