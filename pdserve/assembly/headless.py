"""A node without a front: it lends its machine to a group, life after life, and starts the ranks it is told to."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from time import monotonic

import msgspec

from pdserve import __version__
from pdserve.assembly.interface import interface_of
from pdserve.assembly.messages import FromHeadless, Hello, Looks, Orders, RankEnded, Refused, ToHeadless
from pdserve.assembly.wire import BEAT_S, SILENCE_S, Wire, WireLost, dial
from pdserve.config import ServerArgs, cache_dir
from pdserve.engine.channel import private_directory
from pdserve.engine.launch import RankProcess, RankSpec
from pdserve.errors import StartupError
from pdserve.model.digests import DigestCache
from pdserve.model.revision import Revision

log = logging.getLogger(__name__)

FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.25, 2.0
TELL_S = 10.0

ToFirst = Wire[ToHeadless, FromHeadless]


class Headless:
    """`run` it until it is cancelled. model: what every life of its ranks loads."""

    def __init__(self, args: ServerArgs, model: Revision, digests: DigestCache) -> None:
        self._args = args
        self._model = model
        self._digests = digests
        self._useful_s = monotonic()  # when it last had a part in the group

    async def run(self) -> None:
        """Raises StartupError when the first node was not found for too long, or will not have this one."""
        while True:
            wire = await self._dial()
            try:
                await self._live(wire)
            except WireLost as lost:
                address = self._args.dist_init_addr
                log.warning("the connection to the first node at %s has ended (%s): dialling again", address, lost)
            finally:
                await wire.close()

    # ------------------------------------------------------------ joining

    async def _dial(self) -> ToFirst:
        """A connection to the first node, however long that takes to come up."""
        told_s, backoff_s = monotonic(), FIRST_BACKOFF_S
        while True:
            try:
                return await dial(*self._args.meeting_point, ToHeadless, within_s=SILENCE_S)
            except WireLost as lost:
                reason = str(lost)
            self._check_patience(reason)
            if monotonic() - told_s > TELL_S:
                told_s = monotonic()
                log.info("waiting for the first node at %s: %s", self._args.dist_init_addr, reason)
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    def _check_patience(self, reason: str) -> None:
        """Raises StartupError after too long without a part in the group."""
        if monotonic() - self._useful_s > self._args.startup_timeout_s:
            raise StartupError(
                f"the first node at --dist-init-addr {self._args.dist_init_addr} gave no orders for "
                f"{self._args.startup_timeout_s:.0f} s ({reason}): start it, or raise --startup-timeout-s"
            )

    # ------------------------------------------------------------ one life

    async def _live(self, wire: ToFirst) -> None:
        """Raises WireLost when it is over, StartupError where there can be none."""
        model = await asyncio.to_thread(self._model.renewed, self._digests)
        ranks: dict[int, RankProcess] = {}
        wire.send(Hello(__version__, self._args.node_rank, self._args.nnodes, model.text))
        beat = asyncio.create_task(_beat(wire, ranks))
        try:
            orders = await self._orders(wire)
            with private_directory() as sockets:
                specs = [self._own(spec, model, sockets, wire.local_host) for spec in orders.specs]
                async with _processes(specs, ranks):
                    await self._follow(wire, ranks)
        finally:
            beat.cancel()

    async def _orders(self, wire: ToFirst) -> Orders:
        while True:
            match await wire.receive():
                case Orders() as orders:
                    return orders
                case Refused(reason, is_final):
                    if is_final:
                        raise StartupError(reason)
                    self._check_patience(reason)
                    await asyncio.sleep(MAX_BACKOFF_S)
                    raise WireLost(reason)

    def _own(self, spec: RankSpec, model: Revision, sockets: Path, host: str) -> RankSpec:
        """What the first node ordered, with what is this machine's."""
        meeting = msgspec.structs.replace(spec.grid.meeting, directory=str(sockets), interface=interface_of(host))
        return msgspec.structs.replace(
            spec,
            model_directory=str(model.directory),
            model_revision=model.text,
            cache_directory=str(cache_dir()),
            num_threads=self._args.threads_of_one_in(spec.grid.num_local_ranks),
            step_endpoints=tuple(f"ipc://{sockets}/{Path(endpoint).name}" for endpoint in spec.step_endpoints),
            grid=msgspec.structs.replace(spec.grid, meeting=meeting),
        )

    async def _follow(self, wire: ToFirst, ranks: dict[int, RankProcess]) -> None:
        """Until the connection ends."""
        watchers = [asyncio.create_task(_watch(wire, rank, process)) for rank, process in ranks.items()]
        log.info("started rank%s %s", "s" if len(ranks) > 1 else "", ", ".join(map(str, ranks)))
        try:
            while True:
                await wire.receive()
        finally:
            self._useful_s = monotonic()
            for watcher in watchers:
                watcher.cancel()


async def _beat(wire: ToFirst, ranks: dict[int, RankProcess]) -> None:
    """ranks: those that run by then."""
    while True:
        looks = {rank: process.look() for rank, process in ranks.items()}
        wire.send(Looks({rank: look for rank, look in looks.items() if look is not None}))
        await asyncio.sleep(BEAT_S)


async def _watch(wire: ToFirst, rank: int, process: RankProcess) -> None:
    wire.send(RankEnded(rank, await process.status()))


@asynccontextmanager
async def _processes(specs: Sequence[RankSpec], ranks: dict[int, RankProcess]) -> AsyncIterator[None]:
    """They end with the block, at once: whoever is left in a round waits for somebody who is gone."""
    try:
        for spec in specs:
            ranks[spec.grid.rank] = await RankProcess.start(spec)
        yield
    finally:
        for process in ranks.values():
            await process.end(0.0)
        ranks.clear()
