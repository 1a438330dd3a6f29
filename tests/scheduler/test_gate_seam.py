"""What a closed gate holds, what it leaves alone, and what a rank says of itself."""

from __future__ import annotations

import pytest

from pdserve.engine.gating import Gating
from pdserve.request import DECODE_ONLY, FUSED, PREFILL_ONLY, RequestId, Route
from pdserve.scheduler.gate import PrefillGate
from pdserve.scheduler.plan import PrefillProbe, RoundPlan
from tests.scheduler.world import World, world_of

SHAPES = pytest.mark.parametrize("enable_mixed_batch", [False, True])


def wants(world: World) -> bool:
    return world.scheduler.probe_prefill_gate().wants_prefill


# ---------------------------------------------------------------- a closed gate


@SHAPES
def test_closed_holds_new_prompts_and_resident_chunks_and_decodes_on(enable_mixed_batch: bool) -> None:
    world = world_of(enable_mixed_batch=enable_mixed_batch)
    world.submit("decodes", [1], 20)
    world.round()
    world.submit("resident", range(20))
    while "resident" not in {start.request_id for start in world.round().starts}:
        pass
    world.submit("new", [2])
    for _ in range(3):
        plan = world.round(allow_prefill=False)
        assert [row.request_id for row in plan.rows] == ["decodes"]
    plan = world.round()
    assert {"resident", "new"} & {row.request_id for row in plan.prefill}
    world.drain()


@SHAPES
@pytest.mark.parametrize("route", [PREFILL_ONLY, DECODE_ONLY])
def test_a_request_with_a_remote_side_plans_the_same_whatever_the_gate_says(
    enable_mixed_batch: bool, route: Route
) -> None:
    def plans_of(allow_prefill: bool) -> list[RoundPlan]:
        world = world_of(enable_mixed_batch=enable_mixed_batch)
        for index in range(6):
            world.submit(f"r{index}", range(index, index + 9), route=route)
        plans = []
        while not world.scheduler.is_idle:
            plans.append(world.round(allow_prefill))
            world.settle()
        return plans

    assert plans_of(True) == plans_of(False)


def test_closed_holds_a_prompt_that_comes_back_from_its_peer() -> None:
    world = world_of()
    world.submit("a", range(9), route=DECODE_ONLY)
    world.plan(allow_prefill=False)
    world.fail(world.transfer_of("a"))
    assert not world.round(allow_prefill=False).rows
    assert world.round().rows
    world.drain()


def test_closed_neither_fails_nor_starves_anybody() -> None:
    world = world_of(num_blocks=4)
    world.submit("runs", range(12), 3)
    world.round()
    world.submit("held", range(30, 40), 2)
    world.submit("behind", [1], 1)
    for _ in range(5):
        plan = world.plan(allow_prefill=False)
        assert not plan.failed
        if plan.batch_size:
            world.run()
    assert [request.num_passed_over for request in world.scheduler._residents.waiting_requests()] == [0, 0]
    world.drain()


def test_aborts_and_ends_work_while_closed() -> None:
    world = world_of()
    world.submit("resident", range(20))
    world.round()
    world.submit("new", [2])
    world.abort("resident")
    world.abort("new")
    assert world.scheduler.is_idle
    world.check()


def test_everything_ends_where_the_gate_opens_one_round_in_four() -> None:
    world = world_of()
    for index in range(8):
        world.submit(f"r{index}", range(index, index + 20), 6)
    pattern = iter([False, False, False, True] * 200)
    world.drain(pattern)


def test_closed_a_mixed_round_gives_decodes_the_whole_budget() -> None:
    """Open, four tokens are kept for the prompt that waits."""
    world = world_of(enable_mixed_batch=True, max_batch_size=8, max_scheduled_tokens=8, num_blocks=64)
    for index in range(7):
        world.submit(f"r{index}", [index], 30)
    world.rounds(3)
    world.submit("waits", [9] * 9, 2)
    assert [len(world.round(allow_prefill=allow).decode) for allow in (False, True)] == [7, 4]


def test_events_of_peers_and_tiers_count_while_closed() -> None:
    world = world_of(num_host_blocks=16, num_blocks=10, answer_headroom=30)
    world.submit("image", [1] * 3, 28)
    world.rounds(3)
    world.submit("takes it", [2] * 12, 2)
    world.submit("from a peer", [3] * 3, 2, route=DECODE_ONLY, priority=1)
    while world.live:
        world.round(allow_prefill=world.scheduler.counters.retractions == 0)
        world.settle()
    assert set(world.ended.values()) == {"finished"}


# ---------------------------------------------------------------- the probe


def test_an_idle_rank_wants_nothing() -> None:
    assert world_of().scheduler.probe_prefill_gate() == PrefillProbe(
        wants_prefill=False, has_decode_work=False, vote=False
    )


@pytest.mark.parametrize(("route", "vote"), [(FUSED, True), (PREFILL_ONLY, False), (DECODE_ONLY, False)])
def test_only_a_prompt_the_gate_could_hold_is_wanted(route: Route, vote: bool) -> None:
    world = world_of()
    world.submit("a", range(20), route=route)
    assert wants(world) is vote
    world.plan()
    assert wants(world) is vote, "with chunks left it is a resident chunk"


