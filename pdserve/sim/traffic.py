"""One kind of traffic in as many independent samples as a tuner asks for, and others to check it by."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import NamedTuple, Protocol

from pdserve.errors import StartupError
from pdserve.sim.capacity import capacity_per_s
from pdserve.sim.deployment import Deployment
from pdserve.sim.presets import Preset
from pdserve.sim.trace import Trace
from pdserve.sim.workload import SimRequest, Workload


class Sample(NamedTuple):
    """Which one: its seed, and whether it is one of those that no search may see."""

    seed: int
    is_held_out: bool = False


class Traffic(Protocol):
    """One kind of traffic at one rate."""

    @property
    def text(self) -> str:
        """What it is, in a few words."""

    def workload(self, sample: Sample) -> Workload: ...

    def capacity_per_s(self, deployment: Deployment) -> float:
        """Requests of this kind that a deployment finishes a second at most."""


@dataclass(frozen=True, slots=True)
class PresetTraffic:
    """Drawn anew for each sample."""

    preset: Preset
    longest_request: int
    rate_per_s: float
    num_requests: int

    @property
    def text(self) -> str:
        return f"{self.preset.name}, {self.num_requests:,} requests, {self.rate_per_s:.3g} a second"

    def workload(self, sample: Sample) -> Workload:
        # Of two seeds one may be held out and the other not, and they would be the same traffic.
        seed = Random(f"{sample.seed} {sample.is_held_out}").getrandbits(32)
        return self.preset.workload(self.longest_request, self.rate_per_s, self.num_requests, seed)

    def capacity_per_s(self, deployment: Deployment) -> float:
        return capacity_per_s(deployment, self.preset.shapes(self.longest_request))


@dataclass(frozen=True, slots=True)
class TraceTraffic:
    """Stretches of num_requests requests that follow each other, from anywhere in the first half of a trace; those that
    are held out from the second. name: of the trace."""

    name: str
    requests: tuple[SimRequest, ...]
    num_requests: int

    @property
    def text(self) -> str:
        return f"{self.num_requests:,} requests in a row of {self.name}"

    def workload(self, sample: Sample) -> Workload:
        middle = len(self.requests) // 2
        first = middle if sample.is_held_out else 0
        start = first + Random(sample.seed).randrange(middle - self.num_requests + 1)
        return Recorded(self.requests[start : start + self.num_requests])

    def capacity_per_s(self, deployment: Deployment) -> float:
        return capacity_per_s(deployment, RecordedShapes.of(self.requests))


@dataclass(frozen=True, slots=True)
class Recorded:
    """Requests as they came, from time 0."""

    requests: Sequence[SimRequest]

    def arrivals(self) -> Iterator[SimRequest]:
        start_s = self.requests[0].arrival_s
        for number, request in enumerate(self.requests):
            yield dataclasses.replace(request, number=number, arrival_s=request.arrival_s - start_s)

    def after(self, request: SimRequest, now_s: float) -> SimRequest | None:
        return None


@dataclass(frozen=True, slots=True)
class RecordedShapes:
    """Lengths as often as they were seen, without what prompts have in common."""

    lengths: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, requests: Iterable[SimRequest]) -> RecordedShapes:
        return cls(tuple((one.num_prompt_tokens, one.num_output_tokens) for one in requests))

    def draw(self, random: Random) -> tuple[int, int]:
        return random.choice(self.lengths)

    @property
    def mean(self) -> tuple[float, float]:
        prompts, outputs = zip(*self.lengths, strict=True)
        return sum(prompts) / len(prompts), sum(outputs) / len(outputs)


def preset_traffic(preset: Preset, deployment: Deployment, load: float, num_requests: int) -> PresetTraffic:
    """load: the share of what the deployment can take of such requests."""
    longest = deployment.longest_request
    rate_per_s = load * capacity_per_s(deployment, preset.shapes(longest))
    return PresetTraffic(preset, longest, rate_per_s, num_requests)


def trace_traffic(path: Path, deployment: Deployment, load: float, num_requests: int) -> TraceTraffic:
    """The trace, its arrivals nearer together or further apart for that load. Raises StartupError where it is too short
    to search in one half and check in the other."""
    requests = tuple(Trace(path).arrivals())
    if len(requests) < 4 * num_requests:
        raise StartupError(
            f"{path} has {len(requests)} requests; half of it is held out, and each half has to hold more than one "
            f"stretch of {num_requests}: give --requests {max(1, len(requests) // 4)} or a longer trace"
        )
    rate_per_s = len(requests) / max(requests[-1].arrival_s - requests[0].arrival_s, 1e-9)
    scale = load * capacity_per_s(deployment, RecordedShapes.of(requests)) / rate_per_s
    scaled = tuple(dataclasses.replace(one, arrival_s=one.arrival_s / scale) for one in requests)
    return TraceTraffic(path.name, scaled, num_requests)
