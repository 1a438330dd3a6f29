"""An abort in every state: the request ends at once, what it holds goes when nobody uses it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pdserve.request import DECODE_ONLY, PREFILL_ONLY, RequestId
from pdserve.scheduler.plan import LeaseUnwanted, RequestAborted, TransferUnwanted
from pdserve.scheduler.state import State
from tests.scheduler.world import World, kinds, state_of, world_of

A = RequestId("a")


def sending_world(length: int = 10, **submission: object) -> World:
    world = world_of()
    world.submit("a", range(length), 8, route=PREFILL_ONLY, **submission)
    while state_of(world) is not State.SENDING:
        world.round()
    return world


def abort_waiting(world: World) -> list[type]:
    world.submit("a", range(26))
    return kinds(world.abort("a"))


def abort_prefilling(world: World) -> list[type]:
    world.submit("a", range(26))
    world.round()
    return kinds(world.abort("a"))


def abort_decoding(world: World) -> list[type]:
    world.submit("a", range(6), 9)
    world.rounds(2)
    return kinds(world.abort("a"))


@pytest.mark.parametrize("abort", [abort_waiting, abort_prefilling, abort_decoding])
def test_an_abort_between_rounds_frees_everything_at_once(abort: Callable[[World], list[type]]) -> None:
    world = world_of()
    assert abort(world) == [RequestAborted]
    assert world.scheduler.is_idle
    assert world.scheduler.num_held_blocks == 0
    world.check()


@pytest.mark.parametrize("num_rounds", [0, 1, 2, 3])
def test_an_abort_during_a_round_holds_its_blocks_and_its_slot_until_the_round_is_done(num_rounds: int) -> None:
    world = world_of(max_batch_size=1)
    world.submit("a", range(26), 9)
    world.rounds(num_rounds)
    world.plan()
    num_held = world.scheduler.num_held_blocks
    assert kinds(world.abort("a")) == [RequestAborted]
    assert world.abort("a") == ()
    assert (state_of(world), world.scheduler.num_held_blocks) == (State.STOPPING, num_held)
    assert world.run() == ()
    assert world.scheduler.is_idle
    assert world.scheduler.num_held_blocks == 0


def test_an_aborted_receiver_is_gone_at_once_and_its_destination_stays() -> None:
    world = world_of(max_batch_size=1)
    world.submit("a", range(10), route=DECODE_ONLY)
    world.plan()
    transfer_id = world.transfer_of("a")
    assert kinds(world.abort("a")) == [RequestAborted, TransferUnwanted]
    assert state_of(world) is None
    assert world.scheduler.num_held_blocks == world.scheduler.num_draining_blocks == 3
    assert not world.scheduler.is_idle
    world.submit("b", range(20, 40), 8)
    world.rounds(2)
    world.write_late(transfer_id)
    world.quiet(transfer_id)
    world.drain()


def test_kv_that_comes_after_the_abort_is_quiet_and_unwanted() -> None:
    world = world_of()
    world.submit("a", range(10), route=DECODE_ONLY)
    world.plan()
    transfer_id = world.transfer_of("a")
    world.abort("a")
    assert world.receive(transfer_id) == ()
    assert world.scheduler.is_idle
    assert world.scheduler.num_cached_blocks == 0, "nobody vouches for it"


def test_an_aborted_sender_is_revoked_before_its_blocks_are_free() -> None:
    world = sending_world()
    assert kinds(world.abort("a")) == [RequestAborted, LeaseUnwanted]
    assert (state_of(world), world.scheduler.num_held_blocks) == (State.STOPPING, 3)
    world.revoke(A)
    assert world.scheduler.is_idle


def test_a_release_may_overtake_the_revocation_of_an_aborted_sender() -> None:
    world = sending_world()
    world.abort("a")
    world.release(A)
    assert world.scheduler.is_idle


@pytest.mark.parametrize("is_round_first", [True, False])
def test_an_abort_while_prefilling_for_a_peer_waits_for_the_round_and_the_lease(is_round_first: bool) -> None:
    world = world_of()
    world.submit("a", range(26), route=PREFILL_ONLY)
    world.plan()
    assert kinds(world.abort("a")) == [RequestAborted, LeaseUnwanted]
    ends: list[Callable[[], object]] = [world.run, lambda: world.revoke(A)]
    for end in ends if is_round_first else reversed(ends):
        assert world.scheduler.num_held_blocks == 7
        assert end() == ()
    assert world.scheduler.is_idle


def test_aborting_who_is_unknown_or_gone_does_nothing() -> None:
    world = world_of()
    assert world.abort("nobody") == ()
    world.submit("a", [1], 1)
    world.drain()
    assert world.abort("a") == ()
