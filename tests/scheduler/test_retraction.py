"""Who gives way when blocks are short, to whom, and how it comes back with nothing computed twice."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.request import DECODE_ONLY, PREFILL_ONLY, RequestId
from pdserve.scheduler.state import State
from tests.scheduler.world import World, state_of, world_of

SHAPES = pytest.mark.parametrize("enable_mixed_batch", [False, True])


def tracked(world: World, request_id: str) -> Any:
    return world.scheduler._residents.by_id[RequestId(request_id)]


def prompts_computed_once(world: World) -> bool:
    """Every prompt token of the answers that ended was computed once or found in a cache."""
    counters = world.scheduler.counters
    total = sum(len(submission.prompt) for submission in world.submissions.values())
    return counters.prompt_tokens_computed + counters.prefix_hit_tokens == total


def growing_world(count: int = 3, **numbers: Any) -> World:
    """Answers that will outgrow a pool of six blocks, with room for every image."""
    world = world_of(**{"num_blocks": 6, "answer_headroom": 0, "num_host_blocks": 24, **numbers})
    for index in range(count):
        world.submit(f"r{index}", [20 + index] * 5, 15)
    return world


def rounds_until_retraction(world: World, limit: int = 60) -> None:
    for _ in range(limit):
        world.round()
        world.settle_tiers()
        if world.scheduler.counters.retractions:
            return
    raise AssertionError("nobody was retracted")


# ---------------------------------------------------------------- for a decode


@SHAPES
def test_answers_that_outgrow_the_pool_all_end_right_and_nothing_is_computed_twice(enable_mixed_batch: bool) -> None:
    world = growing_world(enable_mixed_batch=enable_mixed_batch)
    world.drain()
    assert set(world.ended.values()) == {"finished"}
    counters = world.scheduler.counters
    assert (counters.capacity_failures, counters.retractions) == (0, counters.restores)
    assert counters.retractions > 0
    assert prompts_computed_once(world)


def test_a_stream_of_many_answers_over_a_third_of_the_pool_they_need_ends_right() -> None:
    world = world_of(num_blocks=32, num_host_blocks=96, max_batch_size=32, max_scheduled_tokens=64, answer_headroom=0)
    for index in range(32):
        world.submit(f"r{index}", [index, 3, index % 5], 10)
    world.drain()
    assert set(world.ended.values()) == {"finished"}
    assert world.scheduler.counters.retractions > 0
    assert prompts_computed_once(world)


def test_the_victim_is_the_answer_that_frees_most_and_of_these_the_one_least_far() -> None:
    world = world_of(num_blocks=9, answer_headroom=0, num_host_blocks=24)
    world.submit("large", [1] * 14, 20)
    world.submit("early", [2] * 3, 20)
    world.submit("late", [3] * 3, 20)
    rounds_until_retraction(world)
    assert state_of(world, "large") is State.RETRACTED


def test_of_answers_that_free_as_much_the_one_least_far_gives_way() -> None:
    world = world_of(num_host_blocks=24)
    world.submit("ahead", [1] * 4, 12)
    world.rounds(3)
    world.submit("behind", [2] * 6, 10)
    world.round()
    assert [len(tracked(world, name).blocks) for name in ("ahead", "behind")] == [2, 3]
    world.rounds(3)
    assert [r.request_id for r in world.scheduler._planner._retraction._victims()] == ["behind", "ahead"]


def test_an_incomplete_prefill_gives_way_before_any_answer_the_largest_first() -> None:
    world = world_of(num_blocks=10, answer_headroom=0, num_host_blocks=24, max_scheduled_tokens=8)
    world.submit("answers", [1] * 4, 20)
    world.round()
    world.submit("prompt", [2] * 30, 1)
    while "prompt" not in {start.request_id for start in world.round().starts}:
        pass
    while not world.scheduler.counters.retractions:
        plan = world.round(allow_prefill=False)
    assert state_of(world, "prompt") is State.RETRACTED
    assert [row.request_id for row in plan.decode] == ["answers"], "it has its block in this very round"
    world.drain()
    assert prompts_computed_once(world)


@pytest.mark.parametrize("route", [PREFILL_ONLY, DECODE_ONLY])
def test_kv_that_a_peer_reads_or_writes_is_never_taken(route: Any) -> None:
    world = world_of(num_blocks=8, answer_headroom=0, num_host_blocks=24)
    world.submit("wire", range(40, 56), 4, route=route)
    world.submit("a", [1] * 7, 9)
    world.submit("b", [2] * 7, 9)
    state = State.SENDING if route is PREFILL_ONLY else State.RECEIVING
    rounds_until_retraction(world)
    assert state_of(world, "wire") is state
    world.drain()


def test_a_lone_answer_that_lacks_a_block_waits_while_others_decode() -> None:
    world = world_of(num_blocks=6, answer_headroom=0, num_host_blocks=24, max_scheduled_tokens=32)
    world.submit("short", [1] * 5, 4)
    world.submit("long", [2] * 16, 8)
    world.round()
    assert [row.request_id for plan in world.rounds(3) for row in plan.decode] == ["short"] * 3
    world.drain()
    assert world.scheduler.counters.retractions == 0


def test_retraction_waits_for_a_copy_that_will_free_blocks() -> None:
    world = world_of(num_blocks=5, answer_headroom=0, num_host_blocks=24)
    world.submit("cached", [9] * 5, 1)
    world.round()
    assert len(world.plan().write_backs) == 1
    world.submit("a", [1] * 7, 9)
    world.submit("b", [2] * 7, 9)
    world.round()
    assert world.scheduler.num_held_blocks == 5, "one of these is held by the write-back alone"
    blocked = [world.round() for _ in range(3)][-1]
    assert (blocked.batch_size, blocked.copies, blocked.failed) == (0, (), ())
    world.settle_tiers()
    assert world.round().batch_size
    world.drain()


def test_an_image_that_does_not_fit_fails_the_newest_answer_and_names_the_knob() -> None:
    world = growing_world(num_host_blocks=1)
    failed: list[Any] = []
    while not failed:
        failed += world.round().failed
        world.settle_tiers()
    assert [failure.request_id for failure in failed] == ["r2"]
    assert "--host-kv-gb" in failed[0].error.message
    world.drain()


def test_nobody_fails_while_a_closed_gate_alone_keeps_an_unfinished_prompt_from_running() -> None:
    world = world_of(num_blocks=6, answer_headroom=0, max_scheduled_tokens=8)
    world.submit("answers", [1] * 4, 20)
    world.round()
    world.submit("prompt", [2] * 12, 1)
    world.round()
    for _ in range(12):
        plan = world.plan(allow_prefill=False)
        assert not plan.failed
        if plan.batch_size:
            world.run()
    assert not plan.batch_size
    assert world.scheduler.probe_prefill_gate().wants_prefill, "so the gate will open"
    world.drain()
    assert set(world.ended.values()) == {"finished"}


# ---------------------------------------------------------------- for a prompt


def crowded_world(**numbers: Any) -> World:
    """One answer holds all but two of 10 blocks, most of them for what it has not said yet."""
    world = world_of(**{"num_blocks": 10, "answer_headroom": 30, "num_host_blocks": 24, "max_model_len": 64, **numbers})
    world.submit("holds", [1] * 3, 28)
    world.rounds(3)
    assert world.scheduler.num_held_blocks == 8
    return world


@SHAPES
def test_a_prompt_that_lacks_blocks_is_admitted_in_the_round_its_victim_leaves(enable_mixed_batch: bool) -> None:
    world = crowded_world(enable_mixed_batch=enable_mixed_batch)
    world.submit("new", range(10, 20), 3)
    plan = world.round()
    assert [row.request_id for row in plan.rows] == ["new"]
    assert [copy.is_to_host for copy in plan.copies] == [True]
    assert state_of(world, "holds") is State.RETRACTED
    world.drain()
    assert set(world.ended.values()) == {"finished"}
    assert prompts_computed_once(world)


def test_an_image_is_saved_before_its_blocks_are_loaded_for_somebody_else() -> None:
    """The copies of a round are made in the plan's order."""
    world = crowded_world(num_blocks=9)
    prompt = tuple(range(100, 117))
    world.abort("holds")
    world.submit("before", prompt, 1)
    world.drain()
    for _ in range(3):
        world.plan()
        world.settle_tiers()
    world.submit("holds again", [1] * 5, 28, reads_prefix_cache=False)
    world.rounds(3)
    world.submit("hit", prompt, 2)
    plan = world.round()
    assert [copy.is_to_host for copy in plan.copies] == [True, False]
    assert set(plan.copies[0].device_blocks) & set(plan.copies[1].device_blocks)
    world.drain()


