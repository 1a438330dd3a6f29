"""The tiers below the device: what copies cost, and files that several nodes share.

As engine/tiers.py and engine/storage_thread.py have it: a round waits for its copies; write-backs, reads and writes of
files run beside it, each kind one after the other in every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from pdserve.engine.storage_thread import BLOCK_DEADLINE_S, DEADLINE_S
from pdserve.request import BlockHash
from pdserve.scheduler.plan import Event, HostCopy, HostCopyDone, RoundPlan
from pdserve.scheduler.storage_plan import Fetch, StorageLate, StorageReady, Store, Stored
from pdserve.sim.clock import Clock
from pdserve.sim.costs import TierCosts


class Line:
    """Work that is done one piece after the other."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._free_at_s = 0.0

    def take(self, seconds: float) -> float:
        """When a piece that is asked for now is done."""
        self._free_at_s = max(self._free_at_s, self._clock.now_s) + seconds
        return self._free_at_s


class RankTiers:
    """One rank's. files: hashes of the blocks that any node stored. tell: puts an event into the rank's inbox."""

    def __init__(
        self,
        clock: Clock,
        costs: TierCosts,
        block_bytes: int,
        files: set[BlockHash],
        tell: Callable[[Event], None],
    ) -> None:
        self._clock = clock
        self._costs = costs
        self._block_bytes = block_bytes
        self._files = files
        self._tell = tell
        self._write_backs = Line(clock)
        self._storage = Line(clock)
        self.num_bytes = 0

    def copies_s(self, copies: Iterable[HostCopy]) -> float:
        """Seconds of these copies, which are made now."""
        num_bytes = sum(len(copy.host_blocks) for copy in copies) * self._block_bytes
        self.num_bytes += num_bytes
        return num_bytes / self._costs.host_bytes_per_s

    def begin(self, plan: RoundPlan) -> None:
        """Start what runs beside the round."""
        for copy in plan.write_backs:
            done_s = self._write_backs.take(self.copies_s([copy]))
            self._clock.at(done_s, partial(self._tell, HostCopyDone(copy.copy_id)))
        for fetch in plan.fetches:
            self._fetch(fetch)
        for store in plan.stores:
            self._clock.at(self._storage.take(self._blocks_s(1)), partial(self._on_stored, store))

    def _fetch(self, fetch: Fetch) -> None:
        """A miss is known after a glance; a hit that takes too long is waited for no longer."""
        num_blocks = self._longest_run(fetch.hashes)
        done_s = self._clock.now_s + self._costs.storage_latency_s
        if num_blocks:
            done_s = self._storage.take(self._costs.storage_latency_s + self._blocks_s(num_blocks))
        late_s = self._clock.now_s + DEADLINE_S + len(fetch.hashes) * BLOCK_DEADLINE_S
        if late_s < done_s:
            self._clock.at(late_s, partial(self._tell, StorageLate(fetch.fetch_id)))
        self._clock.at(done_s, partial(self._tell, StorageReady(fetch.fetch_id, num_blocks)))

    def _longest_run(self, hashes: Iterable[BlockHash]) -> int:
        num_blocks = 0
        for block_hash in hashes:
            if block_hash not in self._files:
                break
            num_blocks += 1
        return num_blocks

    def _on_stored(self, store: Store) -> None:
        self._files.add(store.block_hash)
        self._tell(Stored(store.store_id, True))

    def _blocks_s(self, num_blocks: int) -> float:
        num_bytes = num_blocks * self._block_bytes
        self.num_bytes += num_bytes
        return num_bytes / self._costs.storage_bytes_per_s
