"""The policies that walks run under, and what each promises of a round."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

from pdserve.scheduler.config import CadenceLimits
from pdserve.scheduler.gate import PrefillGate
from pdserve.scheduler.plan import RoundPlan
from tests.scheduler.world import World

POLICIES = ("none", "gate", "fill", "interleave", "interval", "closed")


@dataclass
class Policy:
    """What decides about prefill, with the numbers its promises are stated in.

    closed: rounds are, most of the time, while decodes run beside an unfinished prompt. gate: its other ranks do what
    ranks may do: they prefill only in an open round, and have tokens while they decode.
    """

    name: str
    random: Random
    gate: PrefillGate | None = None
    any_interval: int = 0
    max_holds: int = 0
    numbers: dict[str, Any] = field(default_factory=dict)
    num_peers: int = 0

    @property
    def longest_wait(self) -> int:
        """Rounds in a row that a rank which could prefill goes without: the next of them has a chunk."""
        return 0 if self.gate is None else self.any_interval + self.max_holds


def policy_of(name: str, random: Random, *, is_mixed: bool) -> Policy:
    """A policy with numbers drawn at random. Interleaving is refused with mixed rounds; there it is none at all."""
    policy = Policy(name, random)
    if name in ("gate", "fill"):
        attempt, policy.any_interval = random.choice([(1, 1), (1, 4), (2, 3), (2, 4), (3, 4), (3, 6), (4, 16)])
        policy.gate = PrefillGate(attempt, policy.any_interval, random.choice([None, None, 1, 2]))
        policy.numbers = {"prefill_watermark": 9}
        policy.num_peers = random.randint(0, 2)
    if name == "fill":
        policy.max_holds = random.choice([1, 3, 6])
        policy.numbers |= {"fill_tokens": random.choice([2, 4, 6]), "fill_max_holds": policy.max_holds}
    if name == "closed":
        policy.numbers = {"prefill_watermark": random.choice([None, None, 9, 5])}
    if name == "interleave" and not is_mixed:
        policy.numbers = {"cadence": CadenceLimits(random.choice([1, 2, 3]), 1)}
    if name == "interval":
        policy.numbers = {"cadence": CadenceLimits(1, random.choice([1, 2, 4]), random.choice([None, 3, 30]))}
    return policy


def branch_of(gate: PrefillGate) -> str:
    """Where in its table the gate is, told from its rows and its counter alone."""
    if gate._max_open_rounds is not None and gate._num_prefill_rounds >= gate._max_open_rounds:
        return "closed by the bound"
    rounds = gate.rounds_since_prefill
    if rounds and rounds % gate._any_interval == 0:
        point = "ANY and ALL" if rounds % gate._attempt_interval == 0 else "ANY"
    elif rounds % gate._attempt_interval == 0:
        point = "ALL at 0" if rounds == 0 else "ALL"
    else:
        point = "between"
    return f"{point}: {gate.window.value}"


class Situation:
    """What was true before a plan, for what must be true of it."""

    def __init__(self, world: World, allow_prefill: bool) -> None:
        scheduler = world.scheduler
        residents, admission = scheduler._residents, scheduler._planner._admission
        self.allow_prefill = allow_prefill
        self.is_below_watermark = admission.is_below_watermark
        self.known = set(world.computed)
        self.gated = {i for i, request in residents.by_id.items() if request.route.is_gated}
        self.streak = scheduler._planner._cadence._num_prefill_rounds
        has_block = scheduler._pool.num_available > 0
        size = scheduler.config.block_size
        self.can_decode = any(has_block or len(r.tokens) <= len(r.blocks) * size for r in residents.decoding)
        self.has_overdue = any(scheduler._planner._is_overdue(r) for r in residents.by_id.values())
        self.most_holds = max((request.num_holds for request in residents.by_id.values()), default=0)
        is_sealed = any(request.job_id is None for request in residents.retracted)
        has_chunk = any(request.route.is_gated for request in residents.prefilling)
        can_start = residents.has_free_slot and self.is_below_watermark and not is_sealed
        self.could_prefill = has_chunk or (can_start and self._has_prompt(scheduler))

    @staticmethod
    def _has_prompt(scheduler: Any) -> bool:
        """The oldest in the queue is gated, was looked up in storage, and there are blocks for it."""
        for request in scheduler._residents.first_waiting(1):
            is_ready = request.is_looked_up or not scheduler._host.has_storage
            if request.route.is_gated and is_ready:
                admission = scheduler._planner._admission
                return bool(admission.num_blocks_lacking(request, admission.num_blocks_for_decodes()) <= 0)
        return False

    def check(self, plan: RoundPlan, policy: Policy) -> None:
        gated = [row.request_id for row in plan.prefill if row.request_id in self.gated]
        assert self.allow_prefill or not gated, "a closed round prefills"
        new = set(gated) - self.known
        assert self.is_below_watermark or not new, "a new prompt was admitted above the watermark"
        limits = policy.numbers.get("cadence")
        if limits is not None and limits.hold_budget is not None:
            assert self.most_holds <= limits.hold_budget, "a prompt was held beyond its budget"
        if limits is not None and self.can_decode and self.streak >= limits.prefill_rounds:
            assert plan.decode or self.has_overdue, "a decode that was due and could run did not"
