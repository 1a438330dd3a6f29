"""Requests with a remote side: reservations, transfers, leases, and aborts in every state."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pdserve.request import DECODE_ONLY, FUSED, PREFILL_ONLY, BlockHash, BlockId, FinishReason, RequestId
from pdserve.scheduler.plan import (
    AnswerEnded,
    ChunkComputed,
    Event,
    LeaseReleased,
    LeaseRevoked,
    RequestAborted,
    TokenDrawn,
    TransferFailed,
    TransferUnwanted,
)
from pdserve.scheduler.state import State
from tests.scheduler.world import kinds, state_of, world_of

A = RequestId("a")


# ---------------------------------------------------------------- prefill for a peer


def test_each_chunk_is_announced_when_it_is_computed_and_the_token_after_the_last() -> None:
    world = world_of()
    world.submit("a", range(26), 8, route=PREFILL_ONLY)
    world.plan()
    (first,) = world.run()
    world.plan()
    second, drawn = world.run()
    assert isinstance(first, ChunkComputed)
    assert isinstance(second, ChunkComputed)
    assert [(c.first_token, c.end_token, len(c.blocks)) for c in (first, second)] == [(0, 16, 4), (16, 26, 3)]
    assert isinstance(drawn, TokenDrawn)
    assert drawn.finish is None
    assert second.generations == tuple(world.scheduler.generation(block) for block in second.blocks)


def test_what_the_peer_holds_is_not_announced() -> None:
    world = world_of()
    world.submit("a", range(26), 8, route=PREFILL_ONLY, peer_cached_tokens=20)
    world.plan()
    assert kinds(world.run()) == []
    world.plan()
    (chunk, _) = world.run()
    assert isinstance(chunk, ChunkComputed)
    assert (chunk.first_token, chunk.end_token, len(chunk.blocks)) == (20, 26, 2)


def test_cached_blocks_are_announced_with_the_first_chunk() -> None:
    world = world_of()
    world.submit("warm", range(12))
    world.drain()
    world.submit("a", range(14), 8, route=PREFILL_ONLY)
    assert world.plan().prefill[0].start == 12
    chunk = world.run()[0]
    assert isinstance(chunk, ChunkComputed)
    assert (chunk.first_token, chunk.end_token, len(chunk.blocks)) == (0, 14, 4)
    world.drain()


def test_a_prompt_sent_off_gives_back_its_slot_and_keeps_its_blocks_until_the_lease_ends() -> None:
    world = world_of(max_batch_size=1)
    world.submit("a", range(10), 8, route=PREFILL_ONLY)
    world.submit("b", range(20, 30), 8, route=PREFILL_ONLY)
    world.rounds(2)
    assert (state_of(world), state_of(world, "b")) == (State.SENDING, State.SENDING)
    assert world.scheduler.num_held_blocks == 6
    world.release(A)
    assert (state_of(world), world.scheduler.num_held_blocks) == (None, 3)
    world.drain()


def test_a_first_token_that_ends_the_answer_says_so_and_still_waits_for_the_lease() -> None:
    world = world_of()
    world.submit("a", range(10), 1, route=PREFILL_ONLY)
    world.plan()
    assert [o.finish for o in world.run() if isinstance(o, TokenDrawn)] == [FinishReason.LENGTH]
    assert state_of(world) is State.SENDING
    world.release(A)
    assert world.scheduler.is_idle


@pytest.mark.parametrize("event", [LeaseReleased, LeaseRevoked])
def test_a_lease_that_ends_before_the_prompt_is_done_ends_the_request(event: Callable[[RequestId], Event]) -> None:
    world = world_of()
    world.submit("a", range(26), route=PREFILL_ONLY)
    world.plan()
    assert kinds(world.advance(event(A))) == [RequestAborted]
    assert world.scheduler.num_held_blocks == 7, "the round still uses them"
    world.run()
    assert world.scheduler.is_idle
    assert world.scheduler.num_held_blocks == 0


# ---------------------------------------------------------------- prefill by a peer


def test_a_reservation_names_the_blocks_for_what_is_not_cached() -> None:
    world = world_of()
    world.submit("warm", range(12))
    world.drain()
    world.submit("a", range(14), 6, route=DECODE_ONLY)
    (reservation,) = world.plan().reservations
    assert (reservation.num_cached_tokens, reservation.num_prompt_tokens, len(reservation.blocks)) == (12, 14, 1)
    assert world.scheduler.transfer_of(A) == reservation.transfer_id
    assert state_of(world) is State.RECEIVING
    world.drain()


def test_a_reservation_needs_no_tokens_of_the_round() -> None:
    world = world_of()
    world.submit("full", range(40, 56))
    world.submit("a", range(9), route=DECODE_ONLY)
    plan = world.plan()
    assert plan.num_tokens == 16
    assert len(plan.reservations) == 1


def test_at_most_so_many_wait_on_peers_and_drained_ones_are_not_among_them() -> None:
    world = world_of(max_outstanding_transfers=1, max_batch_size=4)
    for name in "abc":
        world.submit(name, [ord(name), 1, 2], route=DECODE_ONLY)
    assert [r.request_id for r in world.plan().reservations] == ["a"]
    assert not world.plan().reservations
    world.abort("a")
    assert [r.request_id for r in world.plan().reservations] == ["b"], "nobody waits on the draining one"
    world.receive(world.transfer_of("b"))
    assert [r.request_id for r in world.plan().reservations] == ["c"]


def test_received_kv_decodes_from_the_peers_token_in_the_slot_it_had() -> None:
    world = world_of()
    world.submit("a", range(10), 3, route=DECODE_ONLY)
    world.plan()
    assert world.receive(world.transfer_of("a")) == ()
    plan = world.plan()
    assert not plan.prefill
    assert (plan.decode[0].start, plan.decode[0].end) == (10, 11)
    assert plan.starts[0].forced_output == (world.answers[A][0],)
    world.drain()
    assert world.scheduler.counters.prompt_tokens_computed == 0


def test_a_peers_token_that_ends_the_answer_ends_the_request() -> None:
    world = world_of()
    world.submit("a", range(10), 1, route=DECODE_ONLY)
    world.plan()
    assert world.receive(world.transfer_of("a")) == (AnswerEnded(A, FinishReason.LENGTH),)
    assert world.scheduler.is_idle
    assert world.scheduler.num_cached_blocks == 2, "what was confirmed is worth keeping"


def test_nothing_is_published_before_the_commit() -> None:
    world = world_of()
    world.submit("a", range(12), route=DECODE_ONLY)
    world.plan()
    world.submit("b", range(12))
    assert world.plan().starts[0].num_cached_tokens == 0
    world.run()
    world.drain()


def test_a_commit_publishes_parents_first(monkeypatch: pytest.MonkeyPatch) -> None:
    world = world_of()
    world.submit("a", range(14), route=DECODE_ONLY)
    world.plan()
    published: list[int] = []
    publish = world.scheduler._pool.publish

    def record(block_hash: BlockHash, block: BlockId) -> None:
        published.append(block)
        publish(block_hash, block)

    monkeypatch.setattr(world.scheduler._pool, "publish", record)
    request = world.scheduler._residents.by_id[A]
    world.receive(world.transfer_of("a"))
    assert published == request.blocks[:3]
    world.submit("b", range(14))
    assert world.plan().starts[0].num_cached_tokens == 12


def test_a_failed_transfer_publishes_nothing_and_keeps_its_blocks_until_it_is_quiet() -> None:
    world = world_of()
    world.submit("a", range(12), 4, route=DECODE_ONLY)
    world.plan()
    transfer_id = world.transfer_of("a")
    assert kinds(world.fail(transfer_id)) == [TransferUnwanted]
    assert world.scheduler.num_draining_blocks == world.scheduler.num_held_blocks == 3
    assert world.scheduler.num_cached_blocks == 0
    plan = world.plan()
    assert plan.starts[0].num_cached_tokens == 0
    world.write_late(transfer_id)
    world.run()
    world.write_late(transfer_id)
    world.quiet(transfer_id)
    assert world.scheduler.num_draining_blocks == 0
    world.drain()
    assert world.scheduler.counters.reroutes == 1


def test_a_failed_transfer_lets_go_of_the_hits_and_the_headroom_at_once() -> None:
    world = world_of()
    world.submit("warm", range(8))
    world.drain()
    world.submit("a", range(12), 4, route=DECODE_ONLY)
    world.plan()
    assert world.scheduler.num_held_blocks == 4
    world.fail(world.transfer_of("a"))
    assert world.scheduler.num_held_blocks == 1
    assert world.plan().starts[0].num_cached_tokens == 8
    world.drain()


def test_a_rerouted_request_keeps_its_place_in_the_queue() -> None:
    world = world_of(max_batch_size=2)
    world.submit("first", [1] * 6, 30)
    world.submit("a", range(6), route=DECODE_ONLY)
    world.plan()
    world.run()
    for name in ("b", "c"):
        world.submit(name, [ord(name)] * 6)
    world.fail(world.transfer_of("a"))
    assert [start.request_id for start in world.round().starts] == ["a"]


def test_tokens_the_client_has_seen_are_prefilled_again_and_not_drawn_again() -> None:
    world = world_of()
    world.submit("a", range(10), 4, route=DECODE_ONLY)
    world.plan()
    world.fail(world.transfer_of("a"), after_first_token=True)
    plan = world.plan()
    assert plan.starts[0].forced_output == tuple(world.answers[A])
    assert (plan.prefill[0].start, plan.prefill[0].end) == (0, 11)
    world.drain()
    assert world.ended[A] == "finished"


def test_a_transfer_that_fails_after_the_answers_last_token_ends_the_request() -> None:
    world = world_of()
    world.submit("a", range(10), 1, route=DECODE_ONLY)
    world.plan()
    transfer_id = world.transfer_of("a")
    outcomes = world.fail(transfer_id, after_first_token=True)
    assert outcomes == (TransferUnwanted(transfer_id), AnswerEnded(A, FinishReason.LENGTH))
    assert state_of(world) is None
    assert not world.plan().rows
    world.quiet(transfer_id)
    assert world.scheduler.is_idle


def test_a_rerouted_request_is_never_sent_to_a_peer_again() -> None:
    world = world_of()
    world.submit("a", range(10), route=DECODE_ONLY)
    world.plan()
    world.fail(world.transfer_of("a"))
    assert not world.plan().reservations
    assert world.outstanding is not None


def test_a_request_that_another_peer_is_to_prefill_gets_new_blocks_at_its_old_place() -> None:
    world = world_of(max_batch_size=2)
    world.submit("first", [1] * 6, 30)
    world.submit("a", range(12), route=DECODE_ONLY)
    (before,) = world.round().reservations
    world.submit("b", range(20, 32), route=DECODE_ONLY)
    assert kinds(world.try_again(before.transfer_id)) == [TransferUnwanted]
    (after,) = world.plan().reservations
    assert (after.request_id, after.num_cached_tokens) == (A, 0)
    assert after.transfer_id != before.transfer_id
    assert not set(after.blocks) & set(before.blocks), "the old destination may still be written"
    assert world.scheduler.num_draining_blocks == len(before.blocks)
    assert (world.scheduler.counters.remote_retries, world.scheduler.counters.reroutes) == (1, 0)
    world.write_late(before.transfer_id)
    world.drain()
    assert world.scheduler.counters.prompt_tokens_computed == 6


def test_nobody_draws_a_first_token_again_that_the_client_has_seen() -> None:
    world = world_of()
    world.submit("a", range(10), route=DECODE_ONLY)
    world.plan()
    with pytest.raises(AssertionError, match="the first token is out"):
        world.advance(TransferFailed(world.transfer_of("a"), (3,), stays_remote=True))


# ---------------------------------------------------------------- together


def test_one_scheduler_serves_all_three_routes_in_one_round() -> None:
    world = world_of(enable_mixed_batch=True)
    world.submit("decodes", [1], 9)
    world.round()
    world.submit("fused", range(5))
    world.submit("for a peer", range(20, 25), route=PREFILL_ONLY)
    world.submit("by a peer", range(30, 35), route=DECODE_ONLY)
    plan = world.round()
    assert [row.request_id for row in plan.rows] == ["fused", "for a peer", "decodes"]
    assert [reservation.request_id for reservation in plan.reservations] == ["by a peer"]
    world.drain()
    assert set(world.ended.values()) == {"finished", "sent off"}


def test_what_one_route_computed_the_others_find() -> None:
    for first in (FUSED, PREFILL_ONLY, DECODE_ONLY):
        for second in (FUSED, PREFILL_ONLY, DECODE_ONLY):
            world = world_of()
            world.submit("warm", range(12), route=first)
            world.drain()
            world.submit("again", range(12), route=second)
            plan = world.plan()
            num_cached = {found.num_cached_tokens for found in plan.starts + plan.reservations}
            assert num_cached == {8}, (first, second)
            world.drain()
