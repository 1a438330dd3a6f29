"""Prompts prefilled here, or refused, for want of a peer: each is counted, a storm of them told in a few lines."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

from pdserve.errors import PeerError
from pdserve.request import RequestId

log = logging.getLogger(__name__)

# After a line, others are only counted for as long; then one line tells of all of them.
INTERVAL_S = 1.0


class Fallbacks:
    """Belongs to the front's event loop."""

    def __init__(self, interval_s: float = INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._untold: Counter[str] = Counter()
        self._last = ""
        self._quiet: asyncio.TimerHandle | None = None
        self.counters: Counter[str] = Counter(decode_fallback_total=0)

    def add(self, request_id: RequestId, reason: str, error: PeerError) -> None:
        """The prompt is prefilled here."""
        self.counters["decode_fallback_total"] += 1
        self.counters[f"decode_fallback_total:{reason}"] += 1
        self._tell(f"prefilling {request_id} locally ({reason}): {error.message}", f"prefilled locally: {reason}")

    def refuse(self, request_id: RequestId, reason: str, error: PeerError) -> None:
        """The request fails."""
        self.counters["decode_fallback_refused_total"] += 1
        self.counters[f"decode_fallback_refused_total:{reason}"] += 1
        self._tell(f"failing {request_id} ({reason}): {error.message}", f"failed: {reason}")

    def _tell(self, line: str, kind: str) -> None:
        if self._quiet is not None:
            self._untold[kind] += 1
            self._last = line
            return
        log.warning("%s", line)
        self._stay_quiet()

    def _stay_quiet(self) -> None:
        self._quiet = asyncio.get_running_loop().call_later(self._interval_s, self._sum_up)

    def _sum_up(self) -> None:
        self._quiet = None
        if not self._untold:
            return
        told = ", ".join(f"{kind} {number}" for kind, number in self._untold.items())
        log.warning("%d more within %g s (%s); the last: %s", self._untold.total(), self._interval_s, told, self._last)
        self._untold.clear()
        self._stay_quiet()
