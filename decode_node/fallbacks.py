"""Prompts tried at another peer, prefilled here, or refused, for want of a peer that does it: each is counted, a storm
of them told in a few lines."""

from __future__ import annotations

import logging
from collections import Counter

from pdserve.errors import PeerError, PeerMismatch
from pdserve.node.seldom import INTERVAL_S, Seldom
from pdserve.request import RequestId

log = logging.getLogger(__name__)


class Fallbacks:
    """Belongs to the front's event loop."""

    def __init__(self, interval_s: float = INTERVAL_S) -> None:
        self._seldom = Seldom(log, interval_s=interval_s)
        self._told_mismatch = ""
        self.counters: Counter[str] = Counter(decode_fallback_total=0)

    def add(self, request_id: RequestId, reason: str, error: PeerError) -> None:
        """The prompt is prefilled here."""
        self.counters["decode_fallback_total"] += 1
        self.counters[f"decode_fallback_total:{reason}"] += 1
        line = f"prefilling {request_id} locally ({reason}): {error.message}"
        self._tell(line, f"prefilled locally: {reason}", error)

    def refuse(self, request_id: RequestId, reason: str, error: PeerError) -> None:
        """The request fails."""
        self.counters["decode_fallback_refused_total"] += 1
        self.counters[f"decode_fallback_refused_total:{reason}"] += 1
        self._tell(f"failing {request_id} ({reason}): {error.message}", f"failed: {reason}", error)

    def retry(self, request_id: RequestId, failed: str, target: str, error: PeerError) -> None:
        """A peer failed with the prompt, and another one gets it; or the same one, which was started anew."""
        line = f"prefilling {request_id} at {target} after {failed} failed with it: {error.message}"
        self._seldom.tell(line, f"tried again at {target}")

    def _tell(self, line: str, kind: str, error: PeerError) -> None:
        """A mismatch is how the nodes were started: it was told when they met, and stays the same for each request."""
        if isinstance(error, PeerMismatch):
            if error.message == self._told_mismatch:
                return
            self._told_mismatch = error.message
        self._seldom.tell(line, kind)
