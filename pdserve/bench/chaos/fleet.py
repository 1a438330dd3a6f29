"""The nodes of a chaos run: killed, stopped and started anew at their addresses, and what lies between them."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdserve.bench.asking import EXACT
from pdserve.bench.control_proxy import ControlProxy
from pdserve.bench.handoff_witness import Phase, Witness
from pdserve.bench.processes import children, is_running, num_open_files, resident_bytes
from pdserve.client import AsyncClient
from pdserve.config import Role, ServerArgs
from pdserve.config.ports import free_port
from pdserve.node_process import NodeProcess

START_S = 300.0
LOOK_S = 0.2
LEASE_S, PATIENCE_S = 2.0, 8.0


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a process has."""

    resident_mib: float
    num_files: int


# What each process of a node has more than it began with, by "front" and "rank".
Growth = Mapping[str, Footprint]


@dataclass(slots=True, eq=False)
class Member:
    """One node by its address, through all its lives. is_down: from the moment a fault hits it until it serves again.

    pids: of every process it ever had. baseline: of those that live, when they were last seen to begin.
    """

    name: str
    args: ServerArgs
    log: Path
    environment: Mapping[str, str]
    process: NodeProcess | None = None
    is_down: bool = True
    num_lives: int = 0
    pids: set[int] = field(default_factory=set)
    baseline: dict[int, Footprint] = field(default_factory=dict)

    @property
    def front_pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def rank_pid(self) -> int | None:
        """None while there is none."""
        pids = children(self.front_pid)
        return pids[0] if pids else None

    @property
    def living_pids(self) -> list[int]:
        return [pid for pid in (self.front_pid, self.rank_pid) if pid is not None]

    def running_pids(self) -> list[int]:
        """Of all it ever had, those that have not ended."""
        return [pid for pid in self.pids if is_running(pid)]

    def begin(self) -> None:
        with self.log.open("ab") as file:
            self.process = NodeProcess(self.args, file, self.environment)
        self.num_lives += 1
        self.pids.add(self.process.pid)

    def send(self, number: signal.Signals, pids: Sequence[int]) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    async def recover(self) -> None:
        """Until it serves and has its peers, started anew if it has ended. Raises TimeoutError."""
        async with asyncio.timeout(START_S):
            while not await self._is_well():
                if self.process is None or self.process.has_ended:
                    self.begin()
                await asyncio.sleep(LOOK_S)
        self.pids |= set(self.living_pids)
        for pid in self.living_pids:
            if pid not in self.baseline:
                self.baseline[pid] = footprint(pid)
        self.is_down = False

    async def _is_well(self) -> bool:
        process = self.process
        if process is None or process.has_ended or self.rank_pid is None:
            return False
        return await asyncio.to_thread(process.is_serving) and await asyncio.to_thread(process.has_its_peers)

    def growth(self) -> Growth:
        """Of its front and its rank, as far as they live, since each began."""
        kinds = {self.front_pid: "front", self.rank_pid: "rank"}
        living = [pid for pid in self.living_pids if pid in self.baseline]
        return {kinds[pid]: grown(self.baseline[pid], footprint(pid)) for pid in living}


def footprint(pid: int) -> Footprint:
    return Footprint(resident_bytes(pid) / 2**20, num_open_files(pid))


def grown(before: Footprint, after: Footprint) -> Footprint:
    return Footprint(round(after.resident_mib - before.resident_mib, 1), after.num_files - before.num_files)


@dataclass(slots=True)
class Fleet:
    """`start` and `end` it; belongs to one event loop. proxies: by (decode node, prefill node)."""

    prefills: list[Member]
    decodes: list[Member]
    witnesses: dict[str, Witness] = field(default_factory=dict)
    proxies: dict[tuple[str, str], ControlProxy] = field(default_factory=dict)
    clients: dict[str, AsyncClient] = field(default_factory=dict)
    old_clients: list[AsyncClient] = field(default_factory=list)

    @property
    def members(self) -> list[Member]:
        return [*self.prefills, *self.decodes]

    async def start(self, on_begun: Callable[[Member], None] = lambda member: None) -> None:
        """Until every node serves. on_begun: called in the first moment of each process."""
        for prefill in self.prefills:
            witness = self.witnesses[prefill.name] = Witness(prefill.args.address)
            await witness.start()
        for decode in self.decodes:
            await self._connect(decode)
        for member in self.members:
            member.begin()
            on_begun(member)
        await asyncio.gather(*(member.recover() for member in self.members))

    async def _connect(self, decode: Member) -> None:
        for prefill in self.prefills:
            proxy = ControlProxy(self.witnesses[prefill.name].address)
            await proxy.start()
            self.proxies[decode.name, prefill.name] = proxy
        addresses = [self.proxies[decode.name, prefill.name].address for prefill in self.prefills]
        decode.args = decode.args.model_copy(update={"prefill_peers": tuple(addresses)})
        self.renew_client(decode)

    def renew_client(self, decode: Member) -> None:
        """One that knows nothing of the node's former lives; calls under way stay with the old one."""
        if decode.name in self.clients:
            self.old_clients.append(self.clients[decode.name])
        self.clients[decode.name] = AsyncClient(decode.args.address, max_attempts=1)

    async def end(self) -> None:
        processes = [member.process for member in self.members if member.process is not None]
        for member in self.members:
            if member.process is not None:
                member.send(signal.SIGCONT, member.living_pids)
        for process in processes * 2:
            process.ask_to_stop()
        for process in processes:
            await asyncio.to_thread(process.end)
        for client in (*self.clients.values(), *self.old_clients):
            await client.close()
        for proxy in self.proxies.values():
            await proxy.close()
        for witness in self.witnesses.values():
            await witness.close()

    def prompt_phases(self) -> dict[str, tuple[str, Phase]]:
        """Of every handoff under way, by its request's name: the prefill node it is at, and how far it is."""
        return {
            name.partition("~")[0].partition("#")[0]: (prefill, phase)
            for prefill, witness in self.witnesses.items()
            for name, phase in witness.phases.items()
        }


def make_member(
    role: Role, number: int, model: Path, folder: Path, environment: Mapping[str, str], **own: Any
) -> Member:
    """One node with a port of its own, not started."""
    name = f"{role.value[0].upper()}{number}"
    args = ServerArgs(model=str(model), role=role, port=free_port(), num_threads=1, **{**EXACT, **own})
    return Member(name, args, folder / f"{name}.log", environment)


def make_fleet(model: Path, folder: Path, environment: Mapping[str, str], settings: Mapping[str, Any]) -> Fleet:
    """Two of each, not started. Their patience is short, so that a run is full of its ends."""

    def two(role: Role, **own: Any) -> list[Member]:
        return [make_member(role, number, model, folder, environment, **settings, **own) for number in range(2)]

    return Fleet(
        two(Role.PREFILL, kv_checksum=True, kv_lease_s=LEASE_S),
        two(Role.DECODE, kv_checksum=True, transfer_timeout_s=PATIENCE_S, quarantine_s=PATIENCE_S),
    )
