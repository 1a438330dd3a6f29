"""Nodes that prefill for others: a prompt, its chunks as they are computed, its first token, and its lease's end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from pdserve.request import PREFILL_ONLY, RequestId
from pdserve.scheduler.plan import (
    ChunkComputed,
    LeaseReleased,
    LeaseRevoked,
    Outcome,
    RequestFailed,
    RoundPlan,
    TokenDrawn,
)
from pdserve.sim.answers import submission
from pdserve.sim.clock import Clock
from pdserve.sim.dispatch import LeastLoaded
from pdserve.sim.handoff import Handoff
from pdserve.sim.rank import Abort, Message


class PrefillSide:
    """put: a message into the inbox of the rank of that index. latency_s: until the other side hears of something."""

    def __init__(self, num_ranks: int, clock: Clock, latency_s: float, put: Callable[[int, Message], None]) -> None:
        self._tokens = LeastLoaded(num_ranks)
        self._clock = clock
        self._latency_s = latency_s
        self._put = put
        self._handoffs: dict[RequestId, Handoff] = {}

    # ------------------------------------------------------------ what the other side asks

    def choose(self, num_tokens: int) -> int:
        """The index of the rank with the fewest prompt tokens outstanding, which has these too now."""
        return self._tokens.take(num_tokens)

    def leave(self, index: int, num_tokens: int) -> None:
        """They are prefilled, or nobody waits for them."""
        self._tokens.give_back(index, num_tokens)

    def start(self, handoff: Handoff) -> None:
        self._handoffs[handoff.peer_id] = handoff
        request = handoff.live.request
        self._put(handoff.peer, submission(request, handoff.peer_id, PREFILL_ONLY, handoff.num_cached_tokens))

    def release(self, handoff: Handoff) -> None:
        del self._handoffs[handoff.peer_id]
        self._put(handoff.peer, LeaseReleased(handoff.peer_id))

    def abort(self, handoff: Handoff) -> None:
        """The request goes, wherever it is, and the lease, if it has one."""
        self._handoffs.pop(handoff.peer_id, None)
        self._put(handoff.peer, Abort(handoff.peer_id))
        self._put(handoff.peer, LeaseRevoked(handoff.peer_id))

    # ------------------------------------------------------------ what ranks say

    def on_plan(self, index: int, plan: RoundPlan) -> None:
        for start in plan.starts:
            handoff = self._handoffs.get(start.request_id)
            if handoff is not None:
                handoff.num_peer_cached_tokens = start.num_cached_tokens
                self._say(handoff.on_accepted)
        self.on_outcomes(index, plan.failed)

    def on_outcomes(self, index: int, outcomes: Sequence[Outcome]) -> None:
        """Of requests whose reader is gone nothing is said; their lease's end is on its way already."""
        for outcome in outcomes:
            if isinstance(outcome, ChunkComputed | TokenDrawn):
                handoff = self._handoffs.get(outcome.request_id)
                if handoff is not None:
                    self._say_computed(handoff, outcome)
            elif isinstance(outcome, RequestFailed):
                self.on_refused(outcome.request_id, outcome.error.message)

    def _say_computed(self, handoff: Handoff, outcome: ChunkComputed | TokenDrawn) -> None:
        if isinstance(outcome, ChunkComputed):
            self._say(partial(handoff.on_chunk, outcome))
        else:
            self._say(partial(handoff.on_first_token, self._clock.now_s))

    def on_refused(self, request_id: RequestId, reason: str) -> None:
        handoff = self._handoffs.pop(request_id, None)
        if handoff is not None:
            self._say(handoff.on_given_up)

    def _say(self, message: Callable[[], None]) -> None:
        self._clock.after(self._latency_s, message)
