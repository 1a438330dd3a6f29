"""What several processes saw counts once all have, however late each is."""

from __future__ import annotations

import random

import pytest

from pdserve.engine.quorum import Quorum
from pdserve.request import RequestId, TransferId
from pdserve.scheduler.plan import Event, KvQuiet, KvReceived, LeaseReleased, LeaseRevoked

T, R = TransferId(7), RequestId("r")


@pytest.mark.parametrize("event", [KvReceived(T, 3), KvQuiet(T), LeaseReleased(R), LeaseRevoked(R)])
def test_an_event_counts_once_when_the_last_of_all_has_seen_it(event: Event) -> None:
    quorum = Quorum(3)
    quorum.abandon(T)
    assert [quorum.add(member, event) for member in (2, 0, 1)] == [[], [], [event]]
    quorum.abandon(T)
    assert [quorum.add(member, event) for member in (0, 1, 2)] == [[], [], [event]]  # the next of its kind


def test_a_process_that_says_it_twice_is_not_two() -> None:
    quorum = Quorum(2)
    quorum.abandon(T)
    assert quorum.add(0, KvQuiet(T)) == quorum.add(0, KvQuiet(T)) == []
    assert quorum.add(1, KvQuiet(T)) == [KvQuiet(T)]


def test_a_part_that_failed_by_itself_says_so_again_when_the_transfer_is_given_up_and_nothing_of_it_stays() -> None:
    quorum = Quorum(2)
    assert quorum.add(0, KvQuiet(T)) == quorum.add(1, KvQuiet(T)) == []
    quorum.abandon(T)
    assert quorum.add(0, KvQuiet(T)) == []
    assert quorum.add(1, KvQuiet(T)) == [KvQuiet(T)]
    assert quorum.add(1, KvQuiet(T)) == []
    assert quorum.num_open == 0


def test_kv_that_one_part_of_never_came_is_not_received_and_is_quiet_when_all_parts_are() -> None:
    quorum = Quorum(2)
    assert quorum.add(0, KvReceived(T, 3)) == []
    quorum.abandon(T)
    assert quorum.add(1, KvQuiet(T)) == []
    assert quorum.add(0, KvQuiet(T)) == [KvQuiet(T)]
    # A later transfer does not profit from what the first process had.
    assert quorum.add(1, KvReceived(T, 3)) == []


def test_a_lease_that_ended_both_ways_was_revoked() -> None:
    quorum = Quorum(2)
    assert quorum.add(0, LeaseRevoked(R)) == []
    assert quorum.add(1, LeaseReleased(R)) == [LeaseRevoked(R)]
    assert quorum.add(0, LeaseReleased(R)) == []
    assert quorum.add(1, LeaseReleased(R)) == [LeaseReleased(R)]


def test_random_delays_of_each_process_lose_and_double_nothing() -> None:
    rng = random.Random(1)
    for _ in range(200):
        events: list[Event] = [KvReceived(TransferId(n), n) for n in range(5)]
        events += [KvQuiet(TransferId(n)) for n in range(5, 9)]
        events += [LeaseReleased(RequestId(f"{n}")) for n in range(4)]
        waiting = [(member, event) for member in range(4) for event in events]
        rng.shuffle(waiting)
        quorum = Quorum(4)
        for event in events:
            if isinstance(event, KvQuiet):
                quorum.abandon(event.transfer_id)
        counted = [event for member, seen in waiting for event in quorum.add(member, seen)]
        assert len(counted) == len(events)
        assert set(counted) == set(events)
        assert quorum.num_open == 0
