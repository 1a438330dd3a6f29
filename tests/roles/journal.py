"""What happened at all nodes of a test, in one order, so that a test waits for an event and never for a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

# Far beyond what anything here takes; reached only where a promise is broken.
LIMIT_S = 20.0

T = TypeVar("T")


class Journal:
    """`note` from any thread, `until` on the event loop that is given, or else runs."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.events: list[object] = []
        self._loop = loop or asyncio.get_running_loop()
        self._changed = asyncio.Event()

    def note(self, event: object) -> None:
        self.events.append(event)
        self._loop.call_soon_threadsafe(self._changed.set)

    def of(self, kind: type[T], /, **wanted: object) -> list[T]:
        """Events of one kind whose fields are as wanted."""
        return [e for e in self.events if isinstance(e, kind) and all(getattr(e, k) == v for k, v in wanted.items())]

    async def until(self, find: Callable[[], T | None]) -> T:
        """What `find` finds, looked for again after each event. Raises AssertionError past LIMIT_S."""
        try:
            async with asyncio.timeout(LIMIT_S):
                while (found := find()) is None:
                    self._changed.clear()
                    if (found := find()) is not None:
                        break
                    await self._changed.wait()
                return found
        except TimeoutError:
            raise AssertionError(f"it never happened; the last of {len(self.events)}: {self.events[-20:]}") from None

    async def first(self, kind: type[T], /, **wanted: object) -> T:
        """The first event of one kind whose fields are as wanted."""
        return (await self.count(kind, 1, **wanted))[0]

    async def count(self, kind: type[T], number: int, /, **wanted: object) -> list[T]:
        """The first `number` events of one kind whose fields are as wanted."""

        def find() -> list[T] | None:
            found = self.of(kind, **wanted)
            return found[:number] if len(found) >= number else None

        return await self.until(find)
