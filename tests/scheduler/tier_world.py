"""The tiers of a world: slabs that really hold tokens, the copies between them, and storage below.

A cell of a slab holds the token whose KV would be there; a block that nobody holds and no cache knows holds garbage.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.request import BlockHash, BlockId
from pdserve.scheduler.plan import Event, HostCopy, HostCopyDone, Outcome, RoundPlan
from pdserve.scheduler.scheduler import Scheduler
from pdserve.scheduler.storage_plan import Fetch, StorageLate, StorageReady, Store, Stored

GARBAGE = -7  # what nobody's block holds, and what a peer's late write leaves


class TierWorld:
    """Device, host and storage of one scheduler.

    storage: blocks by their prefix; worlds may share it. Copies before a forward are made at once, in the plan's order;
    is_prompt False: that they are made is told later, by `tell_copied`. Write-backs, fetches and stores do nothing
    until `write_back`, `fetch` and `store` end them.
    """

    def __init__(self, scheduler: Scheduler, storage: dict[BlockHash, list[int]]) -> None:
        self.scheduler = scheduler
        self.config = scheduler.config
        self.slab = [[GARBAGE] * self.config.block_size for _ in range(self.config.num_blocks)]
        self.host = [[GARBAGE] * self.config.block_size for _ in range(self.config.num_host_blocks)]
        self.storage = storage
        self.is_prompt = True
        self.copied: list[int] = []
        self.write_backs: dict[int, HostCopy] = {}
        self.fetches: dict[int, Fetch] = {}
        self.late_fetches: set[int] = set()
        self.stores: dict[int, Store] = {}

    @property
    def on_wire(self) -> set[BlockId]:
        """Device blocks that a peer may write."""
        raise NotImplementedError

    def advance(self, *events: Event) -> tuple[Outcome, ...]:
        """Tell the scheduler, and take in what comes of it."""
        raise NotImplementedError

    def _copy(self, copy: HostCopy) -> None:
        assert len(copy.device_blocks) == len(copy.host_blocks) > 0
        for device_block, host_block in zip(copy.device_blocks, copy.host_blocks, strict=True):
            if copy.is_to_host:
                self._write_host(host_block, self.slab[device_block])
            else:
                assert self.scheduler._pool._references[device_block] == 2, "a load writes what others hold"
                assert device_block not in self.on_wire, "a load writes what a peer may write"
                self.slab[device_block] = list(self.host[host_block])

    def _write_host(self, block: BlockId, tokens: Sequence[int]) -> None:
        assert block not in self.scheduler._host.pool._prefixes, f"host block {block} is written after it was published"
        self.host[block] = list(tokens)

    def _begin_jobs(self, plan: RoundPlan) -> None:
        self.write_backs.update((copy.copy_id, copy) for copy in plan.write_backs)
        self.fetches.update((fetch.fetch_id, fetch) for fetch in plan.fetches)
        self.stores.update((store.store_id, store) for store in plan.stores)
        for fetch in plan.fetches:
            assert len(fetch.hashes) == len(fetch.host_blocks) > 0
            for block in fetch.host_blocks:
                self._write_host(block, [GARBAGE] * self.config.block_size)

    def _forget_what_nobody_holds(self) -> None:
        for pool, slab in ((self.scheduler._pool, self.slab), (self.scheduler._host.pool, self.host)):
            for block in pool._free:
                if slab[block][0] != GARBAGE:
                    slab[block] = [GARBAGE] * self.config.block_size

    def tell_copied(self) -> None:
        """The oldest copy before a forward is acknowledged."""
        self.advance(HostCopyDone(self.copied.pop(0)))

    def write_back(self, copy_id: int) -> None:
        """A copy beside the forward is made, as late as it may be, and told."""
        self._copy(self.write_backs.pop(copy_id))
        self.advance(HostCopyDone(copy_id))

    def fetch(self, fetch_id: int, num_intact: int | None = None) -> int:
        """A read ends with all that storage holds in a row; num_intact: the block after as many is corrupt, a miss."""
        fetch = self.fetches.pop(fetch_id)
        self.late_fetches.discard(fetch_id)
        num_blocks = 0
        for block_hash, block in zip(fetch.hashes[:num_intact], fetch.host_blocks, strict=False):
            if block_hash not in self.storage:
                break
            self._write_host(block, self.storage[block_hash])
            num_blocks += 1
        self.advance(StorageReady(fetch_id, num_blocks))
        return num_blocks

    def fetch_late(self, fetch_id: int) -> None:
        """A read misses its deadline."""
        self.late_fetches.add(fetch_id)
        self.advance(StorageLate(fetch_id))

    def store(self, store_id: int, *, is_stored: bool = True) -> None:
        """A write ends, as late as it may, with what the block holds then."""
        store = self.stores.pop(store_id)
        if is_stored:
            self.storage[store.block_hash] = list(self.host[store.host_block])
        self.advance(Stored(store_id, is_stored))

    def settle_tiers(self) -> None:
        """Whatever is under way between the tiers ends."""
        while self.copied:
            self.tell_copied()
        for copy_id in list(self.write_backs):
            self.write_back(copy_id)
        for fetch_id in list(self.fetches):
            self.fetch(fetch_id)
        for store_id in list(self.stores):
            self.store(store_id)
