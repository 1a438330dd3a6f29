"""Waiting for what nobody tells: other processes, and the sum of many tasks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


async def until(is_so: Callable[[], bool], *, poll_s: float, timeout_s: float = float("inf")) -> bool:
    """Whether it was so in time; looked at again and again."""
    deadline_s = time.monotonic() + timeout_s
    while not (found := is_so()) and time.monotonic() < deadline_s:  # noqa: ASYNC110 - nothing would set an event
        await asyncio.sleep(poll_s)
    return found
