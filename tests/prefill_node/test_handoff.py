"""What a decode node is told of a prompt, in whatever order the loop and the transports of a rank's processes speak."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations
from types import SimpleNamespace
from typing import cast

import pytest

from pdserve.engine.front import Rank
from pdserve.engine.messages import (
    ChunkAnnounced,
    FromTransport,
    LeaseAnswer,
    LeaseGone,
    LeaseOpened,
    Output,
    ReleaseLease,
    ToTransport,
)
from pdserve.errors import ProtocolError
from pdserve.request import BlockId, LeaseId, RequestId
from pdserve.rpc.handoff import Accepted, ChunkReady, FirstToken, HandoffAbort, Release, Released, ToDecode
from prefill_node.handoff import Handoff
from prefill_node.parts import FromPart
from prefill_node.workload import Workload

LEASE = LeaseId("lease")
FIRST = Output(RequestId(LEASE), (5,), num_chunks=2)


def of_part(part: int) -> list[object]:
    """What its transport says, in order."""
    said: list[FromTransport] = [
        LeaseOpened(LEASE),
        ChunkAnnounced(LEASE, 0, 0, 64, (BlockId(part),)),
        ChunkAnnounced(LEASE, 1, 64, 70, (BlockId(part + 2),)),
    ]
    return [FromPart(part, message) for message in said]


def interleavings(*speakers: Sequence[object]) -> Iterator[list[object]]:
    """Every order of what they say that keeps the order of each."""
    turns = [number for number, said in enumerate(speakers) for _ in said]
    for order in sorted(set(permutations(turns))):
        words = [iter(said) for said in speakers]
        yield [next(words[number]) for number in order]


def begun() -> tuple[Handoff, list[ToTransport]]:
    """Of the second rank of a node with two processes each, and what the transports are told."""
    told: list[ToTransport] = []
    rank = SimpleNamespace(members=(None, None), number=1, tell_transport=told.append)
    workload = Workload(16, 64)
    workload.add(LEASE, 70)
    return Handoff(LEASE, cast(Rank, rank), workload, 70, 30.0), told


def hears(handoff: Handoff, said: Sequence[object]) -> list[ToDecode]:
    return [heard for message in said for heard in handoff.answer(message)]


ORDERS = list(interleavings([FIRST], of_part(0), of_part(1)))


def test_the_lease_comes_first_and_chunks_of_each_rank_in_order() -> None:
    assert len(ORDERS) == 140
    for said in ORDERS:
        heard = hears(begun()[0], said)
        assert heard[0] == Accepted(LEASE, num_ranks=2)
        chunks = [(one.rank, one.seq, one.end_token, one.blocks) for one in heard if isinstance(one, ChunkReady)]
        assert [chunk for chunk in chunks if chunk[0] == 2] == [(2, 0, 64, (0,)), (2, 1, 70, (2,))]
        assert [chunk for chunk in chunks if chunk[0] == 3] == [(3, 0, 64, (1,)), (3, 1, 70, (3,))]
        assert [one.token_id for one in heard if isinstance(one, FirstToken)] == [5]
        assert len(heard) == len(said) - 1  # two leases are one Accepted


def test_nothing_is_heard_before_the_lease_stands_in_every_part() -> None:
    for said in ORDERS:
        handoff, _ = begun()
        is_last = {FromPart(part, LeaseOpened(LEASE)): False for part in (0, 1)}
        for message in said:
            heard = handoff.answer(message)
            if message in is_last:
                is_last[cast(FromPart, message)] = True
            assert all(is_last.values()) or not heard


def test_a_release_counts_once_every_part_has_announced_everything() -> None:
    for said in ORDERS:
        for num_said in range(len(said)):
            handoff, told = begun()
            hears(handoff, said[:num_said])
            with pytest.raises(ProtocolError):
                handoff.answer(Release(LEASE))
            assert told == []
        handoff, told = begun()
        hears(handoff, said)
        handoff.answer(Release(LEASE))
        assert told == [ReleaseLease(LEASE)]


@pytest.mark.parametrize("valid", [(True, True), (True, False), (False, True)])
def test_the_decode_node_is_answered_once_every_part_has_been(valid: tuple[bool, bool]) -> None:
    for order in permutations((0, 1)):
        handoff, _ = begun()
        hears(handoff, [*ORDERS[0], Release(LEASE)])
        first, last = (handoff.answer(FromPart(part, LeaseAnswer(LEASE, valid[part]))) for part in order)
        assert (first, last) == ((), (Released(all(valid)),))
        assert handoff.is_over


@pytest.mark.parametrize("part", [0, 1])
def test_a_lease_that_is_gone_in_one_part_is_gone(part: int) -> None:
    for num_said in range(len(ORDERS[0]) + 1):
        handoff, _ = begun()
        hears(handoff, ORDERS[0][:num_said])
        assert handoff.answer(FromPart(part, LeaseGone(LEASE, "expired"))) == (HandoffAbort("expired"),)
        assert handoff.is_over
