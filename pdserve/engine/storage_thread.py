"""Block storage beside the loop: fetches and stores in a thread of their own, deadlines in another that never waits.

    loop ── Fetch, Store ──▶ storage thread (owns the files) ── StorageReady, Stored ──▶ loop
         └─ Fetch ─────────▶ deadline thread ─────────────────── StorageLate ──────────▶

The storage thread takes one small step at a time, in this order: look whether a new fetch's first block is there at
all (a prompt that nobody stored must not wait behind others' reads), read the next block of the oldest fetch, write one
block, tidy up. A disk may hold it up for any time: that is why another thread judges deadlines.
"""

from __future__ import annotations

import heapq
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from pdserve.request import BlockHash, BlockId
from pdserve.scheduler.plan import Event
from pdserve.scheduler.storage_plan import Fetch, StorageLate, StorageReady, Store, Stored

log = logging.getLogger(__name__)

StorageCommand = Fetch | Store

# A prompt waits this long for its blocks, and longer the more there are: an old disk's pace. Then it is computed.
DEADLINE_S = 1.0
BLOCK_DEADLINE_S = 0.02
# How often a thread with nothing to do asks the files whether they have.
TEND_EVERY_S = 1.0


class BlockStorage(Protocol):
    """Where blocks of host memory are kept by their hash (transfer/file_tier.py). Every call may wait for a disk."""

    def has(self, block_hash: BlockHash) -> bool:
        """The block is there, as far as a glance tells."""

    def load(self, block_hash: BlockHash, block: BlockId) -> bool:
        """Read it into a host block and verify it; False: it is not there, and the host block may hold anything."""

    def store(self, block_hash: BlockHash, block: BlockId) -> bool:
        """Write a host block; False: it is not stored."""

    def tend(self) -> bool:
        """A small step of tidying up; True while there is more to do."""

    def counters(self) -> dict[str, int]:
        """By name; any thread may ask."""

    def close(self) -> None:
        """Nothing touches host memory afterwards."""


@dataclass(slots=True)
class _OpenFetch:
    fetch: Fetch
    num_blocks: int = 0  # read so far


