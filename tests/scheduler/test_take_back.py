"""Reservations that make room for answers under way."""

from __future__ import annotations

from pdserve.request import DECODE_ONLY
from pdserve.scheduler.state import State
from tests.scheduler.world import World, state_of, world_of


def crowded_world() -> World:
    """Three blocks: an answer that is about to need its second, and a reservation that holds the other two."""
    world = world_of(num_blocks=3, max_batch_size=4, answer_headroom=0)
    world.submit("x", [9] * 3, 9)
    world.round()
    world.submit("a", range(6), 1, route=DECODE_ONLY)
    world.round()
    assert state_of(world) is State.RECEIVING
    return world


def test_a_reservation_nobody_accepted_makes_room_for_answers() -> None:
    world = crowded_world()
    transfer_id = world.transfer_of("a")
    (taken,) = world.plan().taken_back
    assert (taken.request_id, taken.transfer_id) == ("a", transfer_id)
    assert state_of(world) is State.WAITING
    assert not world.plan().batch_size, "its blocks may still be written"
    world.quiet(transfer_id)
    assert [row.request_id for row in world.plan().decode] == ["x"]
    world.run()
    world.drain()
    assert (world.ended["x"], world.ended["a"]) == ("finished", "finished")


def test_a_reservation_that_was_taken_back_is_sent_to_a_peer_again() -> None:
    world = crowded_world()
    first = world.transfer_of("a")
    world.plan()
    world.quiet(first)
    while not world.pulls:
        world.round()
    assert world.transfer_of("a") != first
    world.drain()
    assert world.ended["a"] == "finished"
    assert world.scheduler.counters.reroutes == 0


def test_an_accepted_reservation_keeps_its_blocks() -> None:
    world = crowded_world()
    transfer_id = world.transfer_of("a")
    world.accept(transfer_id)
    plan = world.plan()
    assert (plan.taken_back, plan.failed, plan.batch_size) == ((), (), 0)
    world.receive(transfer_id)
    world.drain()
    assert (world.ended["x"], world.ended["a"]) == ("finished", "finished")


def test_one_reservation_is_taken_back_at_a_time() -> None:
    world = world_of(num_blocks=3, max_batch_size=4, answer_headroom=0)
    world.submit("x", [9] * 3, 9)
    world.round()
    for name in ("a", "b"):
        world.submit(name, [ord(name)] * 3, 1, route=DECODE_ONLY)
    world.round()
    assert [taken.request_id for taken in world.plan().taken_back] == ["b"]
    assert world.plan().taken_back == ()
    world.drain()
