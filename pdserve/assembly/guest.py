"""A headless node as the first node sees it, for one life of the group."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from pdserve.assembly.messages import Alive, FromHeadless, Looks, Orders, RankEnded, ToHeadless
from pdserve.assembly.wire import BEAT_S, Wire, WireLost
from pdserve.engine.launch import RankSpec
from pdserve.engine.process_look import ProcessLook


class Guest:
    """`run` it for as long as it is wanted. Belongs to the front's event loop."""

    def __init__(self, node_rank: int, wire: Wire[FromHeadless, ToHeadless]) -> None:
        self.node_rank = node_rank
        self.is_lost = False
        self._wire = wire
        self._processes: dict[int, GuestProcess] = {}

    @property
    def host(self) -> str:
        return self._wire.remote_host

    async def run(self) -> str:
        """Returns why it is gone, once it is; all of its ranks have ended then."""
        beat = asyncio.create_task(self._beat())
        try:
            while True:
                self._on_message(await self._wire.receive())
        except WireLost as lost:
            return str(lost)
        finally:
            self.is_lost = True
            beat.cancel()
            self._end_all()
            await self._wire.close()

    def _end_all(self) -> None:
        for process in self._processes.values():
            process.on_end(f"is on node {self.node_rank} at {self.host}, which is gone")

    async def _beat(self) -> None:
        while True:
            self._wire.send(Alive())
            await asyncio.sleep(BEAT_S)

    def _on_message(self, message: FromHeadless) -> None:
        match message:
            case Looks(looks):
                for rank, look in looks.items():
                    if rank in self._processes:
                        self._processes[rank].look_now = look
            case RankEnded(rank, status):
                if rank in self._processes:
                    self._processes[rank].on_end(f"ended with status {status}")
            case _:
                raise WireLost(f"it said {type(message).__name__} out of order")

    def order(self, specs: Sequence[RankSpec]) -> None:
        """It starts these ranks."""
        self._processes = {spec.grid.rank: GuestProcess(self) for spec in specs}
        if self.is_lost:
            self._end_all()
        self._wire.send(Orders(tuple(specs)))

    async def process_of(self, spec: RankSpec) -> GuestProcess:
        """Of a rank that it was ordered to start."""
        return self._processes[spec.grid.rank]

    def dismiss(self) -> None:
        """Its ranks end at once."""
        self.is_lost = True
        self._wire.hang_up()


class GuestProcess:
    """One rank's process on a headless node; see engine.launch.Process."""

    def __init__(self, guest: Guest) -> None:
        self._guest = guest
        self._ending: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.look_now: ProcessLook | None = None

    def on_end(self, how: str) -> None:
        if not self._ending.done():
            self._ending.set_result(how)

    async def wait(self) -> str:
        return await asyncio.shield(self._ending)

    async def end(self, timeout_s: float) -> None:
        """Wait for it to leave, then end all that are on its node."""
        await asyncio.wait([self._ending], timeout=timeout_s)
        if not self._ending.done():
            self._guest.dismiss()
            await self.wait()

    def look(self) -> ProcessLook | None:
        return self.look_now