class StorageThread:
    """Started by `start`, ended by `close`. `submit`, `events`, `fileno` and `counters` belong to the loop.

    open_storage is called in the storage thread, which is the only one to touch what it returns. deadline_s and
    block_deadline_s: a fetch of n blocks is late deadline_s + n * block_deadline_s after it was submitted.
    """

    def __init__(
        self,
        open_storage: Callable[[], BlockStorage],
        *,
        deadline_s: float = DEADLINE_S,
        block_deadline_s: float = BLOCK_DEADLINE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._open_storage = open_storage
        self._deadline_s = deadline_s
        self._block_deadline_s = block_deadline_s
        self._clock = clock
        self._commands: queue.SimpleQueue[StorageCommand | None] = queue.SimpleQueue()
        self._deadlines: queue.SimpleQueue[tuple[float, int] | None] = queue.SimpleQueue()
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._arrivals: deque[Fetch] = deque()
        self._reads: deque[_OpenFetch] = deque()
        self._stores: deque[Store] = deque()
        # Fetches that are neither answered nor late. The lock keeps StorageLate from following StorageReady.
        self._awaited: set[int] = set()
        self._answering = threading.Lock()
        self._num_late = 0
        self._start_errors: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._is_closing = False
        self._storage: BlockStorage
        self._thread = threading.Thread(target=self._run, name="storage", daemon=True)
        self._deadline_thread = threading.Thread(target=self._watch, name="storage-deadlines", daemon=True)

    # ------------------------------------------------------------ the loop's side

    def start(self) -> None:
        """Returns once the storage stands. Raises what opening it raised."""
        self._thread.start()
        error = self._start_errors.get()
        if error is not None:
            os.close(self._event_fd)
            raise error
        self._deadline_thread.start()

    def submit(self, command: StorageCommand) -> None:
        """Never blocks on a disk. Ids are not used again while they are open."""
        if isinstance(command, Fetch):
            deadline_s = self._clock() + self._deadline_s + self._block_deadline_s * len(command.hashes)
            with self._answering:
                self._awaited.add(command.fetch_id)
            self._deadlines.put((deadline_s, command.fetch_id))
        self._commands.put(command)

    def events(self) -> list[Event]:
        """What the scheduler must know, in order. Each fetch ends with one StorageReady, each store with one Stored."""
        try:
            os.eventfd_read(self._event_fd)
        except BlockingIOError:
            return []
        return [self._events.get() for _ in range(self._events.qsize())]

    def fileno(self) -> int:
        """Readable while events wait."""
        return self._event_fd

    def counters(self) -> dict[str, int]:
        """What came of fetches and stores so far: the storage's own, and `late`."""
        return {**self._storage.counters(), "late": self._num_late}

    def close(self, timeout_s: float = 10.0) -> None:
        """End the threads after the block under way. What had not begun is given up and not answered."""
        self._is_closing = True
        self._commands.put(None)
        self._deadlines.put(None)
        self._thread.join(timeout_s)
        self._deadline_thread.join(timeout_s)
        if not self._thread.is_alive() and not self._deadline_thread.is_alive():
            os.close(self._event_fd)

    # ------------------------------------------------------------ the storage thread

    def _run(self) -> None:
        try:
            self._storage = self._open_storage()
        except BaseException as error:
            self._start_errors.put(error)
            return
        self._start_errors.put(None)
        try:
            self._serve()
        except Exception:
            log.exception("the storage thread failed; the rank ends, as nobody knows what was read into host memory")
            os._exit(70)
        finally:
            self._storage.close()

    def _serve(self) -> None:
        is_busy = True
        while not self._is_closing:
            self._take_commands(wait=not is_busy)
            is_busy = self._step()

    def _take_commands(self, *, wait: bool) -> None:
        try:
            command = self._commands.get(block=wait, timeout=TEND_EVERY_S)
            while command is not None:
                match command:
                    case Fetch():
                        self._arrivals.append(command)
                    case Store():
                        self._stores.append(command)
                command = self._commands.get_nowait()
        except queue.Empty:
            pass

    def _step(self) -> bool:
        """One thing; False if there was nothing to do."""
        if self._arrivals:
            self._look(self._arrivals.popleft())
        elif self._reads:
            self._read_block(self._reads[0])
        elif self._stores:
            store = self._stores.popleft()
            self._tell_loop(Stored(store.store_id, self._storage.store(store.block_hash, store.host_block)))
            self._storage.tend()  # so that it keeps up when stores never pause
        else:
            return self._storage.tend()
        return True

    def _look(self, fetch: Fetch) -> None:
        if fetch.hashes and self._storage.has(fetch.hashes[0]):
            self._reads.append(_OpenFetch(fetch))
        else:
            self._answer(fetch.fetch_id, 0)

    def _read_block(self, open_fetch: _OpenFetch) -> None:
        """The next block, unless nobody waits for it any more: others may still make theirs."""
        fetch = open_fetch.fetch
        index = open_fetch.num_blocks
        is_read = fetch.fetch_id in self._awaited and self._storage.load(fetch.hashes[index], fetch.host_blocks[index])
        open_fetch.num_blocks += is_read
        if not is_read or open_fetch.num_blocks == len(fetch.hashes):
            self._reads.popleft()
            self._answer(fetch.fetch_id, open_fetch.num_blocks)

    def _answer(self, fetch_id: int, num_blocks: int) -> None:
        with self._answering:
            self._awaited.discard(fetch_id)
            self._tell_loop(StorageReady(fetch_id, num_blocks))

    def _tell_loop(self, event: Event) -> None:
        self._events.put(event)
        os.eventfd_write(self._event_fd, 1)

    # ------------------------------------------------------------ the deadline thread

    def _watch(self) -> None:
        deadlines: list[tuple[float, int]] = []
        while True:
            timeout_s = max(0.0, deadlines[0][0] - self._clock()) if deadlines else None
            try:
                deadline = self._deadlines.get(timeout=timeout_s)
            except queue.Empty:
                pass
            else:
                if deadline is None:
                    return
                heapq.heappush(deadlines, deadline)
            while deadlines and deadlines[0][0] <= self._clock():
                self._on_deadline(heapq.heappop(deadlines)[1])

    def _on_deadline(self, fetch_id: int) -> None:
        with self._answering:
            if fetch_id in self._awaited:
                self._awaited.discard(fetch_id)
                self._num_late += 1
                self._tell_loop(StorageLate(fetch_id))
