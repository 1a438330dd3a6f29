"""Who gets in: refusals, reservations, the prefix cache, and how long anybody may be overtaken."""

from __future__ import annotations

import pytest

from pdserve.errors import InvalidRequest, RequestIdInUse
from pdserve.request import DECODE_ONLY, FUSED, PREFILL_ONLY, RequestId, Route
from pdserve.scheduler.admission import MAX_MISSED, MAX_PASSED_OVER
from pdserve.scheduler.plan import PlanOptions, Submission
from tests.scheduler.world import World, world_of

# ---------------------------------------------------------------- refusals

ROUTES = pytest.mark.parametrize("route", [FUSED, PREFILL_ONLY, DECODE_ONLY])


@ROUTES
def test_an_empty_prompt_is_refused(route: Route) -> None:
    with pytest.raises(InvalidRequest, match="prompt is empty"):
        world_of().submit("a", [], route=route)


@pytest.mark.parametrize("route", [FUSED, DECODE_ONLY])
def test_what_passes_the_context_limit_with_its_answer_is_refused_with_value_and_limit(route: Route) -> None:
    world = world_of()
    with pytest.raises(InvalidRequest, match=r"prompt has 50 tokens and max_new_tokens is 15.*limit is 64"):
        world.submit("a", range(50), 15, route=route)
    world.submit("a", range(50), 14, route=route)


@pytest.mark.parametrize("route", [FUSED, DECODE_ONLY])
def test_what_never_fits_the_pool_with_its_answer_is_refused_with_the_remedy(route: Route) -> None:
    world = world_of(num_blocks=8)
    with pytest.raises(InvalidRequest, match=r"prompt has 30 tokens.*is 3.*holds 32.*--num-kv-blocks"):
        world.submit("a", range(30), 3, route=route)
    world.submit("a", range(30), 2, route=route)
    world.drain()


def test_a_prompt_for_a_peers_decode_needs_room_for_itself_only() -> None:
    world = world_of(num_blocks=8)
    world.submit("a", range(32), 1000, route=PREFILL_ONLY)
    world.drain()
    with pytest.raises(InvalidRequest, match="prompt has 33 tokens"):
        world.submit("b", range(33), 1, route=PREFILL_ONLY)


def test_an_answer_that_is_complete_already_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="max_new_tokens is 2, it must be more than the 2 tokens"):
        world_of().submit("a", [1], 2, forced_output=(4, 5))
    with pytest.raises(InvalidRequest, match="max_new_tokens is 0"):
        world_of().submit("a", [1], 0)


def test_an_id_in_use_is_refused_until_its_request_is_gone() -> None:
    world = world_of()
    world.submit("a", [1], 2)
    with pytest.raises(RequestIdInUse, match="'a'"):
        world.scheduler.submit(Submission(RequestId("a"), [2], 2))
    world.drain()
    world.scheduler.submit(Submission(RequestId("a"), [2], 2))


def test_a_refused_request_leaves_nothing_behind() -> None:
    world = world_of()
    with pytest.raises(InvalidRequest):
        world.submit("a", range(100))
    assert world.scheduler.is_idle
    world.submit("a", range(10))
    world.drain()


# ---------------------------------------------------------------- reservation


@pytest.mark.parametrize(
    ("route", "num_held"),
    [
        pytest.param(FUSED, 5, id="prompt and headroom"),
        pytest.param(DECODE_ONLY, 5, id="remote prefill: prompt and headroom"),
        pytest.param(PREFILL_ONLY, 3, id="remote decode: the whole prompt, no answer"),
    ],
)
def test_admission_reserves_the_prompt_and_headroom_where_the_answer_is_drawn(route: Route, num_held: int) -> None:
    world = world_of(answer_headroom=8)
    world.submit("a", range(10), 30, route=route)
    world.plan()
    assert world.scheduler.num_held_blocks == num_held


def test_headroom_is_no_more_than_the_answer_can_take() -> None:
    world = world_of(answer_headroom=1000)
    world.submit("a", range(10), 3)
    world.plan()
    assert world.scheduler.num_held_blocks == 4


def test_a_new_prompt_does_not_take_the_blocks_that_running_answers_need_next() -> None:
    world = world_of(num_blocks=4, answer_headroom=0)
    for name in ("a", "b"):
        world.submit(name, [ord(name)] * 4, 4)
    world.round()  # both prompts fill a block each; both answers need one more, two are left
    world.submit("c", [7, 7], 2)
    assert {row.request_id for row in world.round().rows} == {"a", "b"}
    world.drain()
    assert world.scheduler.counters.capacity_failures == 0


def test_a_full_pool_never_fails_the_queue_one_by_one() -> None:
    world = world_of(num_blocks=8, answer_headroom=0, max_batch_size=8)
    for index in range(3):
        world.submit(f"old{index}", [30 + index] * 4, 24)
    for index in range(12):
        world.submit(f"new{index}", [50 + index] * 3, 2)
    world.drain()
    assert [world.ended[RequestId(f"new{index}")] for index in range(12)] == ["finished"] * 12


# ---------------------------------------------------------------- the prefix cache


@pytest.mark.parametrize(("length", "num_cached"), [(7, 4), (8, 4), (9, 8), (4, 0), (5, 4)])
def test_a_hit_never_covers_the_last_prompt_token(length: int, num_cached: int) -> None:
    world = world_of()
    world.submit("warm", range(12))
    world.drain()
    world.submit("again", range(length))
    plan = world.plan()
    assert plan.starts[0].num_cached_tokens == plan.prefill[0].start == num_cached
    assert world.scheduler.counters.prefix_hit_tokens == num_cached
    world.drain()


