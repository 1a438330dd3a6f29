"""Who calls when: requests as independent callers make them (an open loop), or as so many users do who wait for answers
(a closed loop). A seed is a workload; requests are drawn as the clock comes to them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

from pdserve.errors import StartupError
from pdserve.sim.lengths import Lengths
from pdserve.sim.workload import SimRequest


class Shapes(Protocol):
    """A distribution of (prompt tokens, output tokens)."""

    def draw(self, random: Random) -> tuple[int, int]: ...

    @property
    def mean(self) -> tuple[float, float]: ...


@dataclass(frozen=True, slots=True)
class Shape:
    """Prompt and answer, drawn apart."""

    prompt: Lengths
    output: Lengths

    def draw(self, random: Random) -> tuple[int, int]:
        return self.prompt.draw(random), self.output.draw(random)

    @property
    def mean(self) -> tuple[float, float]:
        return self.prompt.mean, self.output.mean


@dataclass(frozen=True, slots=True)
class MixedShapes:
    """Kinds of request, each with a share, that differ in prompt and answer together."""

    parts: tuple[tuple[float, Shape], ...]

    def draw(self, random: Random) -> tuple[int, int]:
        (chosen,) = random.choices([part for _, part in self.parts], [share for share, _ in self.parts])
        return chosen.draw(random)

    @property
    def mean(self) -> tuple[float, float]:
        total = sum(share for share, _ in self.parts)
        prompts, outputs = zip(*(part.mean for _, part in self.parts), strict=True)
        return self._weighted(prompts) / total, self._weighted(outputs) / total

    def _weighted(self, values: Sequence[float]) -> float:
        return sum(share * value for (share, _), value in zip(self.parts, values, strict=True))


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Callers who know nothing of each other. burstiness: of the gaps' gamma distribution, its shape; 1 is Poisson,
    less is burstier (a coefficient of variation of 1 / sqrt(burstiness)).
    """

    rate_per_s: float
    num_requests: int
    shapes: Shapes
    burstiness: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        _positive("--rate", self.rate_per_s)
        _positive("--burstiness", self.burstiness)
        _at_least_one("--requests", self.num_requests)

    def arrivals(self) -> Iterator[SimRequest]:
        random = Random(self.seed)
        scale_s = 1 / (self.rate_per_s * self.burstiness)
        now_s = 0.0
        for number in range(self.num_requests):
            now_s += random.gammavariate(self.burstiness, scale_s)
            yield SimRequest(number, now_s, *self.shapes.draw(random))

    def after(self, request: SimRequest, now_s: float) -> SimRequest | None:
        return None


class ClosedLoop:
    """num_users who each ask, read the answer, think for a while (exponential, think_s on average) and ask again, until
    num_requests were asked in all. Everybody thinks before the first question too.
    """

    def __init__(self, num_users: int, num_requests: int, shapes: Shapes, think_s: float = 0.0, seed: int = 0) -> None:
        _at_least_one("--users", num_users)
        _at_least_one("--requests", num_requests)
        if not (math.isfinite(think_s) and think_s >= 0):
            raise StartupError(f"--think-s {think_s:g} must be a number of seconds, 0 or more")
        self._num_users = num_users
        self._num_requests = num_requests
        self._shapes = shapes
        self._think_s = think_s
        self._random = Random(seed)
        self._num_asked = 0

    def arrivals(self) -> Iterator[SimRequest]:
        first = [self._ask(0.0) for _ in range(min(self._num_users, self._num_requests))]
        ordered = sorted((request for request in first if request is not None), key=lambda item: item.arrival_s)
        # Numbers follow the order of arrival, as in every workload.
        return (dataclasses.replace(request, number=number) for number, request in enumerate(ordered))

    def after(self, request: SimRequest, now_s: float) -> SimRequest | None:
        return self._ask(now_s)

    def _ask(self, now_s: float) -> SimRequest | None:
        if self._num_asked == self._num_requests:
            return None
        number = self._num_asked
        self._num_asked += 1
        thought_s = self._random.expovariate(1 / self._think_s) if self._think_s else 0.0
        return SimRequest(number, now_s + thought_s, *self._shapes.draw(self._random))


def _positive(flag: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise StartupError(f"{flag} {value:g} must be more than 0")


def _at_least_one(flag: str, value: int) -> None:
    if value < 1:
        raise StartupError(f"{flag} {value} must be at least 1")
