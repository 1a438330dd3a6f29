"""Events that do not fit: unknown, late, twice, or for another state. Counted and ignored."""

from __future__ import annotations

import pytest

from pdserve.request import DECODE_ONLY, PREFILL_ONLY, RequestId, TransferId
from pdserve.scheduler.plan import (
    Event,
    KvQuiet,
    KvReceived,
    LeaseReleased,
    LeaseRevoked,
    TransferFailed,
)
from pdserve.scheduler.state import State
from tests.scheduler.world import state_of, world_of

A = RequestId("a")


LATE: list[Event] = [
    KvReceived(TransferId(1), 5),
    TransferFailed(TransferId(1), (5,)),
    TransferFailed(TransferId(1), stays_remote=True),
    KvQuiet(TransferId(1)),
    LeaseReleased(A),
    LeaseRevoked(A),
]


@pytest.mark.parametrize("event", LATE, ids=lambda event: type(event).__name__)
def test_an_event_nobody_knows_is_counted_and_ignored(event: Event) -> None:
    world = world_of()
    assert world.advance(event) == ()
    assert world.scheduler.counters.ignored_events == 1


@pytest.mark.parametrize("event", LATE, ids=lambda event: type(event).__name__)
def test_a_late_or_duplicate_event_is_counted_and_ignored(event: Event) -> None:
    world = world_of()
    world.submit("a", range(10), 6, route=DECODE_ONLY)
    world.plan()
    world.receive(world.transfer_of("a"))
    world.plan()
    assert world.advance(event) == ()
    assert world.scheduler.counters.ignored_events == 1
    world.drain()


@pytest.mark.parametrize("event", [LeaseReleased(A), LeaseRevoked(A)], ids=lambda event: type(event).__name__)
def test_a_lease_event_for_a_request_without_a_lease_is_ignored(event: Event) -> None:
    world = world_of()
    world.submit("a", range(10), route=PREFILL_ONLY)
    assert world.advance(event) == ()
    assert state_of(world) is State.WAITING
    world.drain()
    assert world.advance(event) == ()
    assert world.scheduler.counters.ignored_events == 2


def test_an_open_transfer_is_not_settled_and_a_draining_one_fails_no_more() -> None:
    world = world_of()
    world.submit("a", range(10), route=DECODE_ONLY)
    world.plan()
    transfer_id = world.transfer_of("a")
    assert world.advance(KvQuiet(transfer_id)) == ()
    assert world.scheduler.num_held_blocks == 4
    world.abort("a")
    assert world.fail(transfer_id) == ()
    assert world.scheduler.num_draining_blocks == 3
    world.quiet(transfer_id)
    assert world.advance(KvQuiet(transfer_id)) == ()
    assert world.scheduler.counters.ignored_events == 3
    world.check()