def test_a_hit_covers_a_running_requests_full_blocks_and_outlives_it() -> None:
    world = world_of()
    world.submit("first", range(10), 8)
    world.rounds(2)
    world.submit("second", range(10), 8)
    plan = world.round()
    assert plan.starts[0].num_cached_tokens == 8
    world.abort("first")
    world.drain()


def test_answers_are_found_as_prefixes_of_the_next_turn() -> None:
    world = world_of()
    world.submit("turn1", range(6), 8)
    world.drain()
    world.submit("turn2", [*range(6), *world.answers[RequestId("turn1")], 5])
    assert world.plan().starts[0].num_cached_tokens == 12
    world.drain()


def test_nothing_is_published_before_its_round_is_done() -> None:
    world = world_of()
    world.submit("a", range(9))
    world.plan()
    assert world.scheduler._pool.longest_prefix(world.scheduler._residents.by_id[RequestId("a")].hashes) == []
    world.abort("a")
    world.run()
    assert world.scheduler.num_cached_blocks == 0, "a stopped request publishes nothing"


def test_two_equal_prompts_in_one_round_are_both_computed_and_both_right() -> None:
    world = world_of()
    world.submit("a", range(8))
    world.submit("b", range(8))
    assert [row.num_tokens for row in world.round().prefill] == [8, 8]
    world.drain()


def test_a_request_that_reads_no_prefix_cache_computes_every_prompt_token() -> None:
    world = world_of()
    for name in ("a", "b"):
        world.submit(name, range(10), reads_prefix_cache=False)
        plan = world.plan()
        assert (plan.prefill[0].start, plan.starts[0].num_cached_tokens) == (0, 0)
        world.drain()


def test_without_prefix_caching_nothing_is_kept() -> None:
    world = world_of(prefix_caching=False)
    for name in ("a", "b"):
        world.submit(name, range(10))
        assert world.plan().prefill[0].start == 0
        world.drain()
    assert world.scheduler.num_cached_blocks == 0


def test_cached_prefixes_give_way_to_requests() -> None:
    world = world_of(num_blocks=4)
    for index in range(6):
        world.submit(f"r{index}", range(index * 20, index * 20 + 12), 4)
        world.drain()
    assert world.scheduler.num_cached_blocks == 4 - 1


# ---------------------------------------------------------------- overtaking


def starved_world(num_small: int) -> World:
    """`runs` holds 20 of 25 blocks for long, `big` needs 6; small prompts of one block each stand behind it."""
    world = world_of(num_blocks=25, max_batch_size=3, max_scheduled_tokens=8, max_model_len=96, answer_headroom=96)
    world.submit("runs", [90], 79)
    world.round()
    world.submit("big", range(21), 3)
    for index in range(num_small):
        world.submit(f"small{index}", [index, 1], 1)
    return world


def test_a_prompt_that_lacks_blocks_is_overtaken_in_64_rounds_and_no_more() -> None:
    world = starved_world(200)
    overtaking = []
    while RequestId("runs") not in world.ended:
        plan = world.round()
        overtaking.append(sum(start.request_id.startswith("small") for start in plan.starts))
        assert len(overtaking) < 500
    assert sum(count > 0 for count in overtaking) == MAX_PASSED_OVER == 64
    assert [start.request_id for start in world.round().starts] == ["big"], "then its turn comes first"
    world.drain()


def test_a_starved_prompt_is_not_overtaken_even_by_those_who_need_no_tokens() -> None:
    world = starved_world(140)
    while world.scheduler._residents.by_id[RequestId("big")].num_passed_over < MAX_PASSED_OVER:
        world.round()
    world.submit("before", range(40, 53), 1, priority=-1)
    world.submit("peer", [1, 2, 3], 1, route=DECODE_ONLY)
    assert world.scheduler.num_waiting < MAX_MISSED, "the last of the queue is looked at"
    plan = world.round()
    assert [row.request_id for row in plan.prefill] == ["before"]
    assert not plan.prefill[0].samples, "its chunk fills the round, so that big cannot even be tried"
    assert not plan.reservations


def test_only_the_oldest_of_the_queue_are_looked_at() -> None:
    world = world_of(num_blocks=8, max_batch_size=2)
    world.submit("runs", range(13), 3)
    world.round()
    for index in range(MAX_MISSED):
        world.submit(f"big{index}", range(40, 60), 12)
    world.submit("small", [1], 1)
    assert not world.plan().starts
    assert world.scheduler.num_waiting == MAX_MISSED + 1
    world.abort("big3")
    world.run()
    assert [start.request_id for start in world.plan().starts] == ["small"]
    assert world.scheduler.num_waiting_tokens == 20 * (MAX_MISSED - 1)


def test_a_long_queue_is_served_to_its_end() -> None:
    world = world_of(num_blocks=6)
    for index in range(80):
        route = (FUSED, DECODE_ONLY)[index % 2]
        world.submit(f"r{index}", range(index, index + 3 + index % 9), 1 + index % 5, route=route)
    world.drain()
    assert set(world.ended.values()) == {"finished"}


def test_the_order_of_arrival_is_kept_within_equal_needs() -> None:
    world = world_of(max_batch_size=1)
    for index in range(5):
        world.submit(f"r{index}", [index], 1)
    assert [plan.starts[0].request_id for plan in world.rounds(5)] == [f"r{index}" for index in range(5)]
    assert world.scheduler.plan(PlanOptions()).starts == ()
