"""How a round's tokens are shared out: chunks, the head of line, and the two shapes of a fused round."""

from __future__ import annotations

import pytest

from pdserve.errors import StartupError
from pdserve.request import DECODE_ONLY, FUSED, PREFILL_ONLY
from pdserve.scheduler.plan import PlanOptions, RoundPlan, StepDone
from pdserve.scheduler.scheduler import Scheduler
from tests.scheduler.world import World, build, world_of

K = 1024


def shares(plan: RoundPlan) -> dict[str, tuple[int, int]]:
    """Who computes which tokens."""
    return {row.request_id: (row.start, row.end) for row in plan.rows}


def decoding_world(count: int, **numbers: object) -> World:
    """`count` requests d0, d1, ... that have their first token and decode for long."""
    world = world_of(num_blocks=256, max_model_len=256, **numbers)
    for index in range(count):
        world.submit(f"d{index}", [20 + index], max_new_tokens=200)
    while any(len(world.answers[request_id]) < 1 for request_id in world.live):
        world.round()
    return world


# ---------------------------------------------------------------- chunks


def test_a_budget_of_6k_takes_2k_and_1k_and_the_first_3k_of_10k() -> None:
    world = world_of(num_blocks=1024, block_size=64, max_scheduled_tokens=6 * K, max_model_len=16 * K)
    for name, length in (("a", 2 * K), ("b", K), ("c", 10 * K), ("d", 64)):
        world.submit(name, range(length), reads_prefix_cache=False)
    assert shares(world.round()) == {"a": (0, 2 * K), "b": (0, K), "c": (0, 3 * K)}
    assert shares(world.round()) == {"c": (3 * K, 9 * K)}
    assert shares(world.round()) == {"c": (9 * K, 10 * K), "d": (0, 64)}


def test_a_chunk_that_does_not_end_its_prompt_ends_on_a_block_boundary() -> None:
    world = world_of(max_scheduled_tokens=15)
    world.submit("a", range(5))
    world.submit("b", range(20, 45))
    assert shares(world.round()) == {"a": (0, 5), "b": (0, 8)}
    assert shares(world.round()) == {"b": (8, 20)}
    assert shares(world.round()) == {"b": (20, 25)}


def test_a_prompt_that_fits_the_budget_exactly_is_not_truncated() -> None:
    world = world_of()
    world.submit("a", range(16))
    plan = world.round()
    assert shares(plan) == {"a": (0, 16)}
    assert plan.prefill[0].samples


def test_what_is_left_of_a_round_but_less_than_a_block_is_left_unused() -> None:
    world = world_of(max_scheduled_tokens=15)
    world.submit("a", range(12))
    world.submit("long", range(20, 30))
    world.submit("short", range(40, 42))
    assert shares(world.round()) == {"a": (0, 12)}, "the short prompt must not overtake the long one"
    assert shares(world.round()) == {"long": (0, 10), "short": (0, 2)}


def test_a_truncated_prompt_is_the_last_though_a_shorter_one_would_fit_beside_it() -> None:
    world = world_of(max_scheduled_tokens=15)
    world.submit("long", range(25))
    world.submit("short", [40, 41])
    assert shares(world.round()) == {"long": (0, 12)}
    assert shares(world.round()) == {"long": (12, 25), "short": (0, 2)}


def test_an_incomplete_prefill_keeps_the_head_of_line() -> None:
    world = world_of(num_blocks=64, max_model_len=128)
    world.submit("long", range(60))
    world.submit("short", [90, 91])
    plans = world.rounds(4)
    assert [shares(plan) for plan in plans[:3]] == [{"long": (0, 16)}, {"long": (16, 32)}, {"long": (32, 48)}]
    assert shares(plans[3]) == {"long": (48, 60), "short": (0, 2)}


def test_resident_chunks_go_before_new_prompts_of_a_smaller_priority_number() -> None:
    world = world_of(num_blocks=64, max_model_len=128)
    world.submit("resident", range(40), priority=5)
    world.round()
    world.submit("urgent", range(50, 70), priority=0)
    assert shares(world.round()) == {"resident": (16, 32)}
    assert shares(world.round()) == {"resident": (32, 40), "urgent": (0, 8)}


def test_candidates_go_by_priority_then_by_submission() -> None:
    world = world_of(max_batch_size=1)
    for name, priority in (("late", 2), ("second", 1), ("third", 1), ("first", 0)):
        world.submit(name, [ord(name[0]), 1, 2], max_new_tokens=1, priority=priority)
    assert [next(iter(shares(plan))) for plan in world.rounds(4)] == ["first", "second", "third", "late"]


def test_a_full_plan_or_a_missing_slot_defers_a_new_prompt_silently() -> None:
    world = world_of(max_batch_size=3)
    for index in range(5):
        world.submit(f"r{index}", range(index * 8, index * 8 + 8), max_new_tokens=4)
    plans = world.rounds(3)
    assert shares(plans[0]).keys() == {"r0", "r1"}, "the plan is full"
    assert shares(plans[1]).keys() == {"r2"}, "no slot is free"
    assert not any(plan.failed for plan in plans)
    assert [request.num_passed_over for request in world.scheduler._residents.by_id.values()] == [0] * 5


def test_a_round_has_no_more_rows_than_slots() -> None:
    world = world_of(max_batch_size=2)
    for index in range(5):
        world.submit(f"r{index}", [30 + index], max_new_tokens=2)
    assert shares(world.round()).keys() == {"r0", "r1"}
    assert shares(world.round()).keys() == {"r0", "r1"}
    assert shares(world.round()).keys() == {"r2", "r3"}


# ---------------------------------------------------------------- prefill rounds alone


