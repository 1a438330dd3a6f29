"""How answers grow and end, and what happens when no block is left for them."""

from __future__ import annotations

import pytest

from pdserve.errors import InternalError, NotReady
from pdserve.request import DECODE_ONLY, FUSED, PREFILL_ONLY, FinishReason, RequestId
from pdserve.scheduler.plan import RequestFailed, StepDone, Submission, TokenDrawn
from pdserve.scheduler.scheduler import Scheduler
from tests.scheduler.world import World, build, world_of


def drawn_with(tokens: list[int], **submission: object) -> list[TokenDrawn]:
    """What a lone request draws if the model says `tokens`."""
    scheduler = build()
    scheduler.submit(Submission(RequestId("a"), [1, 2], **submission))  # type: ignore[arg-type]
    outcomes = []
    for token in tokens:
        plan = scheduler.plan()
        if not plan.batch_size:
            break
        outcomes += [o for o in scheduler.advance([StepDone(plan.round_id, [token])]) if isinstance(o, TokenDrawn)]
    scheduler.check_integrity()
    return outcomes


def test_an_answer_ends_by_length_with_its_last_token() -> None:
    outcomes = drawn_with([5, 6, 7, 8], max_new_tokens=3)
    assert [(o.token, o.finish) for o in outcomes] == [(5, None), (6, None), (7, FinishReason.LENGTH)]


def test_an_answer_of_one_token_ends_with_its_prefill() -> None:
    assert [o.finish for o in drawn_with([5, 6], max_new_tokens=1)] == [FinishReason.LENGTH]


def test_an_answer_ends_at_a_stop_token_and_says_which() -> None:
    outcomes = drawn_with([5, 9, 7], max_new_tokens=8, stop_token_ids=frozenset({8, 9}))
    assert [(o.token, o.finish, o.matched_stop_token) for o in outcomes] == [(5, None, None), (9, FinishReason.STOP, 9)]


def test_a_stop_token_counts_once_min_new_tokens_are_out() -> None:
    outcomes = drawn_with([9, 9, 9, 9], max_new_tokens=8, min_new_tokens=2, stop_token_ids=frozenset({9}))
    assert [o.finish for o in outcomes] == [None, None, FinishReason.STOP]


def test_a_stop_token_at_the_last_place_is_a_stop() -> None:
    outcomes = drawn_with([5, 9], max_new_tokens=2, stop_token_ids=frozenset({9}))
    assert outcomes[-1].finish is FinishReason.STOP


def test_forced_output_is_prefilled_and_counts_as_answer() -> None:
    world = world_of()
    probe = World(build())
    probe.submit("a", range(6), 5)
    probe.drain()
    right = probe.answers[RequestId("a")]
    world.submit("a", range(6), 5, forced_output=tuple(right[:3]))
    plan = world.plan()
    assert plan.starts[0].forced_output == tuple(right[:3])
    assert (plan.prefill[0].start, plan.prefill[0].end) == (0, 9)
    world.drain()
    assert world.answers[RequestId("a")] == right


def test_rows_tell_the_whole_table_first_and_then_only_what_it_grew_by() -> None:
    world = world_of(answer_headroom=0)
    world.submit("a", range(6), 8)
    told = [plan.rows[0].new_blocks for plan in world.rounds(8)]
    assert [len(blocks) for blocks in told] == [2, 0, 0, 1, 0, 0, 0, 1]
    assert len({block for blocks in told for block in blocks}) == 4


def test_samples_point_into_the_rounds_tokens() -> None:
    world = world_of(enable_mixed_batch=True)
    world.submit("a", [1], 8)
    world.round()
    world.submit("b", [2, 3], 8)
    world.submit("c", range(40, 60), 8)
    plan = world.plan()
    assert [row.request_id for row in plan.rows] == ["b", "c", "a"]
    outcomes = [o for o in world.run() if isinstance(o, TokenDrawn)]
    assert [(o.request_id, o.sample) for o in outcomes] == [("b", 0), ("a", 1)]


def test_a_step_done_of_another_round_is_our_fault() -> None:
    world = world_of()
    world.submit("a", [1], 8)
    with pytest.raises(InternalError, match="names round 7, outstanding is None"):
        world.advance(StepDone(7, [5]))
    plan = world.plan()
    with pytest.raises(InternalError, match=rf"names round {plan.round_id + 1}, outstanding is {plan.round_id}"):
        world.advance(StepDone(plan.round_id + 1, [5]))
    with pytest.raises(InternalError, match="brings 2 tokens, round 1 draws 1"):
        world.advance(StepDone(plan.round_id, [5, 6]))
    world.run()
    world.drain()


# ---------------------------------------------------------------- out of blocks


def full_world(**numbers: object) -> World:
    """Three answers that will outgrow a pool of six blocks."""
    world = world_of(**{"num_blocks": 6, "answer_headroom": 0, **numbers})
    for index in range(3):
        world.submit(f"r{index}", [20 + index] * 5, 15)
    return world


@pytest.mark.parametrize("enable_mixed_batch", [False, True])
def test_a_full_pool_fails_the_newest_answer_and_names_the_knob(enable_mixed_batch: bool) -> None:
    world = full_world(enable_mixed_batch=enable_mixed_batch)
    failed: list[RequestFailed] = []
    while not failed:
        failed += world.round().failed
    assert [failure.request_id for failure in failed] == ["r2"]
    assert isinstance(failed[0].error, NotReady)
    for word in ("6", "--num-kv-blocks", "--max-num-seqs"):
        assert word in failed[0].error.message
    world.drain()
    assert world.ended == {"r0": "finished", "r1": "failed", "r2": "failed"}
    assert world.scheduler.counters.capacity_failures == 2


def test_nobody_fails_while_others_still_decode() -> None:
    world = full_world()
    world.submit("short", [3] * 5, 1)
    while not (plan := world.round()).failed:
        assert plan.batch_size > 0
    assert not plan.batch_size


def test_an_answer_waits_for_blocks_while_others_have_room_and_goes_on_when_they_end() -> None:
    world = world_of(num_blocks=4, answer_headroom=0)
    world.submit("short", [1] * 5, 4)
    world.submit("long", [2] * 8, 8)
    world.round()
    assert [row.request_id for plan in world.rounds(3) for row in plan.decode] == ["short"] * 3
    world.drain()
    assert set(world.ended.values()) == {"finished"}
    assert world.scheduler.counters.capacity_failures == 0


@pytest.mark.parametrize("route", [DECODE_ONLY, PREFILL_ONLY])
def test_nobody_fails_while_a_transfer_or_a_lease_will_free_blocks(route: object) -> None:
    world = world_of(num_blocks=8, answer_headroom=0)
    world.submit("wire", range(40, 50), 4, route=route)
    world.submit("a", [1] * 8, 10)
    world.submit("b", [2] * 8, 10)
    world.round()
    if route is DECODE_ONLY:
        world.abort("wire")
    while world.round().batch_size:
        pass
    assert not world.plan().failed
    assert world.scheduler.counters.capacity_failures == 0
    world.settle()
    assert world.plan().batch_size > 0
    world.drain()


def test_output_and_prompt_tokens_are_counted() -> None:
    scheduler: Scheduler = build()
    world = World(scheduler)
    world.submit("a", range(10), 4, route=FUSED)
    world.drain()
    counters = scheduler.counters
    assert (counters.prompt_tokens_computed, counters.output_tokens) == (10, 4)
    assert (counters.rounds, counters.prefill_rounds) == (4, 1)
    assert (counters.prefix_queried_tokens, counters.prefix_hit_tokens) == (10, 0)
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 0)
