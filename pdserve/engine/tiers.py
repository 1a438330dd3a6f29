"""The host tier at work: copies before a round's forward, write-backs beside it, storage below.

Write-backs run in a thread of their own, which holds no lock and reads only blocks that the scheduler has pinned.
"""

from __future__ import annotations

import os
import queue
import threading
from collections import Counter
from collections.abc import Iterable
from typing import Protocol

from pdserve.kv.storage import KVStorage
from pdserve.scheduler.plan import Event, HostCopy, HostCopyDone
from pdserve.scheduler.storage_plan import Fetch, Store


class StorageLink(Protocol):
    """The loop's side of the storage thread."""

    def submit(self, command: Fetch | Store) -> None:
        """Hand a command to the thread; never blocks."""

    def events(self) -> list[Event]:
        """What became of commands since the last call."""

    def fileno(self) -> int:
        """Readable while events wait."""

    def counters(self) -> dict[str, int]:
        """Hits, misses and bytes, by name."""

    def close(self) -> None:
        """End the thread."""


class HostTierLink:
    """device, host: slabs of one layout. Belongs to the loop; `close` ends its threads."""

    def __init__(self, device: KVStorage, host: KVStorage, storage: StorageLink | None = None) -> None:
        assert device.layout == host.layout, "tiers of different layouts"
        self._device = device
        self._host = host
        self._storage = storage
        self._write_backs: queue.SimpleQueue[HostCopy | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._done_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._counters: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._copy_behind, name="write-back", daemon=True)
        self._thread.start()

    def copy(self, copies: Iterable[HostCopy]) -> list[Event]:
        """Make the copies now, in order: the forward that follows relies on them."""
        events: list[Event] = []
        for copy in copies:
            self._copy(copy)
            self._counters["image_blocks" if copy.is_to_host else "loaded_blocks"] += len(copy.host_blocks)
            events.append(HostCopyDone(copy.copy_id))
        return events

    def begin(self, write_backs: Iterable[HostCopy], fetches: Iterable[Fetch], stores: Iterable[Store]) -> None:
        """Start what runs beside the forward."""
        for copy in write_backs:
            self._write_backs.put(copy)
        commands: list[Fetch | Store] = [*fetches, *stores]
        for command in commands:
            assert self._storage is not None, "a fetch or a store without storage"
            self._storage.submit(command)

    def events(self) -> list[Event]:
        """What has ended since the last call."""
        events: list[Event] = []
        try:
            os.eventfd_read(self._done_fd)
        except BlockingIOError:
            pass
        else:
            events += [self._done.get() for _ in range(self._done.qsize())]
        return events + (self._storage.events() if self._storage is not None else [])

    def filenos(self) -> list[int]:
        """Readable while events wait."""
        return [self._done_fd, *([self._storage.fileno()] if self._storage is not None else [])]

    def counters(self) -> dict[str, int]:
        storage = self._storage.counters() if self._storage is not None else {}
        return {
            **{f"host:{name}": count for name, count in list(self._counters.items())},
            **{f"storage:{name}": count for name, count in storage.items()},
        }

    def close(self) -> None:
        self._write_backs.put(None)
        self._thread.join()
        if self._storage is not None:
            self._storage.close()
        os.close(self._done_fd)

    def _copy_behind(self) -> None:
        while (copy := self._write_backs.get()) is not None:
            self._copy(copy)
            self._counters["write_back_blocks"] += len(copy.host_blocks)
            self._done.put(HostCopyDone(copy.copy_id))
            os.eventfd_write(self._done_fd, 1)

    def _copy(self, copy: HostCopy) -> None:
        for device_block, host_block in zip(copy.device_blocks, copy.host_blocks, strict=True):
            if copy.is_to_host:
                self._host.copy_block(host_block, self._device, device_block)
            else:
                self._device.copy_block(device_block, self._host, host_block)
