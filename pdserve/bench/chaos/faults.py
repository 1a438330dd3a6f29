"""What goes wrong in a chaos run, when, and whom it hits. A seed is a schedule, but for what the nodes make of it."""

from __future__ import annotations

import asyncio
import enum
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from random import Random

from pdserve.bench.chaos.fleet import Fleet, Member
from pdserve.bench.chaos.requests import Attempted
from pdserve.bench.control_proxy import ControlProxy
from pdserve.bench.data_channel import data_channel_cut
from pdserve.bench.handoff_witness import Phase
from pdserve.bench.waiting import until

# How long a phase that is short of hits is waited for.
AIM_S = 4.0
AIM_POLL_S = 0.002
# Stops and partitions last up to twice the leases.
FROZEN_S = (0.1, 4.0)
SLOW_S, SLOW_DELAY_S = (0.5, 3.0), (0.02, 0.3)
DRAIN_S = 30.0


class FaultKind(enum.Enum):
    KILL_P = "kill -9 P"
    KILL_D = "kill -9 D"
    KILL_P_RANK = "kill -9 P's rank"
    KILL_D_RANK = "kill -9 D's rank"
    STOP_P = "SIGSTOP P"
    STOP_D = "SIGSTOP D"
    STOP_P_RANK = "SIGSTOP P's rank"
    STOP_D_RANK = "SIGSTOP D's rank"
    LEAVE = "client leaves"
    HOLD = "control held"
    CUT = "control cut"
    SLOW = "control slow"
    TRUNCATE = "control truncated"
    CUT_DATA = "P's data channel cut"


AT_P = {FaultKind.KILL_P, FaultKind.KILL_P_RANK, FaultKind.STOP_P, FaultKind.STOP_P_RANK, FaultKind.CUT_DATA}
AT_D = {FaultKind.KILL_D, FaultKind.KILL_D_RANK, FaultKind.STOP_D, FaultKind.STOP_D_RANK}
KILLS = {FaultKind.KILL_P, FaultKind.KILL_D, FaultKind.KILL_P_RANK, FaultKind.KILL_D_RANK}
OF_RANK = {
    FaultKind.KILL_P_RANK,
    FaultKind.KILL_D_RANK,
    FaultKind.STOP_P_RANK,
    FaultKind.STOP_D_RANK,
    FaultKind.CUT_DATA,
}
# Answers die with their decode node: it is killed rarely enough for nineteen of twenty requests to be answered.
SHARES = {
    FaultKind.KILL_P: 10,
    FaultKind.KILL_P_RANK: 8,
    FaultKind.KILL_D: 2,
    FaultKind.KILL_D_RANK: 1,
    FaultKind.STOP_P: 8,
    FaultKind.STOP_D: 8,
    FaultKind.STOP_P_RANK: 7,
    FaultKind.STOP_D_RANK: 7,
    FaultKind.LEAVE: 25,
    FaultKind.HOLD: 8,
    FaultKind.CUT: 8,
    FaultKind.SLOW: 4,
    FaultKind.TRUNCATE: 4,
    FaultKind.CUT_DATA: 8,
}


def shares_over(ucx_tls: str) -> dict[FaultKind, int]:
    """SHARES of the kinds that can happen where KV travels so: only sockets can be cut."""
    return {kind: share for kind, share in SHARES.items() if kind is not FaultKind.CUT_DATA or "tcp" in ucx_tls}


@dataclass(slots=True)
class Fault:
    """at_s, until_s: this process' monotonic clock; until_s None while it lasts. hit: requests at it, by phase."""

    number: int
    kind: FaultKind
    where: tuple[str, ...]
    aimed_at: Phase
    at_s: float
    hit: dict[str, int]
    until_s: float | None = None
    request: str | None = None

    @property
    def ends_requests_of(self) -> str | None:
        """The decode node whose answers it may end."""
        return self.where[0] if self.kind in (FaultKind.KILL_D, FaultKind.KILL_D_RANK) else None

    def figures(self, start_s: float) -> dict[str, object]:
        lasted_s = None if self.until_s is None else round(self.until_s - self.at_s, 3)
        named = {"kind": self.kind.value, "where": list(self.where), "aimed_at": self.aimed_at.value}
        times = {"at_s": round(self.at_s - start_s, 3), "lasted_s": lasted_s}
        return {"number": self.number, **named, **times, "hit": self.hit, "request": self.request}