def test_nobody_gives_way_where_that_would_not_be_enough() -> None:
    world = crowded_world(num_host_blocks=1)
    world.rounds(3)
    world.submit("new", range(10, 20), 3)
    for _ in range(5):
        plan = world.round()
        assert (plan.copies, [row.request_id for row in plan.rows]) == ((), ["holds"])


def test_a_prefix_shared_with_the_victim_is_not_counted_as_freed() -> None:
    """The victim holds five blocks, four of them the prompt's own prefix: it frees one, and two are lacking."""
    world = world_of(num_blocks=10, answer_headroom=0, num_host_blocks=24)
    shared = [7] * 16
    world.submit("victim", [*shared, 8], 4)
    world.submit("wire", [9] * 15, 1, route=PREFILL_ONLY)
    world.rounds(2)
    world.submit("new", [*shared, *range(100, 110)], 5)
    plan = world.round()
    assert (plan.copies, [row.request_id for row in plan.rows]) == ((), ["victim"])
    world.drain()


def test_a_prompt_never_takes_the_place_of_one_that_was_retracted_before() -> None:
    world = crowded_world()
    world.submit("first", range(10, 20), 3)
    world.round()
    while state_of(world, "holds") is not State.DECODING:
        world.round()
        world.settle_tiers()
    world.submit("second", range(30, 40), 3)
    while world.live:
        plan = world.round()
        world.settle_tiers()
        assert not [copy for copy in plan.copies if copy.is_to_host]
    assert world.scheduler.counters.retractions == 1


