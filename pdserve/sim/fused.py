"""Nodes that do everything: a request is prefilled and decoded by the rank it is sent to."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pdserve.request import RequestId
from pdserve.scheduler.plan import Outcome, RoundPlan
from pdserve.sim.answers import Answers, Live, submission
from pdserve.sim.clients import Clients
from pdserve.sim.clock import Clock
from pdserve.sim.rank import Message
from pdserve.sim.workload import SimRequest


class FusedFront:
    """put: a message into the inbox of the rank of that index. arrival_s: until a call is there."""

    def __init__(
        self, num_ranks: int, clients: Clients, clock: Clock, arrival_s: float, put: Callable[[int, Message], None]
    ) -> None:
        self.answers = Answers(num_ranks, clients)
        self._clock = clock
        self._arrival_s = arrival_s
        self._put = put

    def call(self, request: SimRequest) -> None:
        live = self.answers.open(request)
        self._clock.after(self._arrival_s, lambda: self._submit(live))

    def _submit(self, live: Live) -> None:
        self._put(live.index, submission(live.request, live.request_id))

    # ------------------------------------------------------------ what ranks say

    def on_plan(self, index: int, plan: RoundPlan) -> None:
        self.answers.on_plan(plan)

    def on_outcomes(self, index: int, outcomes: Sequence[Outcome]) -> None:
        self.answers.on_outcomes(outcomes)

    def on_refused(self, request_id: RequestId, reason: str) -> None:
        self.answers.fail(request_id, reason)
