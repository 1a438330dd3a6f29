"""KV between device, host and files in a real loop: the answers are those of a large pool, and nothing is left over."""

from __future__ import annotations

import queue
import threading
from pathlib import Path

import pytest

from pdserve.engine.storage_thread import BlockStorage, StorageThread
from pdserve.engine.tiers import HostTierLink
from pdserve.kv.storage import KVStorage
from pdserve.request import BlockHash, BlockId, FinishReason, RequestId
from pdserve.scheduler.plan import HostCopy, HostCopyDone, RoundPlan
from pdserve.scheduler.state import State
from pdserve.transfer.file_tier import FileTier
from tests.engine.loops import Loop, expected, running, tokens
from tests.engine.other_end import LIMIT_S, wait_for
from tests.roles.cluster import prompt_of
from tests.roles.inside import BLOCK_SIZE, LAYOUT, OpenStorage, Size, fingerprint

# Six answers of up to 6 blocks each, in 12 blocks.
SMALL = Size(num_blocks=12, num_slots=6, num_host_blocks=64, answer_headroom=0)
NEVER_S = 1e6


def files_in(directory: Path, revision: str = "r0", **limits: float) -> OpenStorage:
    """A file tier behind its thread."""

    def open_storage(host: KVStorage) -> StorageThread:
        def open_tier() -> FileTier:
            return FileTier(
                directory,
                fingerprint(revision),
                slab_ptr=host.data_ptr,
                num_blocks=host.num_blocks,
                block_bytes=LAYOUT.block_bytes,
                max_bytes=1 << 30,
            )

        return started(open_tier, **limits)

    return open_storage


def started(open_storage: object, **limits: float) -> StorageThread:
    thread = StorageThread(open_storage, **limits)  # type: ignore[arg-type]
    thread.start()
    return thread