def test_a_steady_stream_of_prompts_lets_a_retracted_answer_end() -> None:
    world = crowded_world()
    for number in range(200):
        if world.scheduler.num_waiting < 2:
            world.submit(f"r{number}", range(number, number + 10), 3)
        world.round()
        world.settle_tiers()
        if "holds" in world.ended:
            break
    assert world.scheduler.counters.retractions > 0
    assert world.ended[RequestId("holds")] == "finished"
    assert number < 120


def test_closed_a_prompt_that_lacks_blocks_moves_nobody() -> None:
    world = crowded_world()
    world.submit("new", range(10, 20), 3)
    for _ in range(4):
        plan = world.round(allow_prefill=False)
        assert (plan.copies, [row.request_id for row in plan.decode]) == ((), ["holds"])


def test_above_the_watermark_a_prompt_that_lacks_blocks_moves_nobody() -> None:
    world = crowded_world(prefill_watermark=7)
    world.submit("new", range(10, 20), 3)
    for _ in range(4):
        plan = world.round()
        assert (plan.copies, [row.request_id for row in plan.decode]) == ((), ["holds"])


def test_a_reservation_that_lacks_blocks_moves_nobody() -> None:
    world = crowded_world()
    world.submit("remote", range(10, 20), 3, route=DECODE_ONLY)
    for _ in range(4):
        plan = world.round()
        assert (plan.copies, plan.reservations) == ((), ())
    world.drain()


# ---------------------------------------------------------------- redirect


def lone_blocked_world() -> World:
    """The one answer here lacks its next block: all others are on their way to a peer."""
    world = world_of(num_blocks=6, answer_headroom=0, num_host_blocks=24)
    world.submit("wire", [9] * 12, 1, route=PREFILL_ONLY)
    world.submit("blocked", [1] * 3, 20)
    while world.round().batch_size:
        pass
    assert state_of(world, "blocked") is State.DECODING
    return world


def test_the_blocks_of_a_lone_blocked_answer_go_to_the_first_prompt_they_suffice_for() -> None:
    world = lone_blocked_world()
    world.submit("too large", [2] * 15, 1)
    world.submit("fits", [3] * 9, 1)
    plan = world.round()
    assert [row.request_id for row in plan.rows] == ["fits"]
    assert state_of(world, "blocked") is State.RETRACTED
    world.drain()


def test_closed_the_redirect_skips_prompts_that_the_gate_holds() -> None:
    world = lone_blocked_world()
    world.submit("gated", [3] * 9, 1)
    assert not world.round(allow_prefill=False).copies
    world.submit("for a peer", [4] * 9, 1, route=PREFILL_ONLY)
    assert [row.request_id for row in world.round(allow_prefill=False).rows] == ["for a peer"]
    world.drain()


def test_with_nobody_to_serve_a_lone_blocked_answer_keeps_its_blocks() -> None:
    world = lone_blocked_world()
    plan = world.plan()
    assert (plan.copies, plan.failed, plan.batch_size) == ((), (), 0)
    world.drain()