def test_the_probe_does_not_look_at_slots() -> None:
    world = world_of(max_batch_size=1)
    world.submit("a", [1], 9)
    world.round()
    world.submit("b", [2], 9)
    assert wants(world)


def test_a_prompt_whose_last_chunk_is_planned_is_decode_work_and_waits_no_more() -> None:
    world = world_of()
    world.submit("a", range(20))
    assert world.scheduler.probe_prefill_gate() == PrefillProbe(wants_prefill=True, has_decode_work=False, vote=True)
    world.plan()
    assert world.scheduler.probe_prefill_gate() == PrefillProbe(wants_prefill=True, has_decode_work=False, vote=True)
    world.run()
    world.plan()
    assert world.scheduler.probe_prefill_gate() == PrefillProbe(wants_prefill=False, has_decode_work=True, vote=False)
    world.run()
    assert world.scheduler.probe_prefill_gate() == PrefillProbe(wants_prefill=False, has_decode_work=True, vote=False)
    world.plan()
    world.abort("a")
    assert world.scheduler.probe_prefill_gate() == PrefillProbe(wants_prefill=False, has_decode_work=False, vote=False)


def test_a_request_stopped_in_its_last_chunk_is_neither_wanted_nor_decode_work() -> None:
    world = world_of()
    world.submit("a", range(4))
    world.plan()
    world.abort("a")
    assert world.scheduler.probe_prefill_gate() == PrefillProbe(wants_prefill=False, has_decode_work=False, vote=False)


def test_a_prompt_prefilled_for_a_peer_is_no_decode_work() -> None:
    world = world_of()
    world.submit("a", range(4), route=PREFILL_ONLY)
    world.plan()
    assert world.scheduler.probe_prefill_gate() == PrefillProbe(wants_prefill=False, has_decode_work=False, vote=False)


def test_the_probe_changes_nothing() -> None:
    probed, untouched = world_of(), world_of()
    for world in (probed, untouched):
        world.submit("a", range(20))
        world.submit("b", range(9))
    for _ in range(8):
        probed.scheduler.probe_prefill_gate()
        assert probed.round() == untouched.round()


# ---------------------------------------------------------------- the watermark


def held_world(num_held: int, watermark: int | None = 9) -> World:
    """`num_held` of 20 blocks are held by a decode."""
    world = world_of(num_blocks=20, max_model_len=200, prefill_watermark=watermark, answer_headroom=100)
    world.submit("holds", [1], num_held * 4 - 1)
    world.round()
    assert world.scheduler.num_held_blocks == num_held
    return world


@pytest.mark.parametrize(("num_held", "vote"), [(17, True), (18, True), (19, False)])
def test_a_new_prompt_is_wanted_and_admitted_up_to_the_watermark(num_held: int, vote: bool) -> None:
    world = held_world(num_held)
    world.submit("new", [2], 1)
    assert wants(world) is vote
    assert bool(world.round().starts) is vote


def test_without_a_watermark_occupancy_is_not_looked_at() -> None:
    world = held_world(19, watermark=None)
    world.submit("new", [2], 1)
    assert wants(world)
    assert world.round().starts


def test_cached_blocks_do_not_count_as_occupied() -> None:
    world = held_world(20)
    world.drain()
    assert world.scheduler.num_cached_blocks == 19
    world.submit("new", [2], 1)
    assert wants(world)


def test_above_the_watermark_a_resident_chunk_goes_on_and_no_new_prompt_starts() -> None:
    world = world_of(num_blocks=10, prefill_watermark=5)
    world.submit("resident", range(18), 6)
    world.submit("new", [2], 1)
    assert [start.request_id for start in world.round().starts] == ["resident"]
    assert wants(world), "the resident chunk is wanted at any occupancy"
    plan = world.round()
    assert [row.request_id for row in plan.prefill] == ["resident"], "though slots, tokens and blocks are left"
    assert not wants(world)
    world.drain()


def test_the_watermark_is_looked_at_again_for_each_prompt_of_a_round() -> None:
    world = world_of(num_blocks=10, prefill_watermark=5)
    for index in range(4):
        world.submit(f"r{index}", [index] * 3, 8)
    assert [start.request_id for start in world.round().starts] == ["r0", "r1", "r2"]
    world.submit("peers", [9], 1, route=PREFILL_ONLY)
    assert [start.request_id for start in world.round().starts] == ["peers"], "a peer's prompt is not held"
    assert world.ended[RequestId("peers")] == "sent off"
    world.drain()


# ---------------------------------------------------------------- permission


def test_permission_is_used_only_with_a_wish_as_it_is_now() -> None:
    """The group's vote is a round old: its prompt may have left, or another may have come."""
    world = world_of()
    gating = Gating(world.scheduler, PrefillGate(1, 4))
    world.submit("voted", [1], 2)
    gating.observe([gating.row(world.plan(allow_prefill=False))])
    world.abort("voted")
    assert not gating.options().allow_prefill
    gating.observe([gating.row(world.plan(allow_prefill=False))])
    world.submit("came since", [2], 2)
    assert gating.options().allow_prefill
