"""The front's view of one data-parallel rank: requests go in, each request's messages come out of its own inbox."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from pdserve.engine.member import Member
from pdserve.engine.messages import (
    Abort,
    AskForWake,
    AskLoad,
    AskRounds,
    FromRank,
    GiveUpTransfer,
    LoadReport,
    Output,
    Outputs,
    ReservationTakenBack,
    Reserved,
    RoundsReport,
    Submit,
    ToRank,
    ToTransport,
    TransferAccepted,
    Wake,
)
from pdserve.errors import InternalError, NotReady, QueueFull, RequestIdInUse, named
from pdserve.request import RankLoad, RequestId, Route, TokenDelta, TokenRequest, TransferId
from pdserve.rounds import RankRounds


class Inbox:
    """What arrives for one request, in order; the end of it is a message like the others.

    rank_id: what the rank calls the request. num_tokens: of its prompt and, so far, its answer. Bounded by the request
    itself: a rank sends at most one message a token.
    """

    def __init__(self, rank_id: RequestId, num_tokens: int = 0) -> None:
        self.rank_id = rank_id
        self.num_tokens = num_tokens
        self._queue: asyncio.Queue[object] = asyncio.Queue()

    def put(self, message: object) -> None:
        self._queue.put_nowait(message)

    async def get(self) -> object:
        return await self._queue.get()


class Rank:
    """One data-parallel rank and the requests it works on. Owned by the front's event loop.

    members: its processes, the one that schedules first. number: among the data-parallel ranks. on_work: called when
    it has something to do; on_lost: once.
    """

    def __init__(self, members: Sequence[Member], *, max_live: int, number: int = 0) -> None:
        self.members = tuple(members)
        self.number = number
        self._leader = self.members[0]
        self._leader.on_message = self._on_message
        for member in self.members:
            member.on_lost = self._on_lost
        self._max_live = max_live
        self._inboxes: dict[RequestId, Inbox] = {}
        self._by_rank_id: dict[RequestId, Inbox] = {}
        self._rank_numbers = count(1)
        self._questions: dict[int, asyncio.Future[Any]] = {}  # open ones; a report answers by number
        self._question_numbers = count(1)
        self.on_work: Callable[[], None] = lambda: None
        self.on_lost: Callable[[str], None] = lambda _: None
        self.lost = asyncio.Event()
        self.lost_reason = ""
        self.num_held_tokens = 0

    # ------------------------------------------------------------ life

    def _on_lost(self, reason: str) -> None:
        """With one of its processes the rank is lost."""
        if self.lost.is_set():
            return
        self.lost_reason = reason
        self.lost.set()
        for inbox in self._inboxes.values():
            inbox.put(NotReady(reason))
        for future in self._questions.values():
            if not future.done():
                future.set_exception(NotReady(reason))
        self.on_lost(reason)

    async def stop(self) -> None:
        """End its processes; live requests fail."""
        await asyncio.gather(*(member.stop() for member in self.members))

    def lose(self, reason: str) -> None:
        """Its requests fail with the reason."""
        for member in self.members:
            member.lose(reason)

    @property
    def num_tokens_computed(self) -> int:
        """Of prompts, as the loop said last."""
        return self._leader.num_tokens_computed

    @property
    def longest_round_s(self) -> float:
        """Lately, as the loop said last; until it has, of its warm-up."""
        return self._leader.longest_round_s

    def ask_for_life(self) -> None:
        """Of every member; see Member."""
        for member in self.members:
            member.ask_for_life()

    def is_alive(self, within_s: float) -> bool:
        """Every member is; see Member."""
        return all(member.is_alive(within_s) for member in self.members)

    # ------------------------------------------------------------ messages in

    def _on_message(self, message: FromRank) -> None:
        match message:
            case Outputs():
                for output in message.outputs:
                    self.deliver(output.request_id, output)
            case Reserved() | ReservationTakenBack():
                self.deliver(message.request_id, message)
            case LoadReport() | RoundsReport():
                future = self._questions.get(message.number)
                if future is not None and not future.done():
                    future.set_result(message)
            case AskForWake():
                self.on_work()

    def deliver(self, rank_id: RequestId, message: object) -> None:
        """Put a message into a live request's inbox; one that ended meanwhile gets none."""
        inbox = self._by_rank_id.get(rank_id)
        if inbox is None:
            return
        if isinstance(message, Output):
            inbox.num_tokens += len(message.token_ids)
            self.num_held_tokens += len(message.token_ids)
        inbox.put(message)

    # ------------------------------------------------------------ requests

    @property
    def num_live(self) -> int:
        return len(self._inboxes)

    @property
    def is_full(self) -> bool:
        return self.num_live >= self._max_live

    def knows(self, request_id: RequestId) -> bool:
        """A request of that id is live here."""
        return request_id in self._inboxes

    def open(self, request: TokenRequest, route: Route, peer_cached_tokens: int = 0) -> Inbox:
        """Hand a request to the rank. Raises NotReady, QueueFull, RequestIdInUse. Pair with `close`.

        The rank knows it by an id that is never used again, so that nothing it still says of a request that was closed
        is taken for the words of the next one with its caller's id.
        """
        if self.lost.is_set():
            raise NotReady(f"{self.lost_reason}: retry on another node")
        if request.request_id in self._inboxes:
            raise RequestIdInUse(f"request_id {request.request_id!r} is in use")
        if self.is_full:
            raise QueueFull(f"{len(self._inboxes)} requests are running or queued, the limit is {self._max_live}")
        inbox = Inbox(RequestId(f"{request.request_id}~{next(self._rank_numbers)}"), len(request.prompt))
        self._leader.tell(Submit(replace(request, request_id=inbox.rank_id), route, peer_cached_tokens))
        self.num_held_tokens += inbox.num_tokens
        self._inboxes[request.request_id] = self._by_rank_id[inbox.rank_id] = inbox
        self.on_work()
        return inbox

    def close(self, request_id: RequestId, *, is_over: bool) -> None:
        """Forget a request; unless it is over, the rank is told to end it."""
        inbox = self._inboxes.pop(request_id, None)
        if inbox is None:
            return
        del self._by_rank_id[inbox.rank_id]
        self.num_held_tokens -= inbox.num_tokens
        if not is_over:
            self._leader.tell(Abort(inbox.rank_id))

    def abort(self, request_id: RequestId) -> bool:
        """End a live request for everybody: its inbox gets an output that says so. False if there is none."""
        inbox = self._inboxes.get(request_id)
        if inbox is None:
            return False
        self._leader.tell(Abort(inbox.rank_id))
        return True

    def give_up_transfer(
        self, transfer_id: TransferId, forced_output: tuple[int, ...], *, stays_remote: bool = False
    ) -> None:
        """Its KV will not come. stays_remote: reserve anew for another attempt, instead of prefilling here."""
        assert not (stays_remote and forced_output), "the first token is out: nobody draws it again"
        self._leader.tell(GiveUpTransfer(transfer_id, forced_output, stays_remote))

    def accept_transfer(self, transfer_id: TransferId) -> None:
        """The peer took the prompt on: the reservation is not taken back any more."""
        self._leader.tell(TransferAccepted(transfer_id))

    def wake(self, number: int) -> None:
        """See engine/group.py."""
        self._leader.tell(Wake(number))

    def tell_transport(self, message: ToTransport) -> None:
        """To the transport threads of all its members."""
        for member in self.members:
            member.tell_transport(message)

    async def load(self, *, check_integrity: bool = False, timeout_s: float = 10.0) -> RankLoad:
        """What the rank has on its hands. Raises NotReady without an answer, InternalError on broken integrity."""
        try:
            async with asyncio.timeout(timeout_s):
                report: LoadReport = await self._asked(lambda number: AskLoad(number, check_integrity))
        except TimeoutError:
            raise NotReady(f"the rank did not report its load within {timeout_s:.0f} s") from None
        if report.integrity:
            raise InternalError(report.integrity)
        return report.load

    async def rounds(self, *, after: int | None, most: int) -> RankRounds:
        """Its last rounds: of those later than the one numbered `after`, `most` at most.

        It answers after its present round, however long that takes. Raises NotReady when it is lost.
        """
        report: RoundsReport = await self._asked(lambda number: AskRounds(number, after, most))
        return RankRounds(self.number, report.newest, report.rounds, report.num_lost, report.unix_offset_us)

    async def _asked(self, question: Callable[[int], ToRank]) -> Any:
        """The report that answers. question: made of the number by which its answer is known."""
        if self.lost.is_set():
            raise NotReady(self.lost_reason)
        number = next(self._question_numbers)
        future = self._questions[number] = asyncio.get_running_loop().create_future()
        try:
            self._leader.tell(question(number))
            return await future
        finally:
            del self._questions[number]


def delta_of(output: Output, placement: str) -> TokenDelta:
    """An output as its reader gets it. Raises the error the output carries."""
    if output.error_name:
        raise named(output.error_name, output.error_message)
    return TokenDelta(
        token_ids=output.token_ids,
        logprobs=output.logprobs,
        finish=output.finish,
        matched_stop_token=output.matched_stop_token,
        num_cached_tokens=output.num_cached_tokens,
        prompt_logprobs=output.prompt_logprobs,
        placement=placement,
    )
