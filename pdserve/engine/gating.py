"""The prefill gate at work in a rank's rounds, and what it counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pdserve.rounds import GateDecision
from pdserve.scheduler.gate import GateRow, PrefillGate, Window
from pdserve.scheduler.plan import PlanOptions, RoundPlan
from pdserve.scheduler.scheduler import Scheduler


class Gating:
    """Asks before each round, tells once it is planned. Without a gate every round may prefill, nothing is counted.

    options ─▶ plan ─▶ row ─▶ gather the rows of the group ─▶ observe

    counters: windows by kind as `gate_windows_any|all|idle`, rounds that were closed while the rank wanted prefill as
    `gate_rounds_held`, votes as `gate_votes`, those of ranks without a free slot as `gate_votes_without_slot`, and the
    longest that a request waited for its first chunk as `gate_worst_wait_rounds`.

    Of the round asked for last: decision, None where there is neither gate nor cadence to decide; vote, None without a
    gate; is_held, closed to a prefill that the rank wants.
    """

    def __init__(self, scheduler: Scheduler, gate: PrefillGate | None) -> None:
        self._scheduler = scheduler
        self._gate = gate
        self._allowed = True
        self.is_held = False
        self.decision: GateDecision | None = None
        self.vote: bool | None = None
        self.counters: Counter[str] = Counter()

    def options(self) -> PlanOptions:
        """Permission for the next round: the group's, and the rank's own wish as it is now."""
        if self._gate is None:
            self.decision = GateDecision.CADENCE if self._scheduler.owes_decode else None
            return PlanOptions()
        self.decision = self._gate.decision
        wants = self._scheduler.probe_prefill_gate().wants_prefill
        window = self._gate.window
        self._allowed = wants and window is not Window.CLOSED
        self.is_held = wants and not self._allowed
        if self._allowed:
            self.counters[f"gate_windows_{window.value}"] += 1
        elif self.is_held:
            self.counters["gate_rounds_held"] += 1
        return PlanOptions(allow_prefill=self._allowed)

    def row(self, plan: RoundPlan) -> GateRow:
        """This rank's part of the round as it was planned."""
        if self._gate is None:
            return GateRow(plan.num_tokens, plan.batch_size, plan.num_extends, False, False)
        probe = self._scheduler.probe_prefill_gate()
        self.vote = probe.vote
        self.counters["gate_votes"] += probe.vote
        self.counters["gate_votes_without_slot"] += probe.vote and not self._scheduler.has_free_slot
        return GateRow(plan.num_tokens, plan.batch_size, plan.num_extends, probe.vote, probe.has_decode_work)

    def observe(self, rows: Sequence[GateRow]) -> None:
        """The rows of all ranks of the group, in rank order, decide about the next round."""
        if self._gate is not None:
            self._gate.observe(rows)

    @property
    def has_gate(self) -> bool:
        return self._gate is not None

    @property
    def holds_prefill(self) -> bool:
        """The last round was closed to a prefill that waits: the next may be open without anything else happening."""
        return not self._allowed and self._scheduler.probe_prefill_gate().wants_prefill

    def on_first_chunk(self, num_rounds: int) -> None:
        """A request had its first chunk num_rounds after it was submitted."""
        if self._gate is not None:
            worst = max(self.counters["gate_worst_wait_rounds"], num_rounds)
            self.counters["gate_worst_wait_rounds"] = worst
