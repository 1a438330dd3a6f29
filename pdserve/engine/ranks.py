"""All ranks of a node, as its front sees them: which one gets a request, and that all of them wake and end together."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any

from pdserve.engine.dispatch import Dispatch, shortest_queue
from pdserve.engine.front import Rank
from pdserve.engine.launch import RankSpec
from pdserve.engine.member import Member, OnLoading
from pdserve.engine.messages import JOINING, WARMING_UP, Ready
from pdserve.errors import InvalidRequest, NotReady, RequestIdInUse, StartupError
from pdserve.request import RankLoad, RequestId, TokenRequest
from pdserve.rounds import RankRounds

# How often processes that wait for each other are asked whether they still go round.
LIFE_S = 1.0
# One that has said nothing for this long, or for so many of the longest forwards, holds up the others for good.
STALL_S = 30.0
STALL_CHUNKS = 5


class Ranks:
    """The data-parallel ranks, in order. Owned by the front's event loop.

    are_in_step: they go through their rounds together, so nobody but this wakes them, all at once.
    """

    def __init__(self, ranks: Sequence[Rank], *, are_in_step: bool = False) -> None:
        self._ranks = tuple(ranks)
        self._are_in_step = are_in_step
        self.dispatch: Dispatch = shortest_queue
        self._num_wakes = 0
        self._is_wake_due = False
        self._watcher: asyncio.Task[None] | None = None
        self.lost = asyncio.Event()
        self.lost_reason = ""
        for rank in self._ranks:
            rank.on_lost = self.lose
            rank.on_work = self._wake_soon

    def __iter__(self) -> Iterator[Rank]:
        return iter(self._ranks)

    def __len__(self) -> int:
        return len(self._ranks)

    def __getitem__(self, number: int) -> Rank:
        return self._ranks[number]

    @property
    def members(self) -> list[Member]:
        """Every process, in the order of the grid."""
        return [member for rank in self._ranks for member in rank.members]

    # ------------------------------------------------------------ life

    async def start(self, specs: Sequence[RankSpec], *, timeout_s: float, on_loading: OnLoading) -> list[Ready]:
        """Start every process, specs in the order of `members`, and wait for all, in that order. Raises StartupError
        for the first that cannot start."""
        starts = [member.start(spec, on_loading=on_loading) for member, spec in zip(self.members, specs, strict=True)]
        try:
            async with asyncio.timeout(timeout_s):
                ready = await _all_or_first_error(starts)
        except TimeoutError:
            raise StartupError(
                f"{self._who_is_late()} after {timeout_s:.0f} s: look at the log above, or raise --startup-timeout-s"
            ) from None
        if len(self.members) > 1:
            stall_s = max(STALL_S, STALL_CHUNKS * max(one.longest_chunk_s for one in ready))
            self._watcher = asyncio.create_task(self._watch_life(stall_s))
        return ready

    def _who_is_late(self) -> str:
        """Those that others wait for, where some only wait."""
        late = [member for member in self.members if not member.is_ready]
        late = [member for member in late if member.stage not in (JOINING, WARMING_UP)] or late
        return ", ".join(f"{member.name} was not ready ({member.stage})" for member in late)

    async def stop(self) -> None:
        """End every process; live requests fail."""
        if self._watcher is not None:
            self._watcher.cancel()
        await asyncio.gather(*(rank.stop() for rank in self._ranks))

    def lose(self, reason: str) -> None:
        """With one rank all are lost: the others would wait for it, or answer for a node that is half there."""
        if self.lost.is_set():
            return
        self.lost_reason = reason
        self.lost.set()
        for rank in self._ranks:
            rank.lose(reason)

    async def _watch_life(self, stall_s: float) -> None:
        """A process that stands still keeps the others waiting within a round, where none of them can say so."""
        while not self.lost.is_set():
            await asyncio.sleep(LIFE_S)
            for member in self.members:
                member.ask_for_life()
                member.look_for_work()
            for waiting in self._who_wait_for_each_other():
                silent = [member for member in waiting if not member.has_shown_life(stall_s)]
                # Those who wait for one that is in a long forward say nothing and compute nothing.
                if silent and not any(member.is_alive(stall_s) for member in waiting):
                    culprits = [member for member in waiting if member.is_stopped] or silent
                    names = ", ".join(member.name for member in culprits)
                    self.lose(f"{names}: no round was finished for {stall_s:.0f} s")

    def _who_wait_for_each_other(self) -> list[Sequence[Member]]:
        """Within a round: all of them where they go in step, else the processes of each rank."""
        return [self.members] if self._are_in_step else [rank.members for rank in self._ranks]

    # ------------------------------------------------------------ requests

    @property
    def num_live(self) -> int:
        return sum(rank.num_live for rank in self._ranks)

    def choose(self, request: TokenRequest) -> Rank:
        """The rank that gets the request. Raises InvalidRequest for one that is not there, RequestIdInUse."""
        if any(rank.knows(request.request_id) for rank in self._ranks):
            raise RequestIdInUse(f"request_id {request.request_id!r} is in use")
        if request.data_parallel_rank is not None:
            return self._pinned(request.data_parallel_rank)
        candidates = [rank for rank in self._ranks if not rank.is_full]
        if not candidates:
            return self._ranks[0]  # which says so
        return self._ranks[self.dispatch(request, candidates)] if len(self._ranks) > 1 else candidates[0]

    def _pinned(self, number: int) -> Rank:
        if not 0 <= number < len(self._ranks):
            raise InvalidRequest(
                f"data_parallel_rank is {number}, this node has ranks 0 to {len(self._ranks) - 1}: choose one of them, "
                "or leave it out"
            )
        return self._ranks[number]

    def abort(self, request_id: RequestId) -> bool:
        """End a live request for everybody; False if there is none."""
        return any(rank.abort(request_id) for rank in self._ranks)

    async def loads(self, *, check_integrity: bool = False) -> list[RankLoad]:
        """Of each rank. Raises NotReady without an answer, InternalError on broken integrity."""
        if self.lost.is_set():
            raise NotReady(self.lost_reason)
        return list(await asyncio.gather(*(rank.load(check_integrity=check_integrity) for rank in self._ranks)))

    async def rounds(self, number: int, *, after: int | None, most: int) -> RankRounds:
        """Of one rank; see Rank.rounds."""
        return await self._ranks[number].rounds(after=after, most=most)

    # ------------------------------------------------------------ sleep

    def _wake_soon(self) -> None:
        """Once for all that is submitted before the event loop comes round."""
        if self._are_in_step and not self._is_wake_due:
            self._is_wake_due = True
            asyncio.get_running_loop().call_soon(self._wake)

    def _wake(self) -> None:
        self._is_wake_due = False
        self._num_wakes += 1
        for rank in self._ranks:
            rank.wake(self._num_wakes)


async def _all_or_first_error(starts: Sequence[Coroutine[Any, Any, Ready]]) -> list[Ready]:
    """What all of them return; the first that fails cancels the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(start) for start in starts]
    except* StartupError as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
