"""How retracted requests come back: one a round, by a copy, before anybody new, and nothing is computed twice."""

from __future__ import annotations

from random import Random
from typing import Any

from pdserve.request import DECODE_ONLY, PREFILL_ONLY, RequestId
from pdserve.scheduler.state import State
from tests.scheduler.world import World, state_of, world_of


def tracked(world: World, request_id: str) -> Any:
    return world.scheduler._residents.by_id[RequestId(request_id)]


def prompts_computed_once(world: World) -> bool:
    """Every prompt token of the answers that ended was computed once or found in a cache."""
    counters = world.scheduler.counters
    total = sum(len(submission.prompt) for submission in world.submissions.values())
    return counters.prompt_tokens_computed + counters.prefix_hit_tokens == total


def retracted_world(count: int = 1, **numbers: Any) -> World:
    """`count` answers are images; whoever took their place runs on for a while."""
    world = world_of(
        **{"num_blocks": 10, "answer_headroom": 30, "num_host_blocks": 48, "max_scheduled_tokens": 32, **numbers}
    )
    for index in range(count):
        world.submit(f"image{index}", [1 + index] * 3, (28 if count == 1 else 9))
    world.rounds(3)
    world.submit("runs", [7] * 31, 5)
    world.round()
    assert [state_of(world, f"image{index}") for index in range(count)] == [State.RETRACTED] * count
    return world


def test_an_image_that_lacks_blocks_keeps_every_new_request_out_and_moves_nobody() -> None:
    world = retracted_world()
    world.settle_tiers()
    assert world.scheduler._pool.num_available == 1
    world.submit("new", [5], 1)
    world.submit("for a peer", [6], 1, route=PREFILL_ONLY)
    world.submit("from a peer", [8], 1, route=DECODE_ONLY)
    plan = world.round()
    assert [row.request_id for row in plan.rows] == ["runs"]
    assert (plan.copies, plan.reservations) == ((), ())
    world.drain()


def test_an_image_that_has_not_landed_keeps_nobody_out() -> None:
    world = world_of(num_blocks=10, answer_headroom=30, num_host_blocks=24)
    world.is_prompt = False
    world.submit("image", [1] * 3, 28)
    world.rounds(3)
    world.submit("takes it", [7] * 9, 1)
    world.round()
    world.submit("new", [5], 1)
    assert [row.request_id for row in world.round().prefill] == ["new"]
    world.tell_copied()
    world.is_prompt = True
    world.drain()


def test_one_image_comes_back_in_a_round_before_new_prompts_and_takes_no_row() -> None:
    world = retracted_world(3)
    world.submit("new", [5], 1)
    world.abort("runs")
    plan = world.round()
    assert [copy.is_to_host for copy in plan.copies] == [False]
    assert state_of(world, "image0") is State.DECODING, "its copy is done before the forward"
    assert [row.request_id for row in plan.rows] == ["new"]
    assert [state_of(world, f"image{index}") for index in (1, 2)] == [State.RETRACTED] * 2
    world.drain()
    assert prompts_computed_once(world)


def test_an_image_needs_a_free_slot_and_does_not_keep_others_out_for_want_of_one() -> None:
    world = retracted_world(max_batch_size=2, num_blocks=12)
    world.submit("takes the slot", [5] * 2, 20, route=PREFILL_ONLY, priority=-1)
    world.drain()
    assert set(world.ended.values()) == {"finished", "sent off"}


def test_a_closed_gate_does_not_hold_an_image() -> None:
    world = retracted_world()
    world.abort("runs")
    assert [copy.is_to_host for copy in world.round(allow_prefill=False).copies] == [False]
    assert [row.request_id for row in world.round(allow_prefill=False).decode] == ["image0"]


def test_a_restored_answer_is_no_victim_before_it_has_drawn_a_token() -> None:
    """Else two that outgrow the pool together could swap places for ever."""
    num_retracted_again = 0
    for seed in range(40):
        random = Random(seed)
        world = world_of(num_blocks=random.choice([7, 8, 9]), max_batch_size=6, answer_headroom=0, num_host_blocks=24)
        restored_with: dict[str, int] = {}
        for number in range(60):
            if number % 3 == 0 and world.scheduler.num_waiting < 3:
                world.submit(f"r{number}", [number] * random.randint(1, 12), random.randint(4, 14))
            lengths = {i: len(answer) for i, answer in world.answers.items()}
            retracted = {r.request_id for r in world.scheduler._residents.retracted}
            world.round()
            world.settle_tiers()
            still = {r.request_id for r in world.scheduler._residents.retracted}
            for request_id in still - retracted:
                num_retracted_again += request_id in restored_with
                assert lengths[request_id] > restored_with.get(request_id, -1), f"seed {seed}"
            restored_with |= {request_id: lengths[request_id] for request_id in retracted - still}
        world.drain()
    assert num_retracted_again > 10


def test_a_prefix_that_is_still_on_the_device_is_shared_and_not_copied_back() -> None:
    world = world_of(num_blocks=14, answer_headroom=20, num_host_blocks=24)
    for name in ("a", "b"):
        world.submit(name, [7] * 9, 20)
        world.round()
    world.submit("new", [3] * 14, 1)
    world.round()
    (image,) = world.scheduler._residents.retracted
    num_blocks = len(image.image)
    while not (back := world.round().copies):
        pass
    assert len(back[0].device_blocks) == num_blocks - 2
    other = tracked(world, "b" if image.request_id == "a" else "a")
    assert image.blocks[:2] == other.blocks[:2]
    world.drain()


# ---------------------------------------------------------------- aborts


def test_aborts_of_images_on_their_way_out_and_back_leave_nothing_held() -> None:
    for moment in ("leaving", "landed", "coming back"):
        world = retracted_world()
        if moment == "leaving":
            world = world_of(num_blocks=10, answer_headroom=30, num_host_blocks=24)
            world.is_prompt = False
            world.submit("image0", [1] * 3, 28)
            world.rounds(3)
            world.submit("runs", [7] * 12, 5)
            world.round()
            assert tracked(world, "image0").job_id is not None
        if moment == "coming back":
            world.abort("runs")
            world.is_prompt = False
            world.round()
            assert state_of(world, "image0") is State.RESTORING
        world.abort("image0")
        world.check()
        assert state_of(world, "image0") is None, moment
        world.drain()


def test_a_late_acknowledgement_does_not_speak_for_a_new_request_of_the_same_id() -> None:
    world = world_of(num_blocks=10, answer_headroom=30, num_host_blocks=24)
    world.is_prompt = False
    world.submit("image", [1] * 3, 28)
    world.rounds(3)
    world.submit("takes it", [7] * 12, 5)
    world.round()
    assert state_of(world, "image") is State.RETRACTED
    world.abort("image")
    world.scheduler.submit(world.submissions[RequestId("image")])
    tracked(world, "image").job_id = 99
    world.tell_copied()
    assert tracked(world, "image").job_id == 99
