"""Ranks of an attention-DP group in lock step: a real scheduler and a real gate each, and the gather between them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from pdserve.request import RequestId
from pdserve.scheduler.gate import GateRow, PrefillGate
from pdserve.scheduler.plan import RoundPlan
from tests.scheduler.world import World, world_of

MOST_ROUNDS = 200


class Group:
    """Rounds as a rank's loop runs them: permission and own fresh wish, plan, probe, gather, observe, execute."""

    def __init__(self, num_ranks: int, *, attempt: int, any_rank: int, **numbers: Any) -> None:
        numbers.setdefault("prefill_watermark", 9)
        numbers.setdefault("num_blocks", 64)
        numbers.setdefault("max_batch_size", 8)
        self.ranks: list[World] = [world_of(**numbers) for _ in range(num_ranks)]
        self.gates = [PrefillGate(attempt, any_rank) for _ in range(num_ranks)]
        self.num_rounds = 0

    def round(self) -> list[RoundPlan]:
        """One round of every rank; the plans in rank order."""
        plans: list[RoundPlan] = []
        rows: list[GateRow] = []
        for rank, gate in zip(self.ranks, self.gates, strict=True):
            wants = rank.scheduler.probe_prefill_gate().wants_prefill
            plan = rank.plan(gate.is_open and wants)
            probe = rank.scheduler.probe_prefill_gate()
            rows.append(GateRow(plan.num_tokens, plan.batch_size, plan.num_extends, probe.vote, probe.has_decode_work))
            plans.append(plan)
        for rank, gate, plan in zip(self.ranks, self.gates, plans, strict=True):
            gate.observe(rows)
            if plan.batch_size:
                rank.run()
        self.num_rounds += 1
        self.check_alike()
        return plans

    def rounds(self, count: int) -> None:
        for _ in range(count):
            self.round()

    def rounds_until(self, is_met: Callable[[list[RoundPlan]], bool]) -> int:
        """Rounds up to and including the first whose plans meet it."""
        for count in range(1, MOST_ROUNDS):
            if is_met(self.round()):
                return count
        raise AssertionError(f"not met in {MOST_ROUNDS} rounds")

    def check_alike(self) -> None:
        assert len({(gate.rounds_since_prefill, gate.window) for gate in self.gates}) == 1, "gates disagree"

    def run_with_arrivals(self, rng: random.Random, *, num_rounds: int, most_live: int) -> list[int]:
        """Scattered arrivals on random ranks, and how many plans each waited for its first chunk."""
        submitted: dict[tuple[int, RequestId], int] = {}
        waits: list[int] = []
        for number in range(num_rounds):
            index = rng.randrange(len(self.ranks))
            if rng.random() < 0.3 and len(self.ranks[index].live) < most_live:
                name = self.ranks[index].submit(f"r{number}", [number % 50] * rng.randint(1, 12), rng.randint(1, 12))
                submitted[index, name] = self.num_rounds
            for rank, plan in enumerate(self.round()):
                waits += [self.num_rounds - submitted[rank, start.request_id] for start in plan.starts]
        return waits
