"""Random arrivals, run through our scheduler or TokenSpeed's and told round by round in the same words."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol

import pytest

from pdserve.request import RequestId
from pdserve.scheduler.config import SchedulerConfig
from pdserve.scheduler.plan import StepDone, Submission
from pdserve.scheduler.scheduler import Scheduler

pytest.importorskip("tokenspeed_scheduler")

from pdserve.bench.tokenspeed import ANSWER_HEADROOM, TOKEN, Chunk, Round, TokenSpeed


@dataclass(frozen=True)
class Arrival:
    """A prompt that comes before round `round`. abort_at: before which its caller leaves, if it does."""

    round: int
    request_id: str
    prompt: tuple[int, ...]
    max_new_tokens: int
    abort_at: int | None = None


@dataclass(frozen=True)
class Workload:
    config: SchedulerConfig
    arrivals: tuple[Arrival, ...]

    @property
    def comes(self) -> dict[int, list[Arrival]]:
        """Who arrives, by round."""
        comes: dict[int, list[Arrival]] = defaultdict(list)
        for arrival in self.arrivals:
            comes[arrival.round].append(arrival)
        return comes

    @property
    def leaves(self) -> dict[int, list[str]]:
        """Whose caller leaves, by round."""
        leaves: dict[int, list[str]] = defaultdict(list)
        for arrival in self.arrivals:
            if arrival.abort_at is not None:
                leaves[arrival.abort_at].append(arrival.request_id)
        return leaves

    @property
    def last_round(self) -> int:
        """Enough rounds for everybody to be served alone."""
        return max(a.round for a in self.arrivals) + sum(len(a.prompt) + a.max_new_tokens for a in self.arrivals)


class Side(Protocol):
    """One of the two schedulers."""

    @property
    def is_idle(self) -> bool: ...
    def submit(self, arrival: Arrival) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def round(self) -> Round: ...


class Ours:
    def __init__(self, config: SchedulerConfig) -> None:
        self._scheduler = Scheduler(config)

    @property
    def is_idle(self) -> bool:
        return self._scheduler.is_idle

    def submit(self, arrival: Arrival) -> None:
        self._scheduler.submit(Submission(RequestId(arrival.request_id), arrival.prompt, arrival.max_new_tokens))

    def abort(self, request_id: str) -> None:
        self._scheduler.abort(RequestId(request_id))

    def round(self) -> Round:
        plan = self._scheduler.plan()
        if plan.batch_size:
            self._scheduler.advance([StepDone(plan.round_id, [TOKEN] * len(plan.sampled_rows))])
        chunks = tuple(Chunk(row.request_id, row.start, row.end) for row in plan.prefill)
        return Round(chunks, tuple(row.request_id for row in plan.decode))


class Theirs:
    def __init__(self, config: SchedulerConfig) -> None:
        self._scheduler = TokenSpeed(config)

    @property
    def is_idle(self) -> bool:
        return self._scheduler.is_idle

    def submit(self, arrival: Arrival) -> None:
        self._scheduler.submit(arrival.request_id, arrival.prompt, arrival.max_new_tokens)

    def abort(self, request_id: str) -> None:
        self._scheduler.abort(request_id)

    def round(self) -> Round:
        plan = self._scheduler.plan()
        done = self._scheduler.read(plan)
        self._scheduler.advance(self._scheduler.results(done))
        return done


def run(side: Side, workload: Workload) -> list[Round]:
    """Every round until nobody is left."""
    rounds: list[Round] = []
    comes, leaves = workload.comes, workload.leaves
    last_arrival, last_round = max(comes), workload.last_round
    while len(rounds) <= last_arrival or not side.is_idle:
        assert len(rounds) <= last_round, "somebody waits forever"
        for request_id in leaves.get(len(rounds), ()):
            side.abort(request_id)
        for arrival in comes.get(len(rounds), ()):
            side.submit(arrival)
        rounds.append(side.round())
    return rounds


# ---------------------------------------------------------------- made by hand


def config(**numbers: Any) -> SchedulerConfig:
    """Blocks of one token and room for everybody, unless told otherwise."""
    roomy = {"num_blocks": 4096, "block_size": 1, "max_batch_size": 8, "max_scheduled_tokens": 32}
    numbers = {**roomy, **numbers}
    limit = numbers["num_blocks"] * numbers["block_size"]
    return SchedulerConfig(max_model_len=limit, answer_headroom=ANSWER_HEADROOM, **numbers)


def prompt(seed: object, length: int) -> tuple[int, ...]:
    """Like no other: nobody finds another's prefix."""
    random = Random(str(seed))
    return tuple(random.randrange(1 << 30) for _ in range(length))


def at_once(*requests: tuple[int, int]) -> tuple[Arrival, ...]:
    """Prompts r0, r1 … before the first round, each (prompt tokens, tokens of its answer)."""
    return tuple(Arrival(0, f"r{i}", prompt(i, length), answer) for i, (length, answer) in enumerate(requests))


# ---------------------------------------------------------------- made at random


def random_workload(seed: int) -> Workload:
    """Every sixteenth is a stream past prompts that are too large; the others are bursts of all sizes."""
    random = Random(seed)
    return _stream_past_large(random) if seed % 16 == 0 else _bursts(random)


def _bursts(random: Random) -> Workload:
    """5 to 60 prompts, most short, some of many rounds, over a pool that is often too small for all of them.

    The budget is often so small that decodes nearly fill a round.
    """
    block_size = random.choice((1, 2, 4, 8))
    max_batch_size = random.randint(1, 16)
    numbers = config(
        num_blocks=random.randint(8, 40) * 8 // block_size,
        block_size=block_size,
        max_batch_size=max_batch_size,
        max_scheduled_tokens=max(block_size + 1, max_batch_size) + random.choice((0, 1, random.randint(2, 64))),
        enable_mixed_batch=random.random() < 0.5,
        prefix_caching=random.random() < 0.5,
    )
    return Workload(numbers, tuple(_arrivals(random, (numbers.num_blocks - 1) * block_size)))


def _arrivals(random: Random, longest: int) -> Iterator[Arrival]:
    now = 0
    for index in range(random.randint(5, 60)):
        now += random.choice((0, 0, 0, 1, 2, 8))
        answer = random.randint(1, min(random.choice((4, 12, 80)), longest // 4))
        fits = longest - answer
        length = random.randint(1, fits if random.random() < 0.2 else min(fits, 24))
        abort_at = now + random.randint(1, 20) if random.random() < 0.1 else None
        yield Arrival(now, f"r{index}", prompt((random.random(), index), length), answer, abort_at)


def _stream_past_large(random: Random) -> Workload:
    """Somebody long holds half the pool, a few or very many ask for more than the other half, small ones stream in."""
    numbers = config(num_blocks=128, max_batch_size=8, enable_mixed_batch=random.random() < 0.5)
    arrivals = [Arrival(0, "long", prompt((random.random(), "long"), 4), 80)]
    for index in range(random.choice((1, 3, 40))):
        arrivals.append(Arrival(1, f"large{index}", prompt((random.random(), index), random.randint(60, 100)), 4))
    for round in range(2, 160):
        arrivals.append(Arrival(round, f"small{round}", prompt((random.random(), round), 2), random.randint(1, 3)))
    return Workload(numbers, tuple(arrivals))
