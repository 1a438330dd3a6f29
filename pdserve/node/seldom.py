"""News that may come a thousand times at once: the first is told, what follows soon after is counted and summed up."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

# After a line, others are only counted for as long; then one line tells of all of them.
INTERVAL_S = 1.0


class Seldom:
    """Belongs to the front's event loop."""

    def __init__(self, log: logging.Logger, level: int = logging.WARNING, interval_s: float = INTERVAL_S) -> None:
        self._log = log
        self._level = level
        self._interval_s = interval_s
        self._untold: Counter[str] = Counter()
        self._last = ""
        self._quiet: asyncio.TimerHandle | None = None

    def tell(self, line: str, kind: str) -> None:
        """kind: what the line is one of, for the sum of those that are not told one by one."""
        if self._quiet is not None:
            self._untold[kind] += 1
            self._last = line
            return
        self._log.log(self._level, "%s", line)
        self._stay_quiet()

    def _stay_quiet(self) -> None:
        self._quiet = asyncio.get_running_loop().call_later(self._interval_s, self._sum_up)

    def _sum_up(self) -> None:
        self._quiet = None
        if not self._untold:
            return
        kinds = ", ".join(f"{kind} {number}" for kind, number in self._untold.items())
        line = f"{self._untold.total()} more within {self._interval_s:g} s ({kinds}); the last: {self._last}"
        self._log.log(self._level, "%s", line)
        self._untold.clear()
        self._stay_quiet()
