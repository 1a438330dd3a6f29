"""One random walk: a scheduler, the policy it runs under, its callers, its peers and its tiers. A walk is its seed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random

from pdserve.errors import InvalidRequest
from pdserve.request import DECODE_ONLY, FUSED, PREFILL_ONLY, BlockHash, RequestId, Route, TransferId
from pdserve.scheduler.gate import GateRow
from pdserve.scheduler.plan import (
    Event,
    HostCopyDone,
    KvQuiet,
    KvReceived,
    LeaseReleased,
    LeaseRevoked,
    RoundPlan,
    TransferFailed,
)
from pdserve.scheduler.prefix_cache import extend_hashes
from pdserve.scheduler.state import State
from pdserve.scheduler.storage_plan import StorageLate, StorageReady, Stored
from tests.scheduler.policy import Situation, branch_of, policy_of
from tests.scheduler.world import World, build

ROUTES: dict[str, list[Route]] = {
    "alone": [FUSED],
    "mixed": [FUSED],
    "prefill": [PREFILL_ONLY],
    "decode": [DECODE_ONLY],
    "all": [FUSED, PREFILL_ONLY, DECODE_ONLY],
}
TIERS = ("none", "host", "file")


class Walk:
    """Each method is a thing that may happen, if it can happen now. `seen` counts what did.

    share_closed: of the rounds of a walk without a gate, at random. keeps_routes: no transfer fails, for it is then
    that a request loses its remote side.
    """

    def __init__(
        self,
        seed: int,
        shape: str,
        policy: str,
        tier: str,
        *,
        share_closed: float = 0.0,
        keeps_routes: bool = False,
    ) -> None:
        self.random = Random(f"{seed} {shape} {policy} {tier}")
        self.seen: Counter[str] = Counter()
        self.plans: list[RoundPlan] = []
        self.share_closed = share_closed
        self.keeps_routes = keeps_routes
        choice = self.random.choice
        is_mixed = shape == "mixed" or (shape == "all" and choice([False, True]))
        self.policy = policy_of(policy, self.random, is_mixed=is_mixed)
        # A crowd: long answers that outgrow the pool together.
        self.is_crowd = policy == "closed" or choice([False, True, True])
        num_blocks = choice([10, 12, 14] if self.is_crowd else [6, 10, 16, 24])
        self.world = World(
            build(
                num_blocks=num_blocks,
                max_batch_size=choice([4, 6] if self.is_crowd else [1, 2, 3, 5]),
                max_scheduled_tokens=choice([6, 6, 8, 11] if self.is_crowd else [8, 11, 16]),
                enable_mixed_batch=is_mixed,
                answer_headroom=0 if self.is_crowd else choice([0, 4, 64]),
                max_outstanding_transfers=choice([None, 1, 3]),
                num_host_blocks=0 if tier == "none" else choice([3, 8, 2 * num_blocks, 2 * num_blocks, 2 * num_blocks]),
                has_storage=tier == "file",
                **self.policy.numbers,
            ),
            stored_prompts(self.random),
        )
        self.world.is_prompt = choice([False, False, True])
        self.routes = ROUTES[shape]
        self.num_submitted = 0
        self.num_rounds_could = 0
        self.past_transfers = [TransferId(10_000)]
        self.past_leases = [RequestId("nobody")]

    def walk(self, num_steps: int) -> Counter[str]:
        steps = self.possible_steps()
        for number, step in enumerate(self.random.choices(list(steps), list(steps.values()), k=num_steps)):
            step()
            if number % 4 == 0:
                self.world.check()
            scheduler = self.world.scheduler
            self.seen["steps"] += 1
            self.seen["crowded steps"] += 10 * scheduler.num_held_blocks > 9 * scheduler.config.num_blocks
        self.world.drain()
        self.seen.update(self.world.ended.values())
        for name in ("reroutes", "retractions", "restores", "prefix_hit_tokens", "host_hit_tokens", "storage_fetches"):
            self.seen[name] += getattr(self.world.scheduler.counters, name)
        return self.seen

    def possible_steps(self) -> dict[Callable[[], None], float]:
        """What may happen, and how often."""
        steps: dict[Callable[[], None], float] = {self.submit: 9, self.abort: 1.5, self.plan: 8, self.run: 8}
        steps[self.rounds] = 5
        steps[self.stray] = 1
        if DECODE_ONLY in self.routes:
            steps |= {
                self.accept: 2,
                self.receive: 3,
                self.fail: 2,
                self.try_again: 1,
                self.write_late: 2,
                self.quiet: 2,
            }
        if PREFILL_ONLY in self.routes:
            steps |= {self.release: 2, self.revoke: 1}
        if self.world.host:
            steps |= {self.tell_copied: 4, self.write_back: 10}
        if self.world.scheduler._host.has_storage:
            steps |= {self.fetch: 4, self.fetch_late: 1, self.store: 3}
        return steps

    # ------------------------------------------------------------ callers

    def submit(self) -> None:
        if self.world.scheduler.num_waiting > 9:
            return
        route, length = (
            self.random.choice(self.routes),
            self.random.randint(1, 30 if self.random.random() < 0.5 else 12),
        )
        stop_token_ids = frozenset() if self.is_crowd else self.random.choice([frozenset(), frozenset({3, 4, 5})])
        self.num_submitted += 1
        try:
            self.world.submit(
                f"r{self.num_submitted}",
                [self.random.randint(0, 2)] + [1] * (length - 1),
                self.random.choice([12, 22, 30] if self.is_crowd else [1, 2, 5, 12]),
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
        """Somebody, of every state as likely; now and then who has ended already."""
        tracked = list(self.world.scheduler._residents.by_id.values())
        if tracked and self.random.random() < 0.9:
            present = sorted({request.state for request in tracked}, key=lambda state: state.value)
            rare = [state for state in present if state in (State.FETCHING, State.RETRACTED, State.RESTORING)]
            state = self.random.choice(present + 3 * rare)
            self.world.abort(self.random.choice([r.request_id for r in tracked if r.state is state]))
        elif self.world.submissions:
            self.world.abort(self.random.choice(list(self.world.submissions)))

    # ------------------------------------------------------------ rounds

    def plan(self) -> None:
        if self.world.outstanding is not None:
            return
        allow_prefill = self.is_allowed()
        before = Situation(self.world, allow_prefill)
        nothing_happens = not self.world.copied
        plan = self.world.plan(allow_prefill)
        before.check(plan, self.policy)
        self.plans.append(plan)
        self.observe(plan, allow_prefill)
        self.check_wait(plan, before)
        if not is_busy(plan) and nothing_happens:
            again = self.world.plan(allow_prefill)
            assert not is_busy(again), "an idle round is followed by a busy one, though nothing happened"
            self.seen["idle"] += 1

    def is_allowed(self) -> bool:
        gate = self.policy.gate
        if self.policy.name == "closed":
            residents = self.world.scheduler._residents
            return not (residents.prefilling and residents.decoding) or self.random.random() < 0.1
        if gate is None:
            return self.random.random() >= self.share_closed
        self.seen[f"gate {branch_of(gate)}"] += 1
        return gate.is_open and self.world.scheduler.probe_prefill_gate().wants_prefill

    def observe(self, plan: RoundPlan, allow_prefill: bool) -> None:
        """The group's rows: our own, and what peers may do."""
        gate, random = self.policy.gate, self.random
        if gate is None:
            return
        probe = self.world.scheduler.probe_prefill_gate()
        rows = [GateRow(plan.num_tokens, plan.batch_size, plan.num_extends, probe.vote, probe.has_decode_work)]
        for _ in range(self.policy.num_peers):
            extends = gate.is_open and random.random() < 0.2
            decodes = random.random() < 0.8
            num_tokens = 4 if extends else int(decodes)
            rows.append(GateRow(num_tokens, min(num_tokens, 1), int(extends), random.random() < 0.2, decodes))
        was = gate.rounds_since_prefill
        gate.observe(rows)
        if any(row.num_extends for row in rows):
            self.seen["gate reset by extend"] += was > 0
        elif not any(row.num_tokens for row in rows):
            self.seen["gate reset by idle"] += was > 0
        else:
            self.seen["gate counts"] += 1

    def check_wait(self, plan: RoundPlan, before: Situation) -> None:
        """A rank that could prefill in each of so many rounds in a row, and when it votes, has."""
        could = before.could_prefill and Situation(self.world, before.allow_prefill).could_prefill
        if self.policy.name not in ("none", "gate", "fill") or plan.prefill or not could:
            self.num_rounds_could = 0
            return
        self.num_rounds_could += 1
        closed = self.policy.gate is not None and self.policy.gate._max_open_rounds is not None
        bound = self.policy.longest_wait + closed
        assert self.num_rounds_could <= bound, f"{self.num_rounds_could} rounds without a chunk, {bound} are promised"
        self.seen["longest wait"] = max(self.seen["longest wait"], self.num_rounds_could)

    def run(self) -> None:
        if self.world.outstanding is not None:
            self.world.run()

    def rounds(self) -> None:
        """A few in a row, in which write-backs may keep up and nobody else does anything."""
        keeps_up = self.random.random() < 0.7
        for _ in range(self.random.randint(1, 6)):
            self.run()
            self.plan()
            while keeps_up and self.world.write_backs:
                self.write_back()

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
        if (transfer_id := self.a_transfer()) is not None and not self.keeps_routes:
            self.seen["failed transfers" if self.world.pulls[transfer_id].is_wanted else "failed, unwanted"] += 1
            self.world.fail(transfer_id, after_first_token=self.random.random() < 0.5)

    def try_again(self) -> None:
        """It keeps its route, so it may happen in every walk."""
        if (transfer_id := self.a_transfer()) is not None:
            self.seen["tried again" if self.world.pulls[transfer_id].is_wanted else "tried again, unwanted"] += 1
            self.world.try_again(transfer_id)

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

    # ------------------------------------------------------------ tiers

    def tell_copied(self) -> None:
        if self.world.copied:
            self.seen["copies told late"] += 1
            self.world.tell_copied()

    def write_back(self) -> None:
        if self.world.write_backs:
            self.seen["write-backs"] += 1
            self.world.write_back(self.random.choice(list(self.world.write_backs)))

    def fetch(self) -> None:
        """A read ends: with all there is, or at a block that turns out to be corrupt."""
        if self.world.fetches:
            fetch_id = self.random.choice(list(self.world.fetches))
            num_intact = self.random.choice([None, None, self.random.randint(0, 3)])
            self.seen["fetched late" if fetch_id in self.world.late_fetches else "fetched"] += 1
            self.seen["fetched blocks"] += self.world.fetch(fetch_id, num_intact)

    def fetch_late(self) -> None:
        if self.world.fetches:
            self.seen["late fetches"] += 1
            self.world.fetch_late(self.random.choice(list(self.world.fetches)))

    def store(self) -> None:
        if self.world.stores:
            self.seen["stores"] += 1
            is_stored = self.random.random() < 0.9
            self.world.store(self.random.choice(list(self.world.stores)), is_stored=is_stored)

    # ------------------------------------------------------------ what should not come

    def stray(self) -> None:
        """A late, duplicate or unknown event."""
        transfer_id, request_id = self.random.choice(self.past_transfers), self.random.choice(self.past_leases)
        events: list[Event] = [HostCopyDone(99_999), StorageReady(99_999, 2), StorageLate(99_999), Stored(99_999, True)]
        if transfer_id not in self.world.pulls:
            events += [KvReceived(transfer_id, 1), TransferFailed(transfer_id, (1,)), KvQuiet(transfer_id)]
        if request_id not in self.world.leases:
            events += [LeaseReleased(request_id), LeaseRevoked(request_id)]
        ignored = self.world.scheduler.counters.ignored_events
        assert self.world.advance(self.random.choice(events)) == ()
        assert self.world.scheduler.counters.ignored_events == ignored + 1
        self.seen["stray"] += 1


def stored_prompts(random: Random) -> dict[BlockHash, list[int]]:
    """What other nodes left in storage: blocks of the prompts that walks submit, with holes."""
    blocks: dict[BlockHash, list[int]] = {}
    for first in range(3):
        tokens, hashes = [first] + [1] * 27, list[BlockHash]()
        extend_hashes(hashes, tokens, 7, 4)
        known = [index for index in range(7) if random.random() < 0.8]
        blocks.update((hashes[index], tokens[4 * index : 4 * index + 4]) for index in known)
    return blocks


def is_busy(plan: RoundPlan) -> bool:
    return bool(plan.rows or plan.reservations or plan.failed or plan.taken_back or plan.copies)
