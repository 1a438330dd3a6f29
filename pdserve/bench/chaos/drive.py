"""Requests and faults of a chaos run, in step with each other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from pdserve.bench.chaos.faults import Fault, FaultKind, Injector
from pdserve.bench.chaos.fleet import Fleet, Member
from pdserve.bench.chaos.requests import UNDISTURBED_S, Attempted, ChaosAsk, attempt, follow
from pdserve.bench.waiting import until
from pdserve.client import AsyncClient

POLL_S = 0.01
# The faults may run ahead of the requests by so many, and the requests ahead of the faults by what is in flight.
MAX_FAULTS_AHEAD = 3


async def ask_reference(
    client: AsyncClient, asks: Sequence[ChaosAsk], num_streams: int, on_done: Callable[[int], None]
) -> dict[int, Attempted]:
    """A node's answers that nothing disturbs, with the two best tokens of each position."""
    done: dict[int, Attempted] = {}
    waiting = iter(asks)

    async def work() -> None:
        for ask in waiting:
            attempted = attempt(ask, "reference", UNDISTURBED_S)
            await follow(client, attempted, with_runners_up=True)
            done[ask.number] = attempted
            on_done(len(done))

    async with asyncio.TaskGroup() as group:
        for _ in range(num_streams):
            group.create_task(work())
    return done


@dataclass(slots=True)
class Drive:
    """All requests through the fleet's decode nodes, and all faults meanwhile."""

    fleet: Fleet
    asks: Sequence[ChaosAsk]
    num_faults: int
    num_streams: int
    hang_s: float
    random: Random
    shares: Mapping[FaultKind, int]
    on_done: Callable[[int, int], None] = lambda num_requests, num_faults: None
    in_flight: dict[str, Attempted] = field(default_factory=dict)
    done: list[Attempted] = field(default_factory=list)
    num_started: int = 0
    _gate: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> list[Fault]:
        """The faults, when every one is over and every request has ended."""
        self._gate.set()
        injector = Injector(self.fleet, self.in_flight, self._quiesce, self._gate.set, self.random, self.shares)
        waiting = iter(self.asks)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self.num_streams):
                    group.create_task(self._work(waiting, injector))
                group.create_task(self._inject(injector))
            await injector.settled()
        finally:
            await injector.end()
        return injector.faults

    async def _work(self, waiting: Iterator[ChaosAsk], injector: Injector) -> None:
        for ask in waiting:
            await until(lambda: self._may_start(injector), poll_s=POLL_S)
            await self._gate.wait()
            decode = await self._choose()
            self.num_started += 1
            attempted = self.in_flight[ask.name] = attempt(ask, decode.name, self.hang_s)
            try:
                await asyncio.create_task(follow(self.fleet.clients[decode.name], attempted))
            finally:
                del self.in_flight[ask.name]
                self.done.append(attempted)
                self.on_done(len(self.done), len(injector.faults))

    def _may_start(self, injector: Injector) -> bool:
        """No request runs far ahead of its share of the faults."""
        owed = (len(injector.faults) + 1) * len(self.asks) / max(1, self.num_faults)
        return self.num_started < owed + self.num_streams or len(injector.faults) >= self.num_faults

    async def _choose(self) -> Member:
        """The decode node that serves and has the fewest requests; waited for while none serves."""
        await until(lambda: not all(member.is_down for member in self.fleet.decodes), poll_s=POLL_S)
        up = [member for member in self.fleet.decodes if not member.is_down]
        targets = [attempted.target for attempted in self.in_flight.values()]
        return min(up, key=lambda member: targets.count(member.name))

    async def _inject(self, injector: Injector) -> None:
        while len(injector.faults) < self.num_faults:
            await until(lambda: self._may_inject(injector), poll_s=POLL_S)
            await injector.inject()

    def _may_inject(self, injector: Injector) -> bool:
        """No fault runs far ahead of its share of the requests."""
        owed = (len(injector.faults) - MAX_FAULTS_AHEAD) * len(self.asks) / self.num_faults
        return self.num_started >= min(owed, len(self.asks))

    async def _quiesce(self, timeout_s: float) -> None:
        """Start nothing more, and wait until nothing is in flight; `_gate.set` starts again."""
        self._gate.clear()
        await until(lambda: not self.in_flight, poll_s=POLL_S, timeout_s=timeout_s)
