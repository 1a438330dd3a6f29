"""Nodes that decode, and take prompts' KV from others: the front door of a split deployment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdserve.request import DECODE_ONLY, FUSED, RequestId, Route, TransferId
from pdserve.scheduler.plan import Outcome, Reservation, RoundPlan, TransferUnwanted
from pdserve.sim.answers import Answers, Live, submission
from pdserve.sim.clients import Clients
from pdserve.sim.handoff import Handoff
from pdserve.sim.nodes import World
from pdserve.sim.observer import Transferred
from pdserve.sim.prefill_side import PrefillSide
from pdserve.sim.rank import Abort, Message
from pdserve.sim.tiers import Line
from pdserve.sim.workload import SimRequest


@dataclass(slots=True, eq=False)
class Remote:
    """A request that a peer is to prefill, until its KV is here or will never be.

    peer: the index of the rank that has its prompt among its load, until the first token.
    """

    live: Live
    peer: int
    has_left_peer: bool = False
    num_attempts: int = 0
    handoff: Handoff | None = None


class DecodeSide:
    """put: a message into the inbox of the decode rank of that index. Prompts below min_remote_tokens stay here.

    num_bytes: of KV committed. num_fallbacks: prompts that a peer would not prefill.
    """

    def __init__(
        self,
        num_ranks: int,
        peers: PrefillSide,
        clients: Clients,
        world: World,
        *,
        min_remote_tokens: int,
        put: Callable[[int, Message], None],
    ) -> None:
        self.answers = Answers(num_ranks, clients)
        self._peers = peers
        self._clients = clients
        self._clock = world.clock
        self._costs = world.costs
        self._observer = world.observer
        self._min_remote_tokens = min_remote_tokens
        self.tell = put
        self._reads = [Line(world.clock) for _ in range(num_ranks)]
        self._remotes: dict[RequestId, Remote] = {}
        self._handoffs: dict[tuple[int, TransferId], Handoff] = {}
        self.num_bytes = 0
        self.num_fallbacks = 0

    # ------------------------------------------------------------ a client calls

    def call(self, request: SimRequest) -> None:
        live = self.answers.open(request)
        route = self._choose_route(live)
        self._clock.after(
            self._costs.front.arrival_s,
            lambda: self.tell(live.index, submission(request, live.request_id, route)),
        )

    def _choose_route(self, live: Live) -> Route:
        num_tokens = live.request.num_prompt_tokens
        if num_tokens < self._min_remote_tokens:
            return FUSED
        self._remotes[live.request_id] = Remote(live, self._peers.choose(num_tokens))
        return DECODE_ONLY

    # ------------------------------------------------------------ what ranks say

    def on_plan(self, index: int, plan: RoundPlan) -> None:
        self.answers.on_plan(plan)
        for reservation in plan.reservations:
            self._start(index, reservation)
        for taken in plan.taken_back:
            remote = self._remotes[taken.request_id]
            assert remote.handoff is not None, "a reservation without its handoff"
            remote.handoff.end()
            remote.handoff = None
            self._handoffs.pop((index, taken.transfer_id)).fall_quiet()

    def _start(self, index: int, reservation: Reservation) -> None:
        remote = self._remotes[reservation.request_id]
        handoff = remote.handoff = Handoff(
            remote.live,
            reservation,
            remote.peer,
            RequestId(f"{reservation.request_id}/{remote.num_attempts}"),
            reads=self._reads[index],
            reader=self,
            writer=self._peers,
            clock=self._clock,
            costs=self._costs,
        )
        remote.num_attempts += 1
        self._handoffs[index, reservation.transfer_id] = handoff
        self._clock.after(self._costs.handoff.latency_s, lambda: self._peers.start(handoff))

    def on_outcomes(self, index: int, outcomes: Sequence[Outcome]) -> None:
        self.answers.on_outcomes(outcomes)
        for outcome in outcomes:
            if isinstance(outcome, TransferUnwanted):
                self._handoffs.pop((index, outcome.transfer_id)).fall_quiet()

    def on_refused(self, request_id: RequestId, reason: str) -> None:
        self._forget(request_id)
        self.answers.fail(request_id, reason)

    # ------------------------------------------------------------ what handoffs say

    def on_first_token(self, handoff: Handoff) -> None:
        live = handoff.live
        self._leave_peer(self._remotes[live.request_id])
        live.num_cached_tokens = handoff.num_peer_cached_tokens
        self._clients.on_tokens([live.request.number])
        if live.request.num_output_tokens == 1:  # nobody needs the KV
            self._forget(live.request_id)
            handoff.end()
            self.tell(live.index, Abort(live.request_id))
            self.answers.end(live.request_id)

    def on_given_up(self, handoff: Handoff) -> None:
        self.num_fallbacks += 1
        self._forget(handoff.live.request_id)

    def on_committed(self, handoff: Handoff, record: Transferred) -> None:
        self.num_bytes += record.num_bytes
        del self._handoffs[handoff.live.index, handoff.transfer_id]
        self._forget(handoff.live.request_id)
        self._observer.on_transfer(record)

    def _forget(self, request_id: RequestId) -> None:
        remote = self._remotes.pop(request_id, None)
        if remote is not None:
            self._leave_peer(remote)

    def _leave_peer(self, remote: Remote) -> None:
        if not remote.has_left_peer:
            remote.has_left_peer = True
            self._peers.leave(remote.peer, remote.live.request.num_prompt_tokens)
