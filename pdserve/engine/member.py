"""The front's view of one rank process: its life, its messages, its end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from time import monotonic
from typing import Any, TypeVar

from pdserve.engine.channel import FrontChannel
from pdserve.engine.launch import Process, RankProcess, RankSpec
from pdserve.engine.messages import (
    FromRank,
    FromTransport,
    Loading,
    Ping,
    Pong,
    Ready,
    StartFailed,
    Stop,
    ToRank,
    ToTransport,
)
from pdserve.engine.process_look import ProcessLook
from pdserve.errors import NotReady, StartupError

log = logging.getLogger(__name__)

OnLoading = Callable[[Loading], None]
Launch = Callable[[RankSpec], Awaitable[Process]]
M = TypeVar("M")
# A rank that was told to stop leaves at the end of its round.
STOP_S = 5.0


class Member:
    """Owned by the front's event loop. name: what logs and errors call it. launch: how its process is started.

    on_message: called with what its loop says of requests. on_transport: with each message of its transport thread.
    on_lost: once, when it can be relied on no more.
    """

    def __init__(
        self,
        channel: FrontChannel[FromRank, ToRank],
        transport: FrontChannel[FromTransport, ToTransport] | None = None,
        name: str = "the rank",
        launch: Launch = RankProcess.start,
    ) -> None:
        self.name = name
        self._launch = launch
        self._channel = channel
        self._transport = transport
        self.on_message: Callable[[FromRank], None] = lambda _: None
        self.on_transport: Callable[[FromTransport], None] = lambda _: None
        self.on_lost: Callable[[str], None] = lambda _: None
        self._ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        # Whoever waited for it may have given up before it fails, and has said so.
        self._ready.add_done_callback(lambda ready: ready.exception() if not ready.cancelled() else None)
        self._on_loading: OnLoading = lambda _: None
        self._process: Process | None = None
        self._watcher: asyncio.Task[None] | None = None
        self.is_lost = False
        self.stage = "starting"  # the last step it told of
        self.num_tokens_computed = 0  # of prompts, as the loop said last
        self.longest_round_s = 0.0  # as the loop said last, of its warm-up first
        self._last_life_s = self._last_work_s = monotonic()
        self._cpu_s = 0.0
        self._is_asked_for_life = False

    # ------------------------------------------------------------ start and end

    async def start(self, spec: RankSpec, *, on_loading: OnLoading) -> Ready:
        """Start the process and wait, without a deadline, until it has run a real forward. Raises StartupError."""
        self._process = await self._launch(spec)
        self._watcher = asyncio.create_task(self._watch_process(self._process))
        return await self.attach(timeout_s=None, on_loading=on_loading)

    async def attach(self, *, timeout_s: float | None, on_loading: OnLoading = lambda _: None) -> Ready:
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
                f"{self.name} was not ready after {timeout_s:.0f} s: look at its log above, or raise "
                "--startup-timeout-s"
            ) from None

    def _guarded(self, handle: Callable[[M], None]) -> Callable[[M], None]:
        """A message that cannot be handled leaves the front and the rank with different views: that rank is lost."""

        def guarded(message: M) -> None:
            try:
                handle(message)
            except Exception:
                log.exception("the front failed on a %s of its rank", type(message).__name__)
                self.lose("the front failed on a message of its rank")

        return guarded

    @property
    def is_ready(self) -> bool:
        return self._ready.done() and not self._ready.cancelled() and self._ready.exception() is None

    async def stop(self) -> None:
        """End the process: at once where it is lost, or after a few seconds in which it may leave."""
        with suppress(NotReady):
            self._channel.send(Stop())
        timeout_s = 0.0 if self.is_lost else STOP_S
        self.lose("the node is stopping")
        if self._process is not None:
            await self._process.end(timeout_s)
        if self._watcher is not None:
            await self._watcher
        self._channel.close()
        if self._transport is not None:
            self._transport.close()

    async def _watch_process(self, process: Process) -> None:
        self.lose(f"the process of {self.name} {await process.wait()}")

    def lose(self, reason: str) -> None:
        """It is not relied on any more; the first reason counts."""
        if self.is_lost:
            return
        self.is_lost = True
        if not self._ready.done():
            self._ready.set_exception(StartupError(f"{reason} before it was ready: look at its log above"))
        self.on_lost(reason)

    @property
    def endpoints(self) -> tuple[str, str | None]:
        """Where its loop, and its transport thread, find this end."""
        return self._channel.endpoint, self._transport.endpoint if self._transport is not None else None

    @property
    def is_stopped(self) -> bool:
        """Its process was stopped by a signal."""
        look = self._look()
        return look is not None and look.is_stopped

    @property
    def _has_ended(self) -> bool:
        look = self._look()
        return self._process is not None and (look is None or look.has_ended)

    def _look(self) -> ProcessLook | None:
        """None where its process is gone, or somebody else's."""
        return self._process.look() if self._process is not None else None

    # ------------------------------------------------------------ messages

    def _on_message(self, message: FromRank) -> None:
        self._last_life_s = monotonic()
        match message:
            case Pong():
                self._is_asked_for_life = False
                self.num_tokens_computed = message.num_tokens_computed
                self.longest_round_s = message.longest_round_s
            case Ready():
                self.longest_round_s = message.longest_chunk_s
                if not self._ready.done():
                    self._ready.set_result(message)
            case StartFailed():
                if not self._ready.done():
                    self._ready.set_exception(StartupError(message.message))
            case Loading():
                self.stage = message.stage
                self._on_loading(message)
            case _:
                self.on_message(message)

    def tell(self, message: ToRank) -> None:
        """A rank that is lost is told nothing: its requests have heard of that in their inboxes."""
        self._tell(self._channel, message)

    def tell_transport(self, message: ToTransport) -> None:
        """As `tell`, to its transport thread."""
        assert self._transport is not None, "this rank has no transport"
        self._tell(self._transport, message)

    def _tell(self, channel: FrontChannel[Any, M], message: M) -> None:
        if self.is_lost:
            return
        try:
            channel.send(message)
        except NotReady:
            # Nobody takes anything in from a process's end on; word of that comes a little later, and counts.
            if not self._has_ended:
                raise

    # ------------------------------------------------------------ life

    def ask_for_life(self) -> None:
        """Let the loop say that it goes round, and how much it has computed. One question is open at a time."""
        if not self._is_asked_for_life and not self.is_lost:
            self._tell(self._channel, Ping())
            self._is_asked_for_life = True

    def has_shown_life(self, within_s: float) -> bool:
        """The loop was heard no longer ago. Whoever relies on this calls `ask_for_life` more often than that."""
        return monotonic() - self._last_life_s <= within_s

    def look_for_work(self) -> None:
        """Whoever relies on `is_alive` calls this often: work is as old as the look that finds it."""
        look = self._look()
        if look is not None and look.cpu_s > self._cpu_s:
            self._cpu_s, self._last_work_s = look.cpu_s, monotonic()

    def is_alive(self, within_s: float) -> bool:
        """It has shown life, or its thread was seen to compute, no longer ago; at once no more when it is stopped.

        The first round that takes far longer than any before it, on a machine that is suddenly busy, is told from a
        standstill by this. What computes and never ends is for those to find who wait for its results.
        """
        if self.is_stopped:
            return False
        self.look_for_work()
        return self.has_shown_life(within_s) or monotonic() - self._last_work_s <= within_s
