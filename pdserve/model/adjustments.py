"""What changes logits before a token is chosen: logit bias, penalties, and no end before min_new_tokens."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pdserve.model.batch import Ints
from pdserve.request import TokenRequest
from pdserve.scheduler.plan import SlotStart

Logits = NDArray[np.float32]


class Adjustments:
    """Per-slot state of the adjustments. Rows that ask for nothing cost one comparison of arrays.

    Order: bias, then repetition (divides a positive logit, multiplies a negative one, of any token in the prompt or
    the answer), frequency and presence (of tokens in the answer), then the ban on ends.
    """

    def __init__(self, vocab_size: int, max_slots: int, eos_token_ids: tuple[int, ...]) -> None:
        self._eos_token_ids = eos_token_ids
        self._bias: dict[int, tuple[Ints, Logits]] = {}
        self._ends: dict[int, Ints] = {}
        self._has_bias = np.zeros(max_slots, np.bool_)
        self._has_penalty = np.zeros(max_slots, np.bool_)
        self._min_new_tokens = np.zeros(max_slots, np.int64)
        self._repetition = np.ones(max_slots, np.float32)
        self._frequency = np.zeros(max_slots, np.float32)
        self._presence = np.zeros(max_slots, np.float32)
        # Zeroed memory that the system gives out as it is touched: by slots with penalties only.
        self._is_seen = np.zeros((max_slots, vocab_size), np.bool_)
        self._output_counts = np.zeros((max_slots, vocab_size), np.int32)

    def start(self, start: SlotStart, request: TokenRequest) -> None:
        """Forget whoever had the slot; the forced output counts as output."""
        slot, sampling = start.slot, request.sampling
        if self._has_penalty[slot]:
            self._is_seen[slot] = False
            self._output_counts[slot] = 0
        self._has_bias[slot] = bool(sampling.logit_bias)
        if sampling.logit_bias:
            ids, values = zip(*sampling.logit_bias, strict=True)
            self._bias[slot] = np.array(ids, np.int64), np.array(values, np.float32)
        ends = sampling.stop_token_ids + (() if sampling.ignore_eos else self._eos_token_ids)
        self._min_new_tokens[slot] = sampling.min_new_tokens if ends else 0
        self._ends[slot] = np.array(ends, np.int64)
        self._repetition[slot] = sampling.repetition_penalty
        self._frequency[slot] = sampling.frequency_penalty
        self._presence[slot] = sampling.presence_penalty
        self._has_penalty[slot] = (
            sampling.repetition_penalty != 1 or sampling.frequency_penalty != 0 or sampling.presence_penalty != 0
        )
        if self._has_penalty[slot]:
            self._is_seen[slot, list(request.prompt + start.forced_output)] = True
            np.add.at(self._output_counts[slot], list(start.forced_output), 1)

    def apply(self, logits: Logits, slots: Ints, output_positions: Ints) -> None:
        """In place. logits [rows, vocab]; slots, output_positions [rows]."""
        for row in np.flatnonzero(self._has_bias[slots]):
            ids, values = self._bias[slots[row]]
            np.add.at(logits[row], ids, values)
        self._penalise(logits, slots)
        for row in np.flatnonzero(output_positions < self._min_new_tokens[slots]):
            logits[row, self._ends[slots[row]]] = -np.inf

    def _penalise(self, logits: Logits, slots: Ints) -> None:
        rows = np.flatnonzero(self._has_penalty[slots])
        if not len(rows):
            return
        index, tokens = np.nonzero(self._is_seen[slots[rows]])
        where, at = rows[index], slots[rows[index]]
        values = logits[where, tokens]
        values = np.where(values > 0, values / self._repetition[at], values * self._repetition[at])
        counts = self._output_counts[at, tokens]
        values -= self._frequency[at] * counts + self._presence[at] * (counts > 0)
        logits[where, tokens] = values

    def count(self, slots: Ints, tokens: Ints) -> None:
        """The tokens just drawn, [rows]; a slot is in at most one row."""
        rows = np.flatnonzero(self._has_penalty[slots])
        self._is_seen[slots[rows], tokens[rows]] = True
        self._output_counts[slots[rows], tokens[rows]] += 1
