"""What is asked of a server, and when: the same requests at the same moments of every server, by a seed.

A repetition has other prompts of the same lengths, so that nobody finds those of the one before in a cache.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Protocol

from pdserve.bench.listening import Call, unique_prompt
from pdserve.bench.serve.clients import Driven, Server, beside_long_prompt, closed_loop, open_loop, within
from pdserve.sim.arrivals import OpenLoop, Shapes
from pdserve.sim.trace import Trace
from pdserve.sim.workload import SimRequest

# Of the answer to a long prompt: enough for the gap at its joining to be seen, whichever stream has it.
NUM_ASKED = 24
# Of the closed loops' sequence of lengths and prompts; long prompts are numbered apart.
LONG_NUMBER = -1


@dataclass(frozen=True, slots=True)
class Limit:
    """What ends a load, whichever comes first: None does not. seconds: nothing is asked after."""

    seconds: float | None = None
    num_requests: int | None = None


@dataclass(frozen=True, slots=True)
class Material:
    """What requests are made of. text: the tokens that prompts are drawn from. timeout_s: of a request."""

    text: Sequence[int]
    shapes: Shapes
    seed: int = 0
    timeout_s: float = 300.0

    def prompt(self, num_tokens: int, what: str) -> tuple[int, ...]:
        return unique_prompt(self.text, num_tokens, f"{self.seed} {what}")

    def calls(self, what: str, repeat: int) -> Iterator[Call]:
        """Requests without end."""
        random = Random(f"{self.seed} {what}")
        for number in itertools.count():
            num_tokens, num_output_tokens = self.shapes.draw(random)
            yield Call(number, self.prompt(num_tokens, f"{what} {repeat} {number}"), num_output_tokens)


class Load(Protocol):
    """name: in tables and JSON, unlike every other load's of a run."""

    @property
    def name(self) -> str: ...

    async def put_to(self, server: Server, repeat: int) -> Driven: ...


@dataclass(frozen=True, slots=True)
class ClosedLoad:
    """So many clients, each of which asks when it has been answered."""

    num_streams: int
    material: Material
    limit: Limit

    @property
    def name(self) -> str:
        return f"{self.num_streams} streams" if self.num_streams > 1 else "1 stream"

    async def put_to(self, server: Server, repeat: int) -> Driven:
        calls: Iterator[Call] = itertools.islice(self.material.calls(self.name, repeat), self.limit.num_requests)
        if self.limit.seconds is not None:
            calls = within(calls, self.limit.seconds)
        return await closed_loop(server, calls, self.num_streams, self.material.timeout_s)


@dataclass(frozen=True, slots=True)
class LongPromptLoad:
    """The clients of a closed loop, and one prompt of num_tokens that arrives while they go on."""

    num_streams: int
    num_tokens: int
    material: Material

    @property
    def name(self) -> str:
        return f"{self.num_streams} + a prompt of {self.num_tokens:,}"

    async def put_to(self, server: Server, repeat: int) -> Driven:
        prompt = self.material.prompt(self.num_tokens, f"{self.name} {repeat} long")
        calls = self.material.calls(self.name, repeat)
        long_prompt = Call(LONG_NUMBER, prompt, NUM_ASKED)
        return await beside_long_prompt(server, calls, self.num_streams, long_prompt, self.material.timeout_s)


@dataclass(frozen=True, slots=True)
class PoissonLoad:
    """Callers who know nothing of each other, at a mean rate."""

    rate_per_s: float
    material: Material
    limit: Limit

    @property
    def name(self) -> str:
        return f"{self.rate_per_s:g} requests/s"

    def calls(self, repeat: int) -> list[Call]:
        num_requests = self.limit.num_requests or max(1, round(self.rate_per_s * (self.limit.seconds or 0.0)))
        loop = OpenLoop(self.rate_per_s, num_requests, self.material.shapes, seed=self.material.seed)
        return [
            Call(
                request.number,
                self.material.prompt(request.num_prompt_tokens, f"{self.name} {repeat} {request.number}"),
                request.num_output_tokens,
                request.arrival_s,
            )
            for request in loop.arrivals()
            if request.arrival_s < _seconds(self.limit) or not request.number
        ]

    async def put_to(self, server: Server, repeat: int) -> Driven:
        return await open_loop(server, self.calls(repeat), self.material.timeout_s)


@dataclass(frozen=True, slots=True)
class TraceLoad:
    """Recorded traffic, scaled: rate_scale 0.1 = a tenth of its requests a second; length_scale 0.1 = a tenth of the
    tokens of each prompt, of each piece that prompts share, and of each answer.
    """

    path: Path
    rate_scale: float
    length_scale: float
    material: Material
    limit: Limit

    @property
    def name(self) -> str:
        return f"trace {self.path.stem}"

    def calls(self, repeat: int) -> list[Call]:
        """Raises StartupError for what is no such trace."""
        trace = Trace(self.path, self.rate_scale, self.limit.num_requests)
        requests = itertools.takewhile(lambda request: request.arrival_s < _seconds(self.limit), trace.arrivals())
        return [self._call(request, repeat) for request in requests]

    async def put_to(self, server: Server, repeat: int) -> Driven:
        return await open_loop(server, self.calls(repeat), self.material.timeout_s)

    def _call(self, request: SimRequest, repeat: int) -> Call:
        piece_tokens = math.ceil(request.hash_block_tokens * self.length_scale)
        pieces = (self.material.prompt(piece_tokens, f"trace {repeat} piece {name}") for name in request.hash_ids)
        prompt = tuple(itertools.chain.from_iterable(pieces))[: self._scaled(request.num_prompt_tokens)]
        return Call(request.number, prompt, self._scaled(request.num_output_tokens), request.arrival_s)

    def _scaled(self, num_tokens: int) -> int:
        return max(1, round(num_tokens * self.length_scale))


def _seconds(limit: Limit) -> float:
    return math.inf if limit.seconds is None else limit.seconds
