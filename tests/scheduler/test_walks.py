"""Random walks through everything that callers and peers can do, in any order and at any moment.

The world checks each promise as it goes (see `world.py`): tokens against the direct computation, blocks that may not
be given out yet, who may write where. After the walk all arrivals stop, peers do what they owe, and everything has to
end within a stated number of rounds with nothing held. A walk is its seed: a failure repeats.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random

import pytest

from pdserve.errors import InvalidRequest
from pdserve.request import DECODE_ONLY, FUSED, PREFILL_ONLY, RequestId, TransferId
from pdserve.scheduler.plan import Event, KvQuiet, KvReceived, LeaseReleased, LeaseRevoked, TransferFailed
from tests.scheduler.world import World, build

NUM_WALKS = 120
STEPS = 300


class Walk:
    """One scheduler, its callers and its peers. Each method is a thing that may happen, if it can happen now."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.seen: Counter[str] = Counter()
        choice = self.random.choice
        self.world = World(
            build(
                num_blocks=choice([6, 10, 16, 24]),
                max_batch_size=choice([1, 2, 3, 5]),
                max_scheduled_tokens=choice([8, 11, 16]),
                enable_mixed_batch=choice([False, True]),
                answer_headroom=choice([0, 0, 64]),
                max_outstanding_transfers=choice([None, 1, 3]),
                prefill_watermark=choice([None, 9, 5]),
            )
        )
        self.routes = choice([[FUSED], [PREFILL_ONLY], [DECODE_ONLY], *[[FUSED, PREFILL_ONLY, DECODE_ONLY]] * 3])
        self.num_submitted = 0
        self.past_transfers = [TransferId(10_000)]
        self.past_leases = [RequestId("nobody")]

    def walk(self) -> None:
        steps: dict[Callable[[], None], int] = {
            self.submit: 6,
            self.abort: 1,
            self.plan: 8,
            self.run: 8,
            self.accept: 2,
            self.receive: 3,
            self.fail: 2,
            self.write_late: 2,
            self.quiet: 2,
            self.release: 2,
            self.revoke: 1,
            self.stray: 1,
        }
        for step in self.random.choices(list(steps), list(steps.values()), k=STEPS):
            step()
            self.world.check()
        self.world.drain()
        self.seen.update(self.world.ended.values())
        self.seen["reroutes"] += self.world.scheduler.counters.reroutes
        self.seen["prefix hits"] += self.world.scheduler.counters.prefix_hit_tokens

    # ------------------------------------------------------------ callers

    def submit(self) -> None:
        route, length = self.random.choice(self.routes), self.random.randint(1, 30)
        stop_token_ids = self.random.choice([frozenset(), frozenset({3, 4, 5})])
        self.num_submitted += 1
        try:
            self.world.submit(
                f"r{self.num_submitted}",
                [self.random.randint(0, 2)] + [1] * (length - 1),
                self.random.choice([1, 2, 5, 12]),
                route=route,
                min_new_tokens=self.random.randint(0, 2),
                stop_token_ids=stop_token_ids,
                reads_prefix_cache=self.random.random() < 0.8,
                priority=self.random.choice([0, 0, 0, 1]),
                peer_cached_tokens=4 * self.random.randint(0, (length - 1) // 4) if route == PREFILL_ONLY else 0,
            )
        except InvalidRequest:
            self.seen["refused"] += 1

    def abort(self) -> None:
        """Somebody, now and then who has ended already."""
        known = self.world.live or list(self.world.submissions)
        if known:
            self.world.abort(self.random.choice(known if self.random.random() < 0.8 else list(self.world.submissions)))

    # ------------------------------------------------------------ rounds

    def plan(self) -> None:
        if self.world.outstanding is not None:
            return
        allow_prefill = self.random.random() < 0.7
        plan = self.world.plan(allow_prefill)
        if not (plan.rows or plan.reservations or plan.failed or plan.taken_back):
            again = self.world.plan(allow_prefill)
            is_busy = bool(again.rows or again.reservations or again.failed or again.taken_back)
            assert not is_busy, "an idle round is followed by a busy one, though nothing happened"
            self.seen["idle"] += 1

    def run(self) -> None:
        if self.world.outstanding is not None:
            self.world.run()

    # ------------------------------------------------------------ peers that compute for us

    def a_transfer(self, *, wanted: bool | None = None) -> TransferId | None:
        pulls = [i for i, pull in self.world.pulls.items() if wanted is None or pull.is_wanted == wanted]
        if not pulls:
            return None
        self.past_transfers.append(self.random.choice(pulls))
        return self.past_transfers[-1]

    def accept(self) -> None:
        if (transfer_id := self.a_transfer()) is not None:
            self.world.accept(transfer_id)

    def receive(self) -> None:
        if (transfer_id := self.a_transfer()) is not None:
            self.seen["received" if self.world.pulls[transfer_id].is_wanted else "received, unwanted"] += 1
            self.world.receive(transfer_id)

    def fail(self) -> None:
        if (transfer_id := self.a_transfer()) is not None:
            self.seen["failed transfers" if self.world.pulls[transfer_id].is_wanted else "failed, unwanted"] += 1
            self.world.fail(transfer_id, after_first_token=self.random.random() < 0.5)

    def write_late(self) -> None:
        if (transfer_id := self.a_transfer()) is not None:
            self.seen["late writes"] += 1
            self.world.write_late(transfer_id)

    def quiet(self) -> None:
        if (transfer_id := self.a_transfer(wanted=False)) is not None:
            self.seen["quiet"] += 1
            self.world.quiet(transfer_id)

    # ------------------------------------------------------------ peers that read from us

    def a_lease(self) -> RequestId | None:
        if not self.world.leases:
            return None
        self.past_leases.append(self.random.choice(list(self.world.leases)))
        return self.past_leases[-1]

    def release(self) -> None:
        if (request_id := self.a_lease()) is not None:
            lease = self.world.leases[request_id]
            if lease.end_token == len(lease.prompt):
                self.seen["released"] += 1
                self.world.release(request_id)

    def revoke(self) -> None:
        if (request_id := self.a_lease()) is not None:
            self.seen["revoked"] += 1
            self.world.revoke(request_id)

    # ------------------------------------------------------------ what should not come

    def stray(self) -> None:
        """A late, duplicate or unknown event."""
        transfer_id, request_id = self.random.choice(self.past_transfers), self.random.choice(self.past_leases)
        events: list[Event] = []
        if transfer_id not in self.world.pulls:
            events += [KvReceived(transfer_id, 1), TransferFailed(transfer_id, (1,)), KvQuiet(transfer_id)]
        if request_id not in self.world.leases:
            events += [LeaseReleased(request_id), LeaseRevoked(request_id)]
        if events:
            ignored = self.world.scheduler.counters.ignored_events
            assert self.world.advance(self.random.choice(events)) == ()
            assert self.world.scheduler.counters.ignored_events == ignored + 1
            self.seen["stray"] += 1


@pytest.mark.parametrize("seed", range(NUM_WALKS))
def test_a_walk_keeps_every_promise_and_ends_with_nothing_held(seed: int) -> None:
    Walk(seed).walk()


def test_the_walks_see_everything_often() -> None:
    seen: Counter[str] = Counter()
    for seed in range(NUM_WALKS // 6):
        walk = Walk(seed)
        walk.walk()
        seen.update(walk.seen)
    expected = {"finished", "sent off", "aborted", "failed", "refused", "idle", "stray", "prefix hits", "reroutes"}
    expected |= {"received", "received, unwanted", "failed transfers", "failed, unwanted", "late writes", "quiet"}
    expected |= {"released", "revoked"}
    assert not [what for what in expected if seen[what] < 5], seen
