"""Random walks through everything that callers and peers can do, in any order and at any moment.

The world checks each promise as it goes (see `world.py`): tokens against the direct computation, blocks that may not
be given out yet, who may write where. After the walk all arrivals stop, peers do what they owe, and everything has to
end within a stated number of rounds with nothing held.
"""

from __future__ import annotations

from collections import Counter

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from pdserve.errors import InvalidRequest
from pdserve.request import DECODE_ONLY, FUSED, PREFILL_ONLY, LeaseId, RequestId, Route, TransferId
from pdserve.scheduler.plan import Event, KvQuiet, KvReceived, LeaseReleased, LeaseRevoked, TransferFailed
from tests.scheduler.world import World, build

STEPS = 300
INDEX = st.integers(0, 63)
seen: Counter[str] = Counter()


class Walk(RuleBasedStateMachine):
    """One scheduler, its callers and its peers. An index picks one of whatever there is, modulo their number."""

    @initialize(
        num_blocks=st.sampled_from([6, 10, 16, 24]),
        max_batch_size=st.integers(1, 5),
        max_scheduled_tokens=st.sampled_from([8, 11, 16]),
        enable_mixed_batch=st.booleans(),
        answer_headroom=st.sampled_from([0, 4, 64]),
        max_outstanding_transfers=st.sampled_from([None, 1, 3]),
        prefill_watermark=st.sampled_from([None, 9, 5]),
    )
    def start(self, **numbers: int | bool | None) -> None:
        self.world = World(build(**numbers))
        self.num_submitted = 0
        self.past_transfers = [TransferId(10_000)]
        self.past_leases = [LeaseId("nobody")]

    # ------------------------------------------------------------ callers

    @rule(
        family=st.integers(0, 2),
        length=st.integers(1, 30),
        max_new_tokens=st.sampled_from([1, 2, 5, 12]),
        min_new_tokens=st.integers(0, 2),
        stop=st.sampled_from([frozenset(), frozenset({3, 4, 5})]),
        route=st.sampled_from([FUSED, PREFILL_ONLY, DECODE_ONLY]),
        reads_prefix_cache=st.sampled_from([True, True, True, False]),
        priority=st.sampled_from([0, 0, 0, 1]),
        peer_cached_blocks=st.integers(0, 2),
    )
    def submit(
        self,
        family: int,
        length: int,
        max_new_tokens: int,
        min_new_tokens: int,
        stop: frozenset[int],
        route: Route,
        reads_prefix_cache: bool,
        priority: int,
        peer_cached_blocks: int,
    ) -> None:
        cached = 4 * min(peer_cached_blocks, (length - 1) // 4) if route == PREFILL_ONLY else 0
        try:
            self.world.submit(
                f"r{self.num_submitted}",
                [family] + [1] * (length - 1),
                max_new_tokens,
                min_new_tokens=min_new_tokens,
                stop_token_ids=stop,
                route=route,
                reads_prefix_cache=reads_prefix_cache,
                priority=priority,
                peer_cached_tokens=cached,
            )
        except InvalidRequest:
            seen["refused"] += 1
        self.num_submitted += 1

    @precondition(lambda self: self.world.submissions)
    @rule(index=INDEX)
    def abort(self, index: int) -> None:
        known = list(self.world.submissions)[-12:]
        outcomes = self.world.abort(known[index % len(known)])
        seen["aborts"] += bool(outcomes)

    # ------------------------------------------------------------ rounds

    @precondition(lambda self: self.world.outstanding is None)
    @rule(allow_prefill=st.sampled_from([True, True, False]))
    def plan(self, allow_prefill: bool) -> None:
        plan = self.world.plan(allow_prefill)
        seen["failed"] += len(plan.failed)
        seen["reservations"] += len(plan.reservations)
        if not (plan.rows or plan.reservations or plan.failed):
            again = self.world.plan(allow_prefill)
            assert not again.rows, "a round that had nothing to run has something without any event"

    @precondition(lambda self: self.world.outstanding is not None)
    @rule()
    def run(self) -> None:
        self.world.run()

    @rule(count=st.integers(1, 6))
    def run_rounds(self, count: int) -> None:
        if self.world.outstanding is not None:
            self.world.run()
        self.world.rounds(count)

    # ------------------------------------------------------------ peers that compute for us

    def pick_transfer(self, index: int) -> TransferId:
        transfers = list(self.world.pulls)
        transfer_id = transfers[index % len(transfers)]
        self.past_transfers.append(transfer_id)
        return transfer_id

    @precondition(lambda self: self.world.pulls)
    @rule(index=INDEX)
    def receive(self, index: int) -> None:
        transfer_id = self.pick_transfer(index)
        seen["received" if self.world.pulls[transfer_id].is_wanted else "received too late"] += 1
        self.world.receive(transfer_id)

    @precondition(lambda self: self.world.pulls)
    @rule(index=INDEX, after_first_token=st.booleans())
    def fail(self, index: int, after_first_token: bool) -> None:
        self.world.fail(self.pick_transfer(index), after_first_token=after_first_token)

    @precondition(lambda self: self.world.pulls)
    @rule(index=INDEX)
    def write_late(self, index: int) -> None:
        self.world.write_late(self.pick_transfer(index))
        seen["late writes"] += 1

    @precondition(lambda self: any(not pull.is_wanted for pull in self.world.pulls.values()))
    @rule(index=INDEX)
    def quiet(self, index: int) -> None:
        unwanted = [transfer_id for transfer_id, pull in self.world.pulls.items() if not pull.is_wanted]
        self.world.quiet(unwanted[index % len(unwanted)])
        seen["quiet"] += 1

    # ------------------------------------------------------------ peers that read from us

    def pick_lease(self, index: int) -> RequestId:
        leases = list(self.world.leases)
        request_id = leases[index % len(leases)]
        self.past_leases.append(LeaseId(request_id))
        return request_id

    @precondition(lambda self: self.world.leases)
    @rule(index=INDEX)
    def release(self, index: int) -> None:
        request_id = self.pick_lease(index)
        lease = self.world.leases[request_id]
        if lease.end_token == len(lease.prompt):
            self.world.release(request_id)
            seen["released"] += 1

    @precondition(lambda self: self.world.leases)
    @rule(index=INDEX)
    def revoke(self, index: int) -> None:
        self.world.revoke(self.pick_lease(index))
        seen["revoked"] += 1

    # ------------------------------------------------------------ what should not come

    @rule(kind=st.integers(0, 4), index=INDEX)
    def stray(self, kind: int, index: int) -> None:
        transfer_id = self.past_transfers[index % len(self.past_transfers)]
        request_id = RequestId(self.past_leases[index % len(self.past_leases)])
        event: Event = (
            KvReceived(transfer_id, 1),
            TransferFailed(transfer_id, (1,)),
            KvQuiet(transfer_id),
            LeaseReleased(request_id),
            LeaseRevoked(request_id),
        )[kind]
        is_expected = request_id in self.world.leases if kind > 2 else transfer_id in self.world.pulls
        if not is_expected:
            ignored = self.world.scheduler.counters.ignored_events
            assert self.world.advance(event) == ()
            assert self.world.scheduler.counters.ignored_events == ignored + 1

    # ------------------------------------------------------------ always, and at the end

    @rule()
    def probe(self) -> None:
        self.world.scheduler.probe_prefill_gate()

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        self.world.drain()
        counters = self.world.scheduler.counters
        seen["prefix hits"] += counters.prefix_hit_tokens > 0
        seen["reroutes"] += counters.reroutes
        seen["ended by a stop token"] += sum(
            len(right) < self.world.submissions[request_id].max_new_tokens
            for request_id, right in self.world.right.items()
            if self.world.ended[request_id] == "finished"
        )
        seen.update(self.world.ended.values())


def test_walks_keep_every_promise_and_end_with_nothing_held() -> None:
    seen.clear()
    run_state_machine_as_test(
        Walk,
        settings=settings(
            max_examples=20,
            stateful_step_count=STEPS,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        ),
    )
    missed = [
        what
        for what in (
            *("finished", "sent off", "aborted", "failed", "refused", "ended by a stop token", "prefix hits"),
            *("received", "received too late", "reroutes", "late writes", "quiet", "released", "revoked"),
        )
        if not seen[what]
    ]
    assert not missed, f"these walks never saw {missed}: {seen}"