class HeldReads:
    """Storage that has every block it is asked for, and reads none before `go`; what it reads is no good."""

    def __init__(self) -> None:
        self.begun: queue.SimpleQueue[BlockId] = queue.SimpleQueue()
        self.go = threading.Event()

    def has(self, block_hash: BlockHash) -> bool:
        return True

    def load(self, block_hash: BlockHash, block: BlockId) -> bool:
        self.begun.put(block)
        assert self.go.wait(LIMIT_S)
        return False

    def store(self, block_hash: BlockHash, block: BlockId) -> bool:
        return True

    def tend(self) -> bool:
        return False

    def counters(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        pass


def ask(loop: Loop, name: str, prompt: list[int], num_tokens: int = 2) -> int:
    """A right answer; how many tokens of its prompt were not computed."""
    loop.submit(name, prompt, num_tokens)
    outputs = loop.until_over(name)[name]
    assert tokens(outputs) == expected(prompt, num_tokens)
    return outputs[0].num_cached_tokens


# ---------------------------------------------------------------- the copies themselves


def slab(num_blocks: int, first: int) -> KVStorage:
    storage = KVStorage(LAYOUT, num_blocks)
    for block in range(num_blocks):
        storage.slab[block] = first + block
    return storage


def test_copies_are_made_in_order_and_write_backs_by_another_thread() -> None:
    device, host = slab(4, 10), slab(4, 20)
    link = HostTierLink(device, host)
    try:
        out = HostCopy(1, True, (BlockId(0), BlockId(3)), (BlockId(2), BlockId(1)))
        back = HostCopy(2, False, (BlockId(2),), (BlockId(2),))
        assert link.copy([out, back]) == [HostCopyDone(1), HostCopyDone(2)]
        assert host.slab[:, 0].tolist() == [20, 13, 10, 23]
        assert device.slab[:, 0].tolist() == [10, 11, 10, 13]
        link.begin([HostCopy(3, True, (BlockId(1),), (BlockId(3),))], [], [])
        assert wait_for(lambda: link.events() or None) == [HostCopyDone(3)]
        assert host.slab[3, -1] == 11
        assert link.events() == []
        counters = {"host:image_blocks": 2, "host:loaded_blocks": 1, "host:write_back_blocks": 1}
        assert link.counters() == counters
    finally:
        link.close()


def test_write_backs_run_while_a_forward_does(sockets: Path) -> None:
    with running(sockets, Size(num_host_blocks=8)) as loop:
        loop.inside.runner.hold(lambda plan: bool(plan.write_backs))
        loop.submit("goes on", prompt_of(3), 2000)
        loop.submit("ends", prompt_of(200), 1)
        plan = loop.until_held()
        assert plan.batch_size
        counters = loop.inside.tiers.counters
        wait_for(lambda: counters().get("host:write_back_blocks") or None)
        assert loop.plans()[-1].round_id < plan.round_id, "its forward is over"
        loop.abort("goes on")
        loop.inside.runner.release()
        loop.until_over("goes on", "ends")
        loop.until_idle()


# ---------------------------------------------------------------- retraction


def test_a_third_of_the_blocks_gives_the_same_answers_and_computes_no_prompt_twice(sockets: Path) -> None:
    prompts = {f"r{number}": prompt_of(100 + 30 * number, number) for number in range(6)}
    with running(sockets, SMALL) as loop:
        for name, prompt in prompts.items():
            loop.submit(name, prompt, 150)
        outputs = loop.until_over(*prompts)
        for name, prompt in prompts.items():
            assert tokens(outputs[name]) == expected(prompt, 150)
        counters = loop.until_idle()
        assert counters["retractions"] == counters["restores"] > 0
        assert counters["prompt_tokens_computed"] == sum(map(len, prompts.values()))
        assert counters["capacity_failures"] == 0


def test_what_a_caller_asked_beside_the_tokens_survives_a_retraction(sockets: Path) -> None:
    """Log probabilities of tokens and prompts, and the usage, are those of an answer that was never moved."""

    def ask_all(size: Size) -> tuple[dict[str, tuple[object, ...]], int]:
        names = [f"r{number}" for number in range(6)]
        with running(sockets, size) as loop:
            for number, name in enumerate(names):
                wants = {"num_logprobs": 2, "prompt_logprobs": 1} if number % 2 else {}
                loop.submit(name, prompt_of(180, number), 120, **wants)
            told = {
                name: (
                    tokens(outputs),
                    [output.logprobs for output in outputs],
                    [output.prompt_logprobs for output in outputs],
                    outputs[-1].finish,
                )
                for name, outputs in loop.until_over(*names).items()
            }
            return told, loop.until_idle()["retractions"]

    moved, num_retractions = ask_all(SMALL)
    still, none = ask_all(Size())
    assert moved == still
    assert (num_retractions > 0, none) == (True, 0)


def retracts(plan: RoundPlan) -> bool:
    return any(copy.is_to_host for copy in plan.copies)


def restores(plan: RoundPlan) -> bool:
    return any(not copy.is_to_host for copy in plan.copies)


def in_state(loop: Loop, state: State) -> list[RequestId]:
    """Which requests are; only while a forward is held."""
    return [r.request_id for r in loop.inside.scheduler._residents.by_id.values() if r.state is state]


@pytest.mark.parametrize(("moves", "state"), [(retracts, State.RETRACTED), (restores, State.RESTORING)])
def test_who_is_aborted_while_its_image_moves_leaves_nothing_behind(sockets: Path, moves: object, state: State) -> None:
    prompts = {f"r{number}": prompt_of(150, number) for number in range(4)}
    with running(sockets, SMALL) as loop:
        loop.inside.runner.hold(moves)  # type: ignore[arg-type]
        for name, prompt in prompts.items():
            loop.submit(name, prompt, 150)
        loop.until_held()
        victims = in_state(loop, state)
        assert victims
        loop.abort(*victims)
        loop.inside.runner.release()
        outputs = loop.until_over(*prompts)
        for name, prompt in prompts.items():
            is_victim = name in victims
            assert outputs[name][-1].finish is (FinishReason.ABORT if is_victim else FinishReason.LENGTH)
            got = tokens(outputs[name])
            assert got == expected(prompt, len(got) if is_victim else 150)
        loop.until_idle()


# ---------------------------------------------------------------- prefixes in host memory


def test_a_prefix_that_left_the_device_is_found_in_host_memory(sockets: Path) -> None:
    with running(sockets, Size(num_blocks=8, num_host_blocks=32)) as loop:
        first = prompt_of(6 * BLOCK_SIZE + 1)
        assert ask(loop, "first", first) == 0
        loop.until_idle()
        for number in range(3):
            ask(loop, f"other{number}", prompt_of(400, number + 1))
        assert ask(loop, "again", [*first, 5, 6]) == 6 * BLOCK_SIZE
        counters = loop.until_idle()
        assert counters["host_hit_tokens"] == 6 * BLOCK_SIZE
        assert counters["host:loaded_blocks"] == 6


# ---------------------------------------------------------------- prefixes in files


def test_a_prefix_survives_the_rank_in_files_of_the_same_weights(sockets: Path, tmp_path: Path) -> None:
    prompt = prompt_of(6 * BLOCK_SIZE + 7)
    size = Size(num_blocks=12, num_host_blocks=12)
    with running(sockets, size, files_in(tmp_path, deadline_s=NEVER_S)) as loop:
        assert ask(loop, "first", prompt) == 0
        assert loop.until_idle()["storage:stored"] == 6
    with running(sockets, size, files_in(tmp_path, deadline_s=NEVER_S)) as loop:
        assert ask(loop, "again", prompt) == 6 * BLOCK_SIZE
        counters = loop.until_idle()
        assert (counters["storage_blocks_fetched"], counters["storage:hits"]) == (6, 6)
        assert counters["prompt_tokens_computed"] == 7
    with running(sockets, size, files_in(tmp_path, "other weights", deadline_s=NEVER_S)) as loop:
        assert ask(loop, "other", prompt) == 0
        assert loop.until_idle()["storage:hits"] == 0


def test_corrupt_files_are_misses_until_each_was_read_and_written_anew(sockets: Path, tmp_path: Path) -> None:
    prompt = prompt_of(4 * BLOCK_SIZE + 1)
    size = Size(num_blocks=12, num_host_blocks=12)
    with running(sockets, size, files_in(tmp_path)) as loop:
        ask(loop, "first", prompt)
        loop.until_idle()
    files = sorted(tmp_path.rglob("*.kv"))
    bytes_of = [bytearray(path.read_bytes()) for path in files]
    bytes_of[0][-1] ^= 1
    bytes_of[1], bytes_of[2] = bytes_of[2], bytes_of[1]
    del bytes_of[3][-1:]
    for path, content in zip(files, bytes_of, strict=True):
        path.write_bytes(content)
    hits = []
    while not hits or hits[-1] < 4 * BLOCK_SIZE:
        with running(sockets, size, files_in(tmp_path, deadline_s=NEVER_S)) as loop:
            hits.append(ask(loop, "again", prompt))
            loop.until_idle()
    assert hits[0] == 0
    assert hits == sorted(hits)
    assert len(hits) <= len(files) + 1


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def with_held_reads(storage: BlockStorage, clock: Clock | None = None) -> OpenStorage:
    """A read is late 10 seconds of the clock after it was asked for."""
    return lambda host: started(lambda: storage, deadline_s=10.0, block_deadline_s=0.0, clock=clock or Clock())


def test_a_prompt_goes_on_without_a_read_that_is_late(sockets: Path) -> None:
    storage, clock, prompt = HeldReads(), Clock(), prompt_of(3 * BLOCK_SIZE + 1)
    size = Size(num_blocks=12, num_host_blocks=12)
    with running(sockets, size, with_held_reads(storage, clock)) as loop:
        loop.submit("late", prompt, 2)
        storage.begun.get(timeout=LIMIT_S)
        clock.now_s = 10.0
        loop.submit("next", prompt_of(100), 1)  # each new read has the deadlines looked at
        assert tokens(loop.until_over("late")["late"]) == expected(prompt, 2)
        load, integrity = loop.load()
        assert (load.num_running, load.num_waiting, integrity) == (0, 1, "")
        assert loop.num_held_host_blocks >= 3, "memory that a read may still write was given away"
        storage.go.set()
        loop.until_over("next")
        assert loop.until_idle()["storage:late"] == 1


def test_a_prompt_that_waits_for_a_read_holds_no_slot_and_no_head_of_line(sockets: Path) -> None:
    storage = HeldReads()
    size = Size(num_blocks=12, num_slots=1, num_host_blocks=12)
    with running(sockets, size, with_held_reads(storage)) as loop:
        fetched, short = prompt_of(3 * BLOCK_SIZE + 1), [1, 2, 3]
        loop.submit("fetched", fetched, 2)
        storage.begun.get(timeout=LIMIT_S)
        assert ask(loop, "short", short) == 0
        load, integrity = loop.load()
        assert (load.num_held_blocks, load.num_running, load.num_waiting, integrity) == (0, 0, 1, "")
        storage.go.set()
        assert tokens(loop.until_over("fetched")["fetched"]) == expected(fetched, 2)
        loop.until_idle()


def test_who_is_aborted_while_its_prefix_is_read_ends_at_once(sockets: Path) -> None:
    storage = HeldReads()
    with running(sockets, Size(num_blocks=12, num_host_blocks=12), with_held_reads(storage)) as loop:
        loop.submit("a", prompt_of(3 * BLOCK_SIZE + 1), 2)
        storage.begun.get(timeout=LIMIT_S)
        loop.abort("a")
        (output,) = loop.until_over("a")["a"]
        assert output.finish is FinishReason.ABORT
        loop.submit("a", [7], 2)  # its name is free at once, and the old read is not taken for its own
        assert tokens(loop.until_over("a")["a"]) == expected([7], 2)
        storage.go.set()
        loop.until_idle()
