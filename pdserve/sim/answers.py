"""The requests that are under way at the nodes clients talk to, and what becomes of each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pdserve.request import FUSED, RequestId, Route
from pdserve.scheduler.plan import AnswerEnded, Outcome, RequestFailed, RoundPlan, Submission, TokenDrawn
from pdserve.sim.clients import Clients
from pdserve.sim.dispatch import LeastLoaded
from pdserve.sim.prompts import prompt_tokens
from pdserve.sim.workload import SimRequest


@dataclass(slots=True, eq=False)
class Live:
    """index: of the rank that answers. num_cached_tokens: None until the first chunk of its prompt is planned."""

    request: SimRequest
    request_id: RequestId
    index: int
    num_cached_tokens: int | None = None


class Answers:
    """Chooses the rank with the fewest unfinished requests, and tells clients what ranks say."""

    def __init__(self, num_ranks: int, clients: Clients) -> None:
        self._clients = clients
        self._loads = LeastLoaded(num_ranks)
        self._live: dict[RequestId, Live] = {}

    def open(self, request: SimRequest) -> Live:
        """The request under a name, and at a rank."""
        live = Live(request, RequestId(str(request.number)), self._loads.take(1))
        self._live[live.request_id] = live
        return live

    def get(self, request_id: RequestId) -> Live | None:
        """None once it has ended."""
        return self._live.get(request_id)

    def oldest(self) -> Live | None:
        return next(iter(self._live.values()), None)

    # ------------------------------------------------------------ what ranks say

    def on_plan(self, plan: RoundPlan) -> None:
        for start in plan.starts:
            live = self._live.get(start.request_id)
            if live is not None and live.num_cached_tokens is None:
                live.num_cached_tokens = start.num_cached_tokens
        self.on_outcomes(plan.failed)

    def on_outcomes(self, outcomes: Iterable[Outcome]) -> None:
        """Tokens first, all at once, then the ends among them; other outcomes are somebody else's."""
        numbers: list[int] = []
        ended: list[Outcome] = []
        live = self._live
        for outcome in outcomes:
            if type(outcome) is TokenDrawn:
                numbers.append(live[outcome.request_id].request.number)
                if outcome.finish is not None:
                    ended.append(outcome)
            elif isinstance(outcome, AnswerEnded | RequestFailed):
                ended.append(outcome)
        self._tell(numbers, ended)

    def _tell(self, numbers: Sequence[int], ended: Iterable[Outcome]) -> None:
        if numbers:
            self._clients.on_tokens(numbers)
        for outcome in ended:
            if isinstance(outcome, RequestFailed):
                self.fail(outcome.request_id, outcome.error.message)
            elif isinstance(outcome, AnswerEnded | TokenDrawn):
                self.end(outcome.request_id)

    def end(self, request_id: RequestId) -> None:
        """Its answer is complete; nothing, if it has ended before."""
        live = self._close(request_id)
        if live is not None:
            self._clients.on_end(live.request, live.num_cached_tokens or 0)

    def fail(self, request_id: RequestId, reason: str) -> None:
        live = self._close(request_id)
        if live is not None:
            self._clients.on_failed(live.request, reason)

    def _close(self, request_id: RequestId) -> Live | None:
        live = self._live.pop(request_id, None)
        if live is not None:
            self._loads.give_back(live.index, 1)
        return live


def submission(
    request: SimRequest, request_id: RequestId, route: Route = FUSED, peer_cached_tokens: int = 0
) -> Submission:
    """What a scheduler is asked; answers end by their length alone."""
    return Submission(
        request_id,
        prompt_tokens(request),
        request.num_output_tokens,
        route=route,
        peer_cached_tokens=peer_cached_tokens,
    )
