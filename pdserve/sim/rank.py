"""One rank: its scheduler, what has come for it, and what its rounds tell its front.

The same steps as engine/rank.py's loop, without a model: receive ─▶ plan ─▶ (the round passes) ─▶ finish.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pdserve.engine.gating import Gating
from pdserve.errors import PdserveError
from pdserve.request import RequestId
from pdserve.scheduler.config import SchedulerConfig
from pdserve.scheduler.gate import PrefillGate
from pdserve.scheduler.plan import Event, HostCopyDone, Outcome, RoundPlan, StepDone, Submission
from pdserve.scheduler.scheduler import Scheduler
from pdserve.sim.prompts import ANSWER_TOKEN
from pdserve.sim.tiers import RankTiers


@dataclass(frozen=True, slots=True)
class Abort:
    """End this request, if it lives."""

    request_id: RequestId


Message = Submission | Abort | Event


@dataclass(frozen=True, slots=True)
class Place:
    """kind: of the node, "fused", "prefill" or "decode". index: among all ranks of that kind."""

    kind: str
    node: int
    rank: int
    index: int

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.kind} node {self.node}"


class Front(Protocol):
    """Whom a rank tells; index: of the rank."""

    def on_plan(self, index: int, plan: RoundPlan) -> None:
        """A plan that starts, reserves, takes back or gives up requests, before its round passes."""

    def on_outcomes(self, index: int, outcomes: Sequence[Outcome]) -> None:
        """What came of messages and of a round's end."""

    def on_refused(self, request_id: RequestId, reason: str) -> None:
        """A submission that the scheduler did not take."""


class Rank:
    """gate: shared by the ranks of its group. plan, is_busy: of its last round, and whether that takes time."""

    def __init__(
        self, place: Place, config: SchedulerConfig, gate: PrefillGate | None, front: Front, tiers: RankTiers | None
    ) -> None:
        self.place = place
        self.scheduler = Scheduler(config)
        self.gating = Gating(self.scheduler, gate)
        self.inbox: list[Message] = []
        self.plan = RoundPlan(0)
        self.is_busy = False
        self.occupancy = Occupancy(config.num_blocks)
        self._front = front
        self._tiers = tiers
        self._submitted_in: dict[RequestId, int] = {}  # the round before; of requests without a first chunk

    # ------------------------------------------------------------ a round

    def receive(self) -> None:
        """Take what has come."""
        if not self.inbox:
            return
        messages, self.inbox = self.inbox, []
        for message in messages:
            if isinstance(message, Submission):
                self._submit(message)
            elif isinstance(message, Abort):
                self._submitted_in.pop(message.request_id, None)
                self._tell(self.scheduler.abort(message.request_id))
            else:
                self._tell(self.scheduler.advance([message]))

    def _submit(self, submission: Submission) -> None:
        try:
            self.scheduler.submit(submission)
        except PdserveError as error:
            self._front.on_refused(submission.request_id, error.message)
        else:
            self._submitted_in[submission.request_id] = self.scheduler.counters.rounds

    def begin_round(self, now_s: float) -> RoundPlan:
        """Plan, and start what runs beside the round."""
        plan = self.plan = self.scheduler.plan(self.gating.options())
        self.is_busy = bool(plan.prefill or plan.decode or plan.copies)
        for start in plan.starts:
            submitted_in = self._submitted_in.pop(start.request_id, None)
            if submitted_in is not None:
                self.gating.on_first_chunk(plan.round_id - submitted_in)
        if plan.starts or self._has_moved_requests:
            self._front.on_plan(self.place.index, plan)
        if self._tiers is not None:
            self._tiers.begin(plan)
        self.occupancy.note(now_s, self.scheduler.num_held_blocks)
        return plan

    def copies_s(self) -> float:
        """Seconds of the copies that the round's forward waits for."""
        return self._tiers.copies_s(self.plan.copies) if self._tiers is not None else 0.0

    def finish_round(self, now_s: float) -> None:
        """The round has passed: its tokens are drawn, its copies made."""
        plan = self.plan
        if plan.batch_size:
            num_sampled = len(plan.decode) + sum(row.samples for row in plan.prefill)
            self._tell(self.scheduler.advance([StepDone(plan.round_id, [ANSWER_TOKEN] * num_sampled)]))
        if plan.copies:
            self._tell(self.scheduler.advance([HostCopyDone(copy.copy_id) for copy in plan.copies]))
        self.occupancy.note(now_s, self.scheduler.num_held_blocks)

    def _tell(self, outcomes: Sequence[Outcome]) -> None:
        if outcomes:
            self._front.on_outcomes(self.place.index, outcomes)

    # ------------------------------------------------------------ what the round was

    @property
    def _has_moved_requests(self) -> bool:
        return bool(self.plan.failed or self.plan.reservations or self.plan.taken_back)

    @property
    def has_changed(self) -> bool:
        """The next round may differ from this one; without news of that kind only a message makes a difference."""
        return self.is_busy or self._has_moved_requests or bool(self.inbox) or self.gating.holds_prefill

    @property
    def oldest_unstarted(self) -> RequestId | None:
        """Of the requests that wait for their first chunk."""
        return next(iter(self._submitted_in), None)


class Occupancy:
    """Share of a pool's blocks that live requests hold, over time."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._held = 0
        self._since_s = 0.0
        self._block_seconds = 0.0
        self._peak_held = 0

    def note(self, now_s: float, held: int) -> None:
        """From now on `held` blocks are."""
        self._block_seconds += self._held * (now_s - self._since_s)
        self._since_s = now_s
        self._held = held
        if held > self._peak_held:
            self._peak_held = held

    def mean(self, now_s: float) -> float:
        """Over all time until now."""
        if now_s == 0:
            return 0.0
        return (self._block_seconds + self._held * (now_s - self._since_s)) / (self._num_blocks * now_s)

    @property
    def peak(self) -> float:
        return self._peak_held / self._num_blocks
