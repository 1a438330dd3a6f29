from __future__ import annotations

import queue
import random
import select
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from pdserve.engine.storage_thread import StorageThread
from pdserve.errors import StartupError
from pdserve.request import BlockHash, BlockId
from pdserve.scheduler.plan import Event
from pdserve.scheduler.storage_plan import Fetch, StorageLate, StorageReady, Store, Stored
from tests.transfer.files import hash_of, open_node, payload

LIMIT_S = 20.0
NEVER_S = 1e6


class HeldStorage:
    """Holds what it is told to hold; while it is `held`, each load and store waits for a `release`."""

    def __init__(self) -> None:
        self.hashes: set[BlockHash] = set()
        self.is_held = False
        self.begun: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._releases = threading.Semaphore(0)
        self.is_closed = False
        self.threads: set[str] = set()

    def release(self, count: int = 1) -> None:
        self._releases.release(count)

    def _work(self, what: str) -> None:
        self.threads.add(threading.current_thread().name)
        self.begun.put(what)
        if self.is_held:
            assert self._releases.acquire(timeout=LIMIT_S)

    def has(self, block_hash: BlockHash) -> bool:
        return block_hash in self.hashes

    def load(self, block_hash: BlockHash, block: BlockId) -> bool:
        self._work("load")
        return block_hash in self.hashes

    def store(self, block_hash: BlockHash, block: BlockId) -> bool:
        self._work("store")
        self.hashes.add(block_hash)
        return True

    def tend(self) -> bool:
        return False

    def counters(self) -> dict[str, int]:
        return {"hits": 0}

    def close(self) -> None:
        self.is_closed = True


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def fetch(fetch_id: int, *numbers: int) -> Fetch:
    return Fetch(fetch_id, tuple(hash_of(n) for n in numbers), tuple(BlockId(i) for i in range(len(numbers))))


def store(store_id: int, number: int, block: int = 0) -> Store:
    return Store(store_id, hash_of(number), BlockId(block))


def wait_for(thread: StorageThread, count: int) -> list[Event]:
    """The next `count` events."""
    events: list[Event] = []
    while len(events) < count:
        assert select.select([thread.fileno()], [], [], LIMIT_S)[0], f"only {events} came"
        events += thread.events()
    assert len(events) == count
    return events


NewThread = Callable[..., StorageThread]


@pytest.fixture
def storage() -> HeldStorage:
    return HeldStorage()


@pytest.fixture
def new_thread(storage: HeldStorage) -> Iterator[NewThread]:
    made: list[StorageThread] = []

    def new(**options: object) -> StorageThread:
        thread = StorageThread(lambda: storage, **options)
        thread.start()
        made.append(thread)
        return thread

    yield new
    storage.release(1000)
    if not storage.is_closed:
        for thread in made:
            thread.close()


# ---------------------------------------------------------------- with files


def test_stored_blocks_are_fetched_up_to_the_first_that_is_missing(tmp_path: Path) -> None:
    node = open_node(tmp_path)
    thread = StorageThread(lambda: node.tier)
    thread.start()
    for number in (0, 1, 3):
        node.slab[number] = np.frombuffer(payload(number), np.uint8)
        thread.submit(store(number, number, block=number))
    assert wait_for(thread, 3) == [Stored(0, True), Stored(1, True), Stored(3, True)]
    node.slab[:] = 0
    thread.submit(fetch(7, 0, 1, 2, 3))
    thread.submit(fetch(8, 2, 3))
    assert sorted(wait_for(thread, 2), key=repr) == [StorageReady(7, 2), StorageReady(8, 0)]
    assert [node.slab[i].tobytes() for i in (0, 1)] == [payload(0), payload(1)]
    counters = thread.counters()
    assert (counters["hits"], counters["misses"], counters["stored"], counters["late"]) == (2, 2, 3, 0)
    thread.close()


def test_what_opening_the_storage_raises_is_raised_at_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    thread = StorageThread(lambda: open_node(tmp_path / "file").tier)
    with pytest.raises(StartupError, match="--kv-dir"):
        thread.start()


# ---------------------------------------------------------------- order


def test_fetches_go_before_stores(storage: HeldStorage, new_thread: NewThread) -> None:
    storage.is_held = True
    storage.hashes = {hash_of(1), hash_of(2)}
    thread = new_thread()
    thread.submit(store(0, 10))
    assert storage.begun.get(timeout=LIMIT_S) == "store"
    thread.submit(store(1, 11))
    thread.submit(fetch(5, 1, 2))
    storage.release(4)
    assert wait_for(thread, 3) == [Stored(0, True), StorageReady(5, 2), Stored(1, True)]


def test_a_prompt_that_nobody_stored_does_not_wait_behind_reads(storage: HeldStorage, new_thread: NewThread) -> None:
    storage.is_held = True
    storage.hashes = {hash_of(1), hash_of(2)}
    thread = new_thread()
    thread.submit(fetch(5, 1, 2))
    assert storage.begun.get(timeout=LIMIT_S) == "load"
    thread.submit(fetch(6, 3, 4))
    storage.release(1)
    assert wait_for(thread, 1) == [StorageReady(6, 0)]
    storage.release(1)
    assert wait_for(thread, 1) == [StorageReady(5, 2)]


def test_nothing_but_the_storage_thread_touches_the_storage(storage: HeldStorage, new_thread: NewThread) -> None:
    thread = new_thread()
    thread.submit(store(0, 1))
    thread.submit(fetch(1, 1))
    wait_for(thread, 2)
    assert storage.threads == {"storage"}


