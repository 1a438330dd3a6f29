"""Prefixes that the device may forget: in the host tier, in storage below it, and on their way between them."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.request import DECODE_ONLY, PREFILL_ONLY, RequestId
from pdserve.scheduler.state import State
from pdserve.scheduler.storage_plan import StorageLate, StorageReady, Stored
from pdserve.scheduler.tiers import MAX_FETCHES, MAX_STORES, MAX_WRITE_BACKS
from tests.scheduler.world import World, state_of, world_of

PROMPT = tuple(range(100, 121))  # 21 tokens: five full blocks and one more


def tiered_world(**numbers: Any) -> World:
    return world_of(**{"num_host_blocks": 16, "max_scheduled_tokens": 64, **numbers})


def answer(world: World, request_id: str, prompt: Any = PROMPT, **rest: Any) -> int:
    """Run the request to its end, tiers keeping up; how many of its prompt tokens were computed."""
    before = world.scheduler.counters.prompt_tokens_computed
    world.submit(request_id, prompt, 2, **rest)
    world.drain()
    assert world.ended[RequestId(request_id)] in ("finished", "sent off")
    return world.scheduler.counters.prompt_tokens_computed - before


def forget_device(world: World) -> None:
    """Others use the whole device, once the host has what it held."""
    write_back_all(world)
    world.submit("filler", [1], world.config.num_blocks * 4 - 1, reads_prefix_cache=False)
    world.drain()


def write_back_all(world: World) -> None:
    for _ in range(world.config.num_blocks):
        world.plan()
        world.settle_tiers()


# ---------------------------------------------------------------- the host tier


def test_a_prefix_that_left_the_device_comes_back_from_the_host() -> None:
    world = tiered_world(answer_headroom=100)
    assert answer(world, "cold") == 21
    forget_device(world)
    assert answer(world, "warm") == 1
    assert world.scheduler.counters.host_hit_tokens == 20


def test_hits_on_the_device_and_the_host_join_in_one_prompt() -> None:
    world = tiered_world(num_blocks=8, max_model_len=32, answer_headroom=100)
    answer(world, "cold")
    forget_device(world)
    assert answer(world, "front", PROMPT[:9]) == 1
    assert answer(world, "whole") == 1


def test_the_copy_of_a_hit_comes_before_the_forward_that_reads_it() -> None:
    world = tiered_world(answer_headroom=100)
    answer(world, "cold")
    forget_device(world)
    world.submit("warm", PROMPT, 2)
    plan = world.plan()
    (copy,) = plan.copies
    assert (copy.is_to_host, len(copy.device_blocks)) == (False, 5)
    assert plan.prefill[0].new_blocks[:5] == copy.device_blocks
    world.run()
    world.drain()


def test_a_prefix_is_found_in_the_host_only_when_its_copy_has_landed() -> None:
    world = tiered_world(answer_headroom=100)
    world.submit("cold", PROMPT, 1)
    world.round()
    world.plan()
    assert len(world.write_backs) == 5
    assert world.scheduler._host.pool.num_cached == 0
    world.write_back(next(iter(world.write_backs)))
    assert world.scheduler._host.pool.num_cached == 1
    world.drain()


def test_write_backs_run_beside_rounds_and_pin_what_they_read() -> None:
    world = tiered_world(num_blocks=6, max_model_len=24, answer_headroom=0)
    world.submit("cold", PROMPT, 1)
    plan = world.round()
    assert not plan.write_backs
    write_backs = world.plan().write_backs
    assert [len(copy.device_blocks) for copy in write_backs] == [1] * 5
    world.submit("needs four", range(13), 1)
    assert not world.plan().rows, "five of six blocks are being read"
    world.settle_tiers()
    assert world.plan().rows
    world.run()
    world.drain()


def test_blocks_that_only_a_copy_holds_do_not_count_as_occupied() -> None:
    world = tiered_world(num_blocks=6, max_model_len=24, prefill_watermark=5)
    world.submit("cold", PROMPT, 1)
    world.round()
    world.plan()
    world.submit("new", [1], 1)
    assert world.scheduler.num_held_blocks == 5
    assert world.scheduler.probe_prefill_gate().wants_prefill


def test_so_many_write_backs_are_under_way_at_once() -> None:
    world = tiered_world(num_blocks=16, num_host_blocks=32)
    answered = range(4 * 12 + 1)
    world.submit("cold", answered, 1)
    world.round()
    assert len(world.plan().write_backs) == MAX_WRITE_BACKS
    assert not world.plan().write_backs
    world.settle_tiers()
    assert len(world.plan().write_backs) == 12 - MAX_WRITE_BACKS


def test_what_the_host_holds_is_not_written_again() -> None:
    world = tiered_world(answer_headroom=100)
    answer(world, "cold")
    write_back_all(world)
    answer(world, "again")
    assert not world.plan().write_backs


def test_a_hit_on_the_way_to_the_device_outlives_its_request() -> None:
    world = tiered_world(answer_headroom=100)
    answer(world, "cold")
    forget_device(world)
    world.is_prompt = False
    world.submit("warm", PROMPT, 2)
    plan = world.plan()
    world.abort("warm")
    world.run()
    assert state_of(world, "warm") is None
    loaded = plan.copies[0].device_blocks
    assert [world.scheduler._pool.is_held(block) for block in loaded] == [True] * 5, "the copy holds them"
    world.check()
    world.tell_copied()
    assert [world.scheduler._pool.is_held(block) for block in loaded] == [False] * 5
    world.drain()


def test_an_image_takes_what_the_host_has_already_and_copies_the_rest() -> None:
    world = tiered_world(num_blocks=10, answer_headroom=30, max_model_len=64)
    world.submit("before", PROMPT[:9], 1)
    world.round()
    write_back_all(world)
    world.submit("image", PROMPT[:9], 22)
    world.rounds(4)
    world.submit("takes it", [1] * 20, 4)
    (copy,) = world.round().copies
    assert state_of(world, "image") is State.RETRACTED
    assert len(copy.host_blocks) == 1, "two of its three blocks are in the host"
    world.drain()


def test_without_a_tier_nothing_is_copied() -> None:
    world = world_of()
    answer(world, "cold")
    plan = world.plan()
    assert (plan.copies, plan.write_backs, plan.fetches, plan.stores) == ((), (), (), ())


# ---------------------------------------------------------------- storage


def stored_world(**numbers: Any) -> World:
    """Storage holds the whole prompt; device and host hold nothing."""
    return World(tiered_world(has_storage=True, **numbers).scheduler, dict(answered_storage()))


def answered_storage() -> dict[Any, list[int]]:
    world = tiered_world(has_storage=True)
    answer(world, "cold")
    write_back_all(world)
    assert len(world.storage) >= 5
    return world.storage


def test_a_prefix_survives_its_scheduler_in_storage() -> None:
    world = stored_world()
    assert answer(world, "warm") == 1
    counters = world.scheduler.counters
    assert (counters.storage_fetches, counters.storage_blocks_fetched, counters.host_hit_tokens) == (1, 5, 20)


def test_a_prompt_that_waits_for_a_read_holds_no_slot_no_block_and_no_head_of_line() -> None:
    world = stored_world(max_batch_size=1)
    world.submit("reads", PROMPT, 2)
    plan = world.plan()
    assert ([len(fetch.hashes) for fetch in plan.fetches], plan.rows) == ([5], ())
    assert state_of(world, "reads") is State.FETCHING
    assert (world.scheduler.num_held_blocks, world.scheduler.num_waiting) == (0, 1)
    world.submit("behind", [1, 2], 2)
    assert [row.request_id for row in world.round().rows] == ["behind"]
    world.drain()


def test_a_prompt_is_back_at_its_place_after_its_read() -> None:
    world = stored_world(max_batch_size=1)
    for name in ("first", "second"):
        world.submit(name, PROMPT, 1)
    world.plan()
    world.submit("third", [1, 2], 1)
    for fetch_id in sorted(world.fetches, reverse=True):
        world.fetch(fetch_id)
    assert [world.round().rows[0].request_id for _ in range(3)] == ["first", "second", "third"]


def test_a_read_that_is_late_lets_its_prompt_go_on_and_keeps_its_blocks() -> None:
    world = stored_world()
    world.submit("reads", PROMPT, 2)
    (fetch,) = world.plan().fetches
    world.fetch_late(fetch.fetch_id)
    assert state_of(world, "reads") is State.WAITING
    plan = world.round()
    assert (plan.fetches, plan.prefill[0].num_tokens) == ((), 21), "it is a miss, and not looked up again"
    assert world.scheduler._host.pool.num_held == 5
    world.fetch(fetch.fetch_id)
    world.drain()
    assert world.scheduler.counters.host_hit_tokens == 0


def test_the_blocks_of_a_late_read_serve_the_next_prompt() -> None:
    world = stored_world(prefix_caching=True)
    world.submit("reads", PROMPT, 2)
    (fetch,) = world.plan().fetches
    world.fetch_late(fetch.fetch_id)
    world.abort("reads")
    world.fetch(fetch.fetch_id)
    assert answer(world, "next") == 1


@pytest.mark.parametrize("num_intact", range(6))
def test_a_corrupt_block_is_a_miss_from_there_on(num_intact: int) -> None:
    world = stored_world()
    world.submit("reads", PROMPT, 2)
    (fetch,) = world.plan().fetches
    assert world.fetch(fetch.fetch_id, num_intact) == num_intact
    assert world.scheduler._host.pool.num_cached == num_intact, "nothing else can be found"
    assert world.round().prefill[0].num_tokens == 21 - 4 * num_intact
    world.drain()


def test_a_read_without_any_block_is_a_miss() -> None:
    world = tiered_world(has_storage=True)
    assert answer(world, "cold") == 21
    assert world.scheduler.counters.storage_blocks_fetched == 0


def test_an_abort_of_a_reading_prompt_ends_it_at_once_and_the_read_in_its_own_time() -> None:
    world = stored_world()
    world.submit("reads", PROMPT, 2)
    (fetch,) = world.plan().fetches
    world.abort("reads")
    world.check()
    assert state_of(world, "reads") is None
    assert not world.scheduler.is_idle, "storage still writes into host blocks"
    world.fetch(fetch.fetch_id)
    assert world.scheduler.is_idle


def test_a_read_of_a_request_that_left_does_not_wake_a_later_one_of_its_name() -> None:
    world = stored_world()
    world.submit("reads", PROMPT, 2)
    (first,) = world.plan().fetches
    world.abort("reads")
    world.scheduler.submit(world.submissions[RequestId("reads")])
    (second,) = world.plan().fetches
    world.fetch(first.fetch_id)
    assert state_of(world, "reads") is State.FETCHING
    world.fetch(second.fetch_id)
    assert state_of(world, "reads") is State.WAITING


def test_a_reading_prompt_is_wanted_by_the_gate_and_no_decode_work() -> None:
    world = stored_world()
    world.submit("reads", PROMPT, 2)
    world.plan()
    probe = world.scheduler.probe_prefill_gate()
    assert (probe.wants_prefill, probe.has_decode_work) == (True, False)


@pytest.mark.parametrize(("route", "num_fetches"), [(PREFILL_ONLY, 1), (DECODE_ONLY, 0)])
def test_only_who_prefills_here_reads_from_storage(route: Any, num_fetches: int) -> None:
    world = stored_world()
    world.submit("a", PROMPT, 2, route=route)
    assert len(world.plan().fetches) == num_fetches
    world.drain()


def test_who_computes_every_token_reads_nothing() -> None:
    world = stored_world()
    world.submit("a", PROMPT, 2, reads_prefix_cache=False)
    plan = world.round()
    assert (plan.fetches, plan.prefill[0].num_tokens) == ((), 21)


def test_so_many_reads_and_writes_are_under_way_at_once() -> None:
    world = tiered_world(has_storage=True, num_host_blocks=64, num_blocks=64, max_batch_size=16)
    for index in range(MAX_FETCHES + 3):
        world.submit(f"r{index}", range(100 * index, 100 * index + 6), 1)
    assert len(world.plan().fetches) == MAX_FETCHES
    for fetch_id in list(world.fetches):
        world.fetch(fetch_id)
    assert len(world.plan().fetches) == 3
    world.run()
    world.drain()
    most = 0
    for _ in range(8):
        world.plan()
        most = max(most, len(world.stores))
        world.settle_tiers()
    assert 0 < most <= MAX_STORES


def test_a_block_is_found_in_storage_after_its_write_and_not_written_twice() -> None:
    world = tiered_world(has_storage=True)
    answer(world, "cold")
    write_back_all(world)
    plan = world.plan()
    assert (plan.write_backs, plan.stores) == ((), ())


def test_a_write_that_failed_is_not_tried_again() -> None:
    world = tiered_world(has_storage=True)
    world.submit("cold", PROMPT, 1)
    world.plan()
    world.settle_tiers()
    world.round()
    world.plan()
    for copy_id in list(world.write_backs):
        world.write_back(copy_id)
    world.plan()
    assert len(world.stores) == 5
    for store_id in list(world.stores):
        world.store(store_id, is_stored=False)
    assert not world.plan().stores


def test_events_of_jobs_that_nobody_knows_are_counted_and_ignored() -> None:
    world = tiered_world(has_storage=True)
    world.advance(StorageReady(7, 3), StorageLate(7), Stored(7, True))
    counters = world.scheduler.counters
    assert (counters.ignored_events, counters.storage_blocks_fetched) == (3, 0)