@dataclass(slots=True)
class Injector:
    """in_flight: requests by name, kept by the driver. quiesce: waits until nothing is in flight, or gives up in time.

    resume undoes quiesce. shares: how often each kind comes, relative to the others.
    """

    fleet: Fleet
    in_flight: Mapping[str, Attempted]
    quiesce: Callable[[float], Awaitable[None]]
    resume: Callable[[], None]
    random: Random
    shares: Mapping[FaultKind, int]
    faults: list[Fault] = field(default_factory=list)
    _recoveries: set[asyncio.Task[None]] = field(default_factory=set)
    _busy: set[tuple[str, ...]] = field(default_factory=set)

    async def inject(self) -> None:
        """One fault, at a request in the phase that is shortest of hits if there is one in time."""
        kind = self.random.choices(list(self.shares), list(self.shares.values()))[0]
        phase = self._shortest(kind)
        if phase is Phase.IDLE:
            await self.quiesce(DRAIN_S)
        where = await self._aim(kind, phase)
        fault = self._record(kind, where, phase)
        self.faults.append(fault)
        recovery = asyncio.create_task(self._carry_out(fault))
        self._recoveries.add(recovery)
        recovery.add_done_callback(self._forget)
        await asyncio.sleep(0)
        self.resume()

    async def settled(self) -> None:
        """Until every fault is over. Raises what a recovery failed with."""
        await asyncio.gather(*self._recoveries)

    async def end(self) -> None:
        """What is under way stops, and what failed is not told: for a run that is given up."""
        for recovery in self._recoveries:
            recovery.cancel()
        await asyncio.gather(*self._recoveries, return_exceptions=True)

    def _forget(self, recovery: asyncio.Task[None]) -> None:
        """One that went well; what another failed with is for `settled` to raise."""
        if not recovery.cancelled() and recovery.exception() is None:
            self._recoveries.discard(recovery)

    # ------------------------------------------------------------ aim

    @property
    def hits(self) -> Counter[Phase]:
        """Faults by the phases of requests that they hit."""
        return Counter(Phase(phase) for fault in self.faults for phase in fault.hit)

    def _shortest(self, kind: FaultKind) -> Phase:
        hits = self.hits
        phases = [phase for phase in Phase if kind in AT_P | AT_D or phase is not Phase.IDLE]
        if kind in AT_P:
            phases.remove(Phase.DECODING)  # nothing of those is at P
        return min(phases, key=lambda phase: (hits[phase], self.random.random()))

    async def _aim(self, kind: FaultKind, phase: Phase) -> tuple[str, ...]:
        """Nodes with a request in that phase, if there are any in time; else any that the fault may be about."""
        await until(lambda: bool(self._places(kind)), poll_s=AIM_POLL_S * 10)
        if phase is not Phase.IDLE:
            await until(lambda: bool(self._places_in(kind, phase)), poll_s=AIM_POLL_S, timeout_s=AIM_S)
            await until(lambda: bool(self._places(kind)), poll_s=AIM_POLL_S * 10)
        return self.random.choice(self._places_in(kind, phase) or self._places(kind))

    def _places_in(self, kind: FaultKind, phase: Phase) -> list[tuple[str, ...]]:
        return [where for where in self._places(kind) if phase.value in self._at(where)]

    def _places(self, kind: FaultKind) -> list[tuple[str, ...]]:
        """Never two nodes of a kind at once, or nobody could answer."""
        for kinds, members in ((AT_P, self.fleet.prefills), (AT_D, self.fleet.decodes)):
            if kind in kinds:
                is_free = not any(member.is_down for member in members)
                return [(member.name,) for member in members] if is_free else []
        up = {member.name for member in self.fleet.members if not member.is_down}
        pairs = [pair for pair in self.fleet.proxies if pair not in self._busy and up.issuperset(pair)]
        if kind is FaultKind.LEAVE:
            return [(name,) for name in sorted({pair[0] for pair in self.fleet.proxies} & up)]
        return list(pairs)

    def _at(self, where: tuple[str, ...]) -> dict[str, list[str]]:
        """Requests in flight at all of these nodes, by phase."""
        prompts = self.fleet.prompt_phases()
        found: dict[str, list[str]] = {}
        for name, attempted in self.in_flight.items():
            prefill, phase = prompts.get(name, ("", attempted.phase))
            if {attempted.target, prefill}.issuperset(where):
                found.setdefault(phase.value, []).append(name)
        return found

    def _record(self, kind: FaultKind, where: tuple[str, ...], phase: Phase) -> Fault:
        at = self._at(where)
        fault = Fault(len(self.faults), kind, where, phase, time.monotonic(), {})
        if kind is FaultKind.LEAVE:
            there = at.get(phase.value) or [name for names in at.values() for name in names]
            fault.request = self.random.choice(there) if there else None
            at = {at_phase: [n for n in names if n == fault.request] for at_phase, names in at.items()}
        fault.hit = {at_phase: len(names) for at_phase, names in at.items() if names}
        if not fault.hit:
            fault.hit = {Phase.IDLE.value: 1}
        return fault

    # ------------------------------------------------------------ do

    async def _carry_out(self, fault: Fault) -> None:
        match fault.kind:
            case FaultKind.LEAVE:
                if fault.request is not None and fault.request in self.in_flight:
                    self.in_flight[fault.request].leave()
            case kind if kind in AT_P | AT_D:
                await self._at_member(fault, next(m for m in self.fleet.members if m.name == fault.where[0]))
            case _:
                await self._at_control(fault, (fault.where[0], fault.where[1]))
        fault.until_s = time.monotonic()

    async def _at_member(self, fault: Fault, member: Member) -> None:
        pids = [pid for pid in [member.rank_pid] if pid is not None]
        if fault.kind not in OF_RANK:
            pids = member.living_pids
        member.is_down = True
        if fault.kind in KILLS:
            member.send(signal.SIGKILL, pids[:1])
            await _until_gone(member, pids[:1])
        elif fault.kind is FaultKind.CUT_DATA:
            with data_channel_cut(*pids):
                await asyncio.sleep(self.random.uniform(*FROZEN_S))
        else:
            member.send(signal.SIGSTOP, pids)
            await asyncio.sleep(self.random.uniform(*FROZEN_S))
            member.send(signal.SIGCONT, pids)
        await member.recover()
        if member in self.fleet.decodes:
            self.fleet.renew_client(member)

    async def _at_control(self, fault: Fault, pair: tuple[str, str]) -> None:
        proxy, random = self.fleet.proxies[pair], self.random
        self._busy.add(pair)
        match fault.kind:
            case FaultKind.HOLD:
                proxy.hold()
                await asyncio.sleep(random.uniform(*FROZEN_S))
            case FaultKind.SLOW:
                proxy.slow(random.uniform(*SLOW_DELAY_S))
                await asyncio.sleep(random.uniform(*SLOW_S))
            case FaultKind.TRUNCATE:
                await _truncated(proxy, random.randrange(1, 200))
            case _:
                proxy.cut()
        proxy.heal()
        self._busy.discard(pair)


async def _truncated(proxy: ControlProxy, num_bytes: int) -> None:
    """Until the connection was cut in the middle of something, or nothing was said for a while."""
    proxy.truncate(num_bytes)
    await until(lambda: proxy.was_cut, poll_s=AIM_POLL_S, timeout_s=AIM_S)


async def _until_gone(member: Member, pids: list[int]) -> None:
    """Until the kernel has ended them: a killed process serves nobody, and may not be taken for well."""
    await until(lambda: not set(pids) & set(member.running_pids()), poll_s=AIM_POLL_S)