def test_the_file_descriptor_is_readable_while_events_wait(new_thread: NewThread) -> None:
    thread = new_thread()
    assert thread.events() == []
    thread.submit(store(0, 1))
    assert select.select([thread.fileno()], [], [], LIMIT_S)[0]
    assert thread.events() == [Stored(0, True)]
    assert select.select([thread.fileno()], [], [], 0) == ([], [], [])


# ---------------------------------------------------------------- deadlines


def test_a_read_that_is_held_up_is_late_and_its_blocks_come_back_later(
    storage: HeldStorage, new_thread: NewThread
) -> None:
    storage.is_held = True
    storage.hashes = {hash_of(1), hash_of(2)}
    clock = Clock()
    thread = new_thread(deadline_s=10.0, block_deadline_s=0.0, clock=clock)
    thread.submit(fetch(5, 1, 2))
    assert storage.begun.get(timeout=LIMIT_S) == "load"
    clock.now_s += 10.0
    thread.submit(fetch(6, 3))  # each submission has the deadlines looked at
    assert wait_for(thread, 1) == [StorageLate(5)]
    storage.release(1)
    # The block that was being read counts; nobody waits for the second any more.
    assert wait_for(thread, 2) == [StorageReady(6, 0), StorageReady(5, 1)]
    assert storage.begun.empty()
    assert thread.counters()["late"] == 1


def test_a_deadline_counts_from_submission_and_grows_with_the_blocks(
    storage: HeldStorage, new_thread: NewThread
) -> None:
    storage.is_held = True
    storage.hashes = {hash_of(1), hash_of(2)}
    clock = Clock()
    thread = new_thread(deadline_s=10.0, block_deadline_s=1.0, clock=clock)
    thread.submit(fetch(1, 1, 2))
    thread.submit(fetch(2, 1))
    clock.now_s += 11.0
    thread.submit(fetch(3, 1))
    assert wait_for(thread, 1) == [StorageLate(2)]
    clock.now_s += 1.0
    thread.submit(fetch(4, 1))
    assert wait_for(thread, 1) == [StorageLate(1)]
    assert thread.events() == []


def test_a_late_fetch_that_had_not_begun_reads_nothing(storage: HeldStorage, new_thread: NewThread) -> None:
    storage.is_held = True
    storage.hashes = {hash_of(1)}
    thread = new_thread(deadline_s=0.0, block_deadline_s=0.0)
    thread.submit(store(0, 9))
    assert storage.begun.get(timeout=LIMIT_S) == "store"
    thread.submit(fetch(5, 1))
    assert wait_for(thread, 1) == [StorageLate(5)]
    storage.release(1)
    assert wait_for(thread, 2) == [Stored(0, True), StorageReady(5, 0)]
    assert storage.begun.empty()


def test_each_fetch_is_ready_once_and_late_at_most_once_and_before(tmp_path: Path) -> None:
    """Deadlines that fall at any moment of any read."""
    rng = random.Random(3)
    node = open_node(tmp_path)
    for number in range(8):
        node.put(number)
    thread = StorageThread(lambda: node.tier, deadline_s=0.005, block_deadline_s=0.0)
    thread.start()
    fetches = {i: fetch(i, *range(rng.randrange(1, 5))) for i in range(400)}
    seen: list[Event] = []
    for a_fetch in fetches.values():
        thread.submit(a_fetch)
        if rng.random() < 0.3:
            seen += thread.events()
    while sum(isinstance(event, StorageReady) for event in seen) < len(fetches):
        seen += wait_for_any(thread)
    thread.close()
    ready = [event.fetch_id for event in seen if isinstance(event, StorageReady)]
    late = [event.fetch_id for event in seen if isinstance(event, StorageLate)]
    assert sorted(ready) == list(fetches)
    assert len(late) == len(set(late)) == thread.counters()["late"]
    assert late, "no deadline fell"
    for fetch_id in late:
        assert seen.index(StorageLate(fetch_id)) < next(
            i for i, event in enumerate(seen) if isinstance(event, StorageReady) and event.fetch_id == fetch_id
        )
    complete = [
        e.fetch_id for e in seen if isinstance(e, StorageReady) and e.num_blocks == len(fetches[e.fetch_id].hashes)
    ]
    assert set(fetches) - set(complete) <= set(late), "a fetch in time got less than there is"


def wait_for_any(thread: StorageThread) -> list[Event]:
    assert select.select([thread.fileno()], [], [], LIMIT_S)[0]
    return thread.events()


# ---------------------------------------------------------------- the end


def test_close_ends_after_the_block_under_way(storage: HeldStorage, new_thread: NewThread) -> None:
    storage.is_held = True
    storage.hashes = {hash_of(1), hash_of(2)}
    thread = new_thread(deadline_s=NEVER_S)
    thread.submit(fetch(5, 1, 2))
    assert storage.begun.get(timeout=LIMIT_S) == "load"
    closing = threading.Thread(target=thread.close)
    closing.start()
    storage.release(1)
    closing.join(LIMIT_S)
    assert not closing.is_alive()
    assert storage.is_closed


def test_an_idle_thread_ends_at_once(storage: HeldStorage, new_thread: NewThread) -> None:
    thread = new_thread()
    thread.close()
    assert storage.is_closed
