"""The prefill-delay gate of an attention-DP group: which rounds may carry prefill, agreed without a word.

Every rank feeds its own gate the same rows, gathered once a round, so every gate answers alike. A gate holds one
integer, R, the rounds since a prefill was scheduled anywhere in the group:

    point      when                       opens when
    ANY        R != 0 and R % N == 0      any rank wants prefill
    ALL        R % A == 0 (R = 0 too)     every rank wants prefill or has nothing to decode
    otherwise                             never

A round that is both is an ANY point. R restarts at 0 with a round that scheduled prefill in any rank, and when all
ranks were idle. A decision is about the next round: the rows it is made of are one round old.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

from pdserve.rounds import GateDecision


class GateRow(NamedTuple):
    """One rank's part of a round, as gathered. num_tokens: forward rows only, so copies and restores do not count."""

    num_tokens: int
    batch_size: int
    num_extends: int
    wants_prefill: bool
    has_decode_work: bool


IDLE_ROW = GateRow(0, 0, 0, False, False)


class Window(enum.Enum):
    """Why the next round may carry prefill, or that it may not."""

    CLOSED = "closed"
    ANY = "any"
    ALL = "all"
    IDLE = "idle"  # an ALL point at which no rank had anything to decode


WINDOWS = {
    GateDecision.ANY: Window.ANY,
    GateDecision.ALL: Window.ALL,
    GateDecision.BURST: Window.ALL,
    GateDecision.IDLE: Window.IDLE,
}


class PrefillGate:
    """A = attempt_interval, N = any_interval, 1 <= A <= N. A new gate has seen only idle ranks, so it is open.

    max_open_rounds: after that many rounds in a row with prefill the next one is closed, whatever the ranks want.
    """

    def __init__(self, attempt_interval: int, any_interval: int, max_open_rounds: int | None = None) -> None:
        assert 1 <= attempt_interval <= any_interval, f"intervals {attempt_interval}, {any_interval}"
        self._attempt_interval = attempt_interval
        self._any_interval = any_interval
        self._max_open_rounds = max_open_rounds
        self._rows: Sequence[GateRow] = (IDLE_ROW,)
        self._num_prefill_rounds = 0  # in a row
        self.rounds_since_prefill = 0
        self.decision = self._decide()  # what the next round may do, and why

    def observe(self, rows: Sequence[GateRow]) -> None:
        """What the round just planned is made of, in every rank, in rank order."""
        has_prefill = any(row.num_extends for row in rows)
        is_idle = not any(row.num_tokens for row in rows)
        self.rounds_since_prefill = 0 if has_prefill or is_idle else self.rounds_since_prefill + 1
        self._num_prefill_rounds = self._num_prefill_rounds + 1 if has_prefill else 0
        self._rows = rows
        self.decision = self._decide()

    @property
    def window(self) -> Window:
        return WINDOWS.get(self.decision, Window.CLOSED)

    @property
    def is_open(self) -> bool:
        return self.window is not Window.CLOSED

    def _decide(self) -> GateDecision:
        if self._max_open_rounds is not None and self._num_prefill_rounds >= self._max_open_rounds:
            return GateDecision.LIMIT
        rounds = self.rounds_since_prefill
        if rounds != 0 and rounds % self._any_interval == 0:
            return GateDecision.ANY if any(row.wants_prefill for row in self._rows) else GateDecision.UNWANTED
        if rounds % self._attempt_interval:
            return GateDecision.BETWEEN
        if not all(row.wants_prefill or not row.has_decode_work for row in self._rows):
            return GateDecision.DECODING
        if not any(row.has_decode_work for row in self._rows):
            return GateDecision.IDLE
        return GateDecision.BURST if self._num_prefill_rounds else GateDecision.ALL