def test_alone_a_round_with_prefill_has_no_decode() -> None:
    world = decoding_world(2)
    world.submit("new", range(20))
    assert shares(world.round()) == {"new": (0, 16)}
    assert shares(world.round()) == {"new": (16, 20)}
    assert {row.request_id for row in world.round().decode} == {"d0", "d1", "new"}


def test_alone_a_prompt_that_cannot_start_leaves_the_round_to_decodes() -> None:
    world = decoding_world(4)
    world.submit("new", range(8))
    assert len(world.round().decode) == 4


# ---------------------------------------------------------------- mixed rounds


def test_mixed_decodes_go_first_and_prefill_fills_what_is_left() -> None:
    world = decoding_world(3, enable_mixed_batch=True, max_batch_size=8)
    world.submit("new", range(40))
    plan = world.round()
    assert len(plan.decode) == 3
    assert shares(plan)["new"] == (0, 12)
    assert plan.rows[0].request_id == "new", "prefill rows come first in the forward"


def test_mixed_decodes_leave_a_block_while_a_prompt_waits_for_tokens() -> None:
    world = decoding_world(16, enable_mixed_batch=True, max_batch_size=17, max_scheduled_tokens=17)
    world.submit("new", range(10))
    plan = world.round()
    assert (len(plan.decode), shares(plan)["new"]) == (13, (0, 4))
    plan = world.round()
    assert (len(plan.decode), shares(plan)["new"]) == (13, (4, 8)), "a resident chunk keeps the reserve"


def test_mixed_the_reserve_is_a_setting() -> None:
    world = decoding_world(
        16, enable_mixed_batch=True, max_batch_size=17, max_scheduled_tokens=17, min_prefill_chunk_tokens=8
    )
    world.submit("new", range(10))
    plan = world.round()
    assert (len(plan.decode), shares(plan)["new"]) == (9, (0, 8))


@pytest.mark.parametrize("what", ["nothing", "no slot", "gate", "peer"])
def test_mixed_nothing_is_reserved_where_no_prefill_could_use_it(what: str) -> None:
    num_slots = 8 if what == "no slot" else 10
    world = decoding_world(
        8, enable_mixed_batch=True, max_batch_size=num_slots, max_scheduled_tokens=10, max_outstanding_transfers=1
    )
    if what == "peer":
        world.submit("reserved", range(50, 60), route=DECODE_ONLY)
        world.round()
        world.submit("new", range(10), route=DECODE_ONLY)
    elif what != "nothing":
        world.submit("new", range(10))
    plan = world.plan(allow_prefill=what != "gate")
    assert (len(plan.decode), plan.prefill) == (8, ())


def test_mixed_a_closed_gate_gives_decode_the_whole_budget() -> None:
    world = decoding_world(16, enable_mixed_batch=True, max_batch_size=17, max_scheduled_tokens=17)
    world.submit("new", range(10))
    world.round()
    plan = world.round(allow_prefill=False)
    assert (len(plan.decode), plan.prefill) == (16, ())
    assert shares(world.round())["new"] == (4, 8)


def test_mixed_a_peers_prompt_reserves_too() -> None:
    world = decoding_world(16, enable_mixed_batch=True, max_batch_size=17, max_scheduled_tokens=17)
    world.submit("new", range(10), route=PREFILL_ONLY)
    plan = world.plan(allow_prefill=False)
    assert (len(plan.decode), shares(plan)["new"]) == (13, (0, 4))


# ---------------------------------------------------------------- numbers


@pytest.mark.parametrize(
    ("numbers", "names"),
    [
        ({"num_blocks": 0}, "num_blocks is 0"),
        ({"block_size": 0}, "block_size is 0"),
        ({"max_batch_size": 0}, "max_batch_size is 0"),
        ({"max_model_len": 0}, "max_model_len is 0"),
        ({"answer_headroom": -1}, "answer_headroom is -1"),
        ({"max_outstanding_transfers": 0}, "max_outstanding_transfers is 0"),
        ({"min_prefill_chunk_tokens": 3}, "min_prefill_chunk_tokens is 3"),
        ({"max_scheduled_tokens": 3, "max_batch_size": 2}, "--chunked-prefill-size 3 is below --block-size 4"),
        ({"max_scheduled_tokens": 4, "max_batch_size": 5}, "--chunked-prefill-size 4 is below --max-num-seqs 5"),
        ({"max_scheduled_tokens": 4, "enable_mixed_batch": True}, "--chunked-prefill-size 4 leaves no token"),
    ],
)
def test_numbers_that_cannot_work_are_refused_by_name_and_value(numbers: dict[str, int], names: str) -> None:
    with pytest.raises(StartupError, match=names):
        build(**numbers)


def test_the_same_submissions_and_events_give_the_same_plans() -> None:
    def plans_of(scheduler: Scheduler) -> list[RoundPlan]:
        world = World(scheduler)
        for index in range(12):
            world.submit(f"r{index}", range(index, index * 2 + 3), route=(FUSED, DECODE_ONLY, PREFILL_ONLY)[index % 3])
        plans = []
        while not scheduler.is_idle:
            plans.append(world.round())
            world.settle()
        return plans

    assert plans_of(build()) == plans_of(build())


def test_an_empty_plan_needs_no_step_done() -> None:
    scheduler = build()
    assert scheduler.plan().batch_size == 0
    assert scheduler.plan(PlanOptions()).batch_size == 0
    assert scheduler.has_work is False


def test_planning_twice_without_a_step_done_is_our_fault() -> None:
    world = world_of()
    world.submit("a", [1])
    plan = world.plan()
    with pytest.raises(AssertionError):
        world.scheduler.plan()
    world.scheduler.advance([StepDone(plan.round_id, [5])])
    assert world.scheduler.has_work
