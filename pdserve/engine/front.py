"""The front's view of one rank: requests go in, each request's messages come out of its own inbox."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import replace
from itertools import count
from time import monotonic
from typing import TypeVar

from pdserve.engine.channel import FrontChannel
from pdserve.engine.launch import RankProcess, RankSpec
from pdserve.engine.messages import (
    Abort,
    AskLoad,
    FromRank,
    FromTransport,
    GiveUpTransfer,
    Loading,
    LoadReport,
    Output,
    Outputs,
    Ping,
    Pong,
    Ready,
    ReservationTakenBack,
    Reserved,
    StartFailed,
    Stop,
    Submit,
    ToRank,
    ToTransport,
    TransferAccepted,
)
from pdserve.errors import InternalError, NotReady, QueueFull, RequestIdInUse, StartupError, named
from pdserve.request import (
    FUSED,
    RankLoad,
    RequestId,
    Route,
    TokenDelta,
    TokenRequest,
    TransferId,
)

log = logging.getLogger(__name__)

OnLoading = Callable[[Loading], None]
M = TypeVar("M")


class Inbox:
    """What arrives for one request, in order; the end of it is a message like the others.

    rank_id: what the rank calls the request. Bounded by the request itself: a rank sends at most one message a token.
    """

    def __init__(self, rank_id: RequestId) -> None:
        self.rank_id = rank_id
        self._queue: asyncio.Queue[object] = asyncio.Queue()

    def put(self, message: object) -> None:
        self._queue.put_nowait(message)

    async def get(self) -> object:
        return await self._queue.get()


class Rank:
    """One rank process and the requests it works on. Owned by the front's event loop.

    on_transport: called with each message of the rank's transport thread.
    """

    def __init__(
        self,
        channel: FrontChannel[FromRank, ToRank],
        *,
        max_live: int,
        transport: FrontChannel[FromTransport, ToTransport] | None = None,
    ) -> None:
        self._channel = channel
        self._transport = transport
        self.on_transport: Callable[[FromTransport], None] = lambda _: None
        self._max_live = max_live
        self._inboxes: dict[RequestId, Inbox] = {}
        self._by_rank_id: dict[RequestId, Inbox] = {}
        self._rank_numbers = count(1)
        self._loads: dict[int, asyncio.Future[LoadReport]] = {}
        self._load_numbers = count(1)
        self._ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._on_loading: OnLoading = lambda _: None
        self._process: RankProcess | None = None
        self._watcher: asyncio.Task[None] | None = None
        self.lost = asyncio.Event()
        self.lost_reason = ""
        self.num_tokens_computed = 0  # of prompts, as the loop said last
        self._last_life_s = monotonic()
        self._is_asked_for_life = False

    # ------------------------------------------------------------ life

    async def start(self, spec: RankSpec, *, timeout_s: float, on_loading: OnLoading) -> Ready:
        """Start the process and wait until it has run a real forward. Raises StartupError."""
        self._process = await RankProcess.start(spec)
        self._watcher = asyncio.create_task(self._watch_process(self._process))
        return await self.attach(timeout_s=timeout_s, on_loading=on_loading)

    async def attach(self, *, timeout_s: float, on_loading: OnLoading = lambda _: None) -> Ready:
        """Serve a rank that somebody else started, once it is ready."""
        self._on_loading = on_loading
        self._channel.listen(self._guarded(self._on_message))
        if self._transport is not None:
            self._transport.listen(self._guarded(lambda message: self.on_transport(message)))
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(self._ready)
        except TimeoutError:
            raise StartupError(
                f"the rank was not ready after {timeout_s:.0f} s: look at its log above, or raise --startup-timeout-s"
            ) from None

    def _guarded(self, handle: Callable[[M], None]) -> Callable[[M], None]:
        """A message that cannot be handled leaves the front and the rank with different views: that rank is lost."""

        def guarded(message: M) -> None:
            try:
                handle(message)
            except Exception:
                log.exception("the front failed on a %s of its rank", type(message).__name__)
                self._on_lost("the front failed on a message of its rank")

        return guarded

    async def stop(self) -> None:
        """End the rank; live requests fail."""
        with suppress(NotReady):
            self._channel.send(Stop())
        self._on_lost("the node is stopping")
        if self._process is not None:
            await self._process.end()
        if self._watcher is not None:
            await self._watcher
        self._channel.close()
        if self._transport is not None:
            self._transport.close()

    async def _watch_process(self, process: RankProcess) -> None:
        status = await process.wait()
        self._on_lost(f"the rank process ended with status {status}")

    def _on_lost(self, reason: str) -> None:
        if self.lost.is_set():
            return
        self.lost_reason = reason
        self.lost.set()
        if not self._ready.done():
            self._ready.set_exception(StartupError(f"{reason} before it was ready: look at its log above"))
        for inbox in self._inboxes.values():
            inbox.put(NotReady(reason))
        for future in self._loads.values():
            if not future.done():
                future.set_exception(NotReady(reason))

    def ask_for_life(self) -> None:
        """Let the loop say that it goes round, and how much it has computed. One question is open at a time."""
        if not self._is_asked_for_life and not self.lost.is_set():
            self._channel.send(Ping())
            self._is_asked_for_life = True

    def has_shown_life(self, within_s: float) -> bool:
        """The loop was heard no longer ago. Whoever relies on this calls `ask_for_life` more often than that."""
        return monotonic() - self._last_life_s <= within_s

    # ------------------------------------------------------------ messages in

    def _on_message(self, message: FromRank) -> None:
        self._last_life_s = monotonic()
        match message:
            case Pong():
                self._is_asked_for_life = False
                self.num_tokens_computed = message.num_tokens_computed
            case Outputs():
                for output in message.outputs:
                    self.deliver(output.request_id, output)
            case Reserved() | ReservationTakenBack():
                self.deliver(message.request_id, message)
            case LoadReport():
                future = self._loads.get(message.number)
                if future is not None and not future.done():
                    future.set_result(message)
            case Ready():
                self._ready.set_result(message)
            case StartFailed():
                self._ready.set_exception(StartupError(message.message))
            case Loading():
                self._on_loading(message)

    def deliver(self, rank_id: RequestId, message: object) -> None:
        """Put a message into a live request's inbox; one that ended meanwhile gets none."""
        inbox = self._by_rank_id.get(rank_id)
        if inbox is not None:
            inbox.put(message)

    # ------------------------------------------------------------ requests

    @property
    def num_live(self) -> int:
        return len(self._inboxes)

    def open(self, request: TokenRequest, route: Route, peer_cached_tokens: int = 0) -> Inbox:
        """Hand a request to the rank. Raises NotReady, QueueFull, RequestIdInUse. Pair with `close`.

        The rank knows it by an id that is never used again, so that nothing it still says of a request that was closed
        is taken for the words of the next one with its caller's id.
        """
        if self.lost.is_set():
            raise NotReady(f"{self.lost_reason}: retry on another node")
        if request.request_id in self._inboxes:
            raise RequestIdInUse(f"request_id {request.request_id!r} is in use")
        if len(self._inboxes) >= self._max_live:
            raise QueueFull(f"{len(self._inboxes)} requests are running or queued, the limit is {self._max_live}")
        inbox = Inbox(RequestId(f"{request.request_id}~{next(self._rank_numbers)}"))
        self._channel.send(Submit(replace(request, request_id=inbox.rank_id), route, peer_cached_tokens))
        self._inboxes[request.request_id] = self._by_rank_id[inbox.rank_id] = inbox
        return inbox

    def close(self, request_id: RequestId, *, is_over: bool) -> None:
        """Forget a request; unless it is over, the rank is told to end it."""
        inbox = self._inboxes.pop(request_id, None)
        if inbox is None:
            return
        del self._by_rank_id[inbox.rank_id]
        if not is_over and not self.lost.is_set():
            self._channel.send(Abort(inbox.rank_id))

    def abort(self, request_id: RequestId) -> bool:
        """End a live request for everybody: its inbox gets an output that says so. False if there is none."""
        inbox = self._inboxes.get(request_id)
        if inbox is None:
            return False
        self._tell(Abort(inbox.rank_id))
        return True

    def give_up_transfer(
        self, transfer_id: TransferId, forced_output: tuple[int, ...], *, stays_remote: bool = False
    ) -> None:
        """Its KV will not come. stays_remote: reserve anew for another attempt, instead of prefilling here."""
        assert not (stays_remote and forced_output), "the first token is out: nobody draws it again"
        self._tell(GiveUpTransfer(transfer_id, forced_output, stays_remote))

    def accept_transfer(self, transfer_id: TransferId) -> None:
        """The peer took the prompt on: the reservation is not taken back any more."""
        self._tell(TransferAccepted(transfer_id))

    def _tell(self, message: ToRank) -> None:
        """A rank that is lost is told nothing: its requests have heard of that in their inboxes."""
        if not self.lost.is_set():
            self._channel.send(message)

    def tell_transport(self, message: ToTransport) -> None:
        """A rank that is lost is told nothing: its requests have heard of that in their inboxes."""
        assert self._transport is not None, "this rank has no transport"
        if not self.lost.is_set():
            self._transport.send(message)

    async def load(self, *, check_integrity: bool = False, timeout_s: float = 10.0) -> RankLoad:
        """What the rank has on its hands. Raises NotReady without an answer, InternalError on broken integrity."""
        if self.lost.is_set():
            raise NotReady(self.lost_reason)
        number = next(self._load_numbers)
        future: asyncio.Future[LoadReport] = asyncio.get_running_loop().create_future()
        self._loads[number] = future
        try:
            self._channel.send(AskLoad(number, check_integrity))
            async with asyncio.timeout(timeout_s):
                report = await future
        except TimeoutError:
            raise NotReady(f"the rank did not report its load within {timeout_s:.0f} s") from None
        finally:
            del self._loads[number]
        if report.integrity:
            raise InternalError(report.integrity)
        return report.load


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


class LocalTokens:
    """A token source that prefills and decodes on one rank."""

    def __init__(self, rank: Rank, placement: str = "local;reason=fused") -> None:
        self._rank = rank
        self._placement = placement

    async def stream(self, request: TokenRequest) -> AsyncIterator[TokenDelta]:
        """Tokens as the rank draws them; closing the iterator aborts the request."""
        inbox = self._rank.open(request, FUSED)
        is_over = False
        try:
            while not is_over:
                message = await inbox.get()
                if isinstance(message, Exception):
                    is_over = True
                    raise message
                assert isinstance(message, Output)
                is_over = message.finish is not None or bool(message.error_name)
                yield delta_of(message, self._placement)
        finally:
            self._rank.close(request.request_id, is_over=is_over)

    async def abort(self, request_id: RequestId) -> bool:
        return self._rank.abort(request_id)

    async def loads(self, *, check_integrity: bool = False) -> list[RankLoad]:
        return [await self._rank.load(check_integrity=check_integrity)]
