"""What a node waits for: signals, the first of several things, work that runs beside its services."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")


class Signals:
    """SIGTERM and SIGINT, counted: the first drains, the second ends."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


async def first_of(*awaitables: Awaitable[Any]) -> None:
    """Returns when one of them is done; those made here are cancelled then."""
    futures = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
    for future, awaitable in zip(futures, awaitables, strict=True):
        if future is not awaitable:
            future.cancel()


async def unless(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """What `work` returns or raises; None when `stop` was set before, the work cancelled and cleaned up after."""
    task = asyncio.create_task(work)
    await first_of(task, stop.wait())
    if task.done():
        return task.result()
    task.cancel()
    await asyncio.wait([task])
    return None


@asynccontextmanager
async def background(*work: Coroutine[Any, Any, None]) -> AsyncIterator[asyncio.Future[Any]]:
    """Runs for as long as the block; the future is done when any of it ended, which none of it should."""
    tasks = [asyncio.create_task(coroutine) for coroutine in work]
    any_ended = asyncio.create_task(asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED))
    try:
        yield any_ended
    finally:
        if any(task.done() and not task.cancelled() and task.exception() is None for task in tasks):
            log.error("background work ended, which it should not: the node ends")
        for task in (*tasks, any_ended):
            task.cancel()
        for result in await asyncio.gather(*tasks, any_ended, return_exceptions=True):
            if isinstance(result, Exception):
                log.error("background work failed: the node ends", exc_info=result)
