"""The tier below the device: host blocks that hold images of retracted requests and prefixes the device may evict.

An image is private and held until its request has its blocks back. A prefix is cached as on the device, by the same
pool. Blocks named in a copy, a fetch or a store are held by it until it is done, whatever becomes of the request.
Below it, storage: prefixes go there from here, and come back here before the prompt that wants them is admitted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from pdserve.request import BlockHash, BlockId, RequestId
from pdserve.scheduler.block_pool import BlockPool
from pdserve.scheduler.plan import HostCopy
from pdserve.scheduler.storage_plan import Fetch, Store

# Background work under way at once: it pins blocks, and shares the machine with the forward.
MAX_WRITE_BACKS = 8
MAX_STORES = 8
MAX_FETCHES = 8


@dataclass(slots=True, eq=False)
class _Copy:
    """publishes: the prefix that a write-back brings to the host. request_id: who waits for the copy."""

    copy: HostCopy
    held_device: tuple[BlockId, ...]
    held_host: tuple[BlockId, ...]
    request_id: RequestId | None = None
    publishes: BlockHash | None = None


@dataclass(slots=True, eq=False)
class _Fetch:
    fetch: Fetch
    request_id: RequestId | None  # None once nobody waits for it


class HostTier:
    """num_blocks host blocks beside the device's pool; none at all without a tier, and then everything is a miss."""

    def __init__(self, device: BlockPool, num_blocks: int, *, has_storage: bool) -> None:
        self.pool = BlockPool(num_blocks)
        self.has_storage = has_storage and num_blocks > 0
        self._device = device
        self._ids = count(1)
        self._copies: dict[int, _Copy] = {}
        self._fetches: dict[int, _Fetch] = {}
        self._stores: dict[int, Store] = {}

    # ------------------------------------------------------------ images and loads

    def image(self, blocks: Sequence[BlockId], hashes: Sequence[BlockHash]) -> tuple[list[BlockId], HostCopy | None]:
        """Host blocks that will hold a copy of `blocks`, and the copy to make before the forward, if any.

        What the host holds already by its prefix is not copied again. hashes: of the first blocks, as far as known.
        Only where `fits_image` says so. The device blocks are free to be given out anew: the copy comes first.
        """
        known = self.pool.longest_prefix(hashes[: len(blocks)])
        self.pool.hold(known)
        rest = self.pool.allocate(len(blocks) - len(known))
        assert rest is not None, "an image was made that does not fit"
        if not rest:
            return known, None
        return known + rest, self._start(_Copy(self._copy(True, blocks[len(known) :], rest), (), tuple(rest)))

    def fits_image(self, blocks: Sequence[BlockId], hashes: Sequence[BlockHash]) -> bool:
        """Whether `image` of the same arguments would find room, cached prefixes evicted."""
        known = self.pool.longest_prefix(hashes[: len(blocks)])
        num_cached = sum(not self.pool.is_held(block) for block in known)
        return len(blocks) - len(known) <= self.pool.num_available - num_cached

    def load(self, host_blocks: Sequence[BlockId], device_blocks: Sequence[BlockId]) -> HostCopy:
        """The copy that brings host blocks back, before the forward. Both sides are held until it is done."""
        self.pool.hold(host_blocks)
        self._device.hold(device_blocks)
        copy = self._copy(False, device_blocks, host_blocks)
        return self._start(_Copy(copy, tuple(device_blocks), tuple(host_blocks)))

    def wait_for(self, copy: HostCopy, request_id: RequestId) -> None:
        """`finish_copy` will name the request."""
        self._copies[copy.copy_id].request_id = request_id

    def _copy(self, is_to_host: bool, device: Sequence[BlockId], host: Sequence[BlockId]) -> HostCopy:
        return HostCopy(next(self._ids), is_to_host, tuple(device), tuple(host))

    def _start(self, job: _Copy) -> HostCopy:
        if job.copy.is_to_host:
            self.pool.hold(job.held_host)
        self._copies[job.copy.copy_id] = job
        return job.copy

    def finish_copy(self, copy_id: int) -> RequestId | None:
        """The blocks are in place: let go of them; who waited for it. Raises KeyError for an unknown copy."""
        job = self._copies.pop(copy_id)
        if job.publishes is not None:
            self.pool.publish(job.publishes, job.held_host[0])
            self._device.mark_saved(job.held_device[0])
        self._device.release(job.held_device)
        self.pool.release(job.held_host)
        return job.request_id

    # ------------------------------------------------------------ prefixes: device → host → storage

    @property
    def num_pinned(self) -> int:
        """Device blocks that only copies under way hold: they come free without anybody ending."""
        return sum(self._device.num_sole_references(job.held_device) for job in self._copies.values())

    def write_backs(self) -> list[HostCopy]:
        """Copies of the device's coldest prefixes to the host, to be made beside the forward."""
        started: list[HostCopy] = []
        num_under_way = sum(job.publishes is not None for job in self._copies.values())
        while self.pool.num_blocks and num_under_way + len(started) < MAX_WRITE_BACKS:
            coldest = self._device.coldest_unsaved()
            if coldest is None:
                break
            block, block_hash = coldest
            if self.pool.holds_prefix(block_hash):
                self._device.mark_saved(block)
                continue
            host_blocks = self.pool.allocate(1)
            if host_blocks is None:
                break
            self._device.hold([block])
            copy = self._copy(True, [block], host_blocks)
            self._copies[copy.copy_id] = _Copy(copy, (block,), tuple(host_blocks), publishes=block_hash)
            started.append(copy)
        return started

    def stores(self) -> list[Store]:
        """The host's coldest prefixes on their way to storage."""
        started: list[Store] = []
        while self.has_storage and len(self._stores) < MAX_STORES:
            coldest = self.pool.coldest_unsaved()
            if coldest is None:
                break
            block, block_hash = coldest
            self.pool.hold([block])
            store = Store(next(self._ids), block_hash, block)
            self._stores[store.store_id] = store
            started.append(store)
        return started

    def finish_store(self, store_id: int) -> None:
        """A block that could not be stored is not tried again while it lives. Raises KeyError for an unknown store."""
        block = self._stores.pop(store_id).host_block
        self.pool.mark_saved(block)
        self.pool.release([block])

    # ------------------------------------------------------------ prefixes: storage → host

    @property
    def may_fetch(self) -> bool:
        return self.has_storage and len(self._fetches) < MAX_FETCHES

    def fetch(self, request_id: RequestId, hashes: Sequence[BlockHash]) -> Fetch | None:
        """Start reading these prefixes for a request; None where the host has no room for any."""
        num_blocks = min(len(hashes), self.pool.num_available)
        blocks = self.pool.allocate(num_blocks)
        if not blocks:
            return None
        fetch = Fetch(next(self._ids), tuple(hashes[:num_blocks]), tuple(blocks))
        self._fetches[fetch.fetch_id] = _Fetch(fetch, request_id)
        return fetch

    def stop_waiting(self, fetch_id: int) -> RequestId | None:
        """The read is late: who waited for it goes on. Raises KeyError for an unknown fetch."""
        job = self._fetches[fetch_id]
        request_id, job.request_id = job.request_id, None
        return request_id

    def finish_fetch(self, fetch_id: int, num_blocks: int) -> RequestId | None:
        """The first num_blocks are verified and can be found; who waited. Raises KeyError for an unknown fetch."""
        job = self._fetches.pop(fetch_id)
        pairs = list(zip(job.fetch.hashes, job.fetch.host_blocks, strict=True))[:num_blocks]
        for block_hash, block in pairs:
            self.pool.publish(block_hash, block)
            self.pool.mark_saved(block)
        self.pool.release(job.fetch.host_blocks)
        return job.request_id

    # ------------------------------------------------------------ truth

    @property
    def num_jobs(self) -> int:
        return len(self._copies) + len(self._fetches) + len(self._stores)

    def device_holders(self) -> Iterator[Iterable[BlockId]]:
        """The tables of device blocks that copies under way hold."""
        return (job.held_device for job in self._copies.values())

    def check_integrity(self, images: Iterable[Iterable[BlockId]]) -> None:
        held: list[Iterable[BlockId]] = [*images, *(job.held_host for job in self._copies.values())]
        held += [job.fetch.host_blocks for job in self._fetches.values()]
        held += [[store.host_block] for store in self._stores.values()]
        self.pool.check_integrity(held)
