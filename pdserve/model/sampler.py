"""From logits to tokens, for a batch whose rows each have their own sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from pdserve.model.adjustments import Adjustments
from pdserve.model.batch import Ints
from pdserve.model.drawing import Filters, draw
from pdserve.model.logprobs import describe, log_probabilities
from pdserve.model.noise import uniforms, word
from pdserve.request import TokenLogprobs, TokenRequest
from pdserve.scheduler.plan import SlotStart


@dataclass(frozen=True, slots=True)
class Drawn:
    """tokens: [rows]. logprobs: by row, for rows that asked."""

    tokens: Ints
    logprobs: Mapping[int, TokenLogprobs]


class Sampler:
    """Sampling parameters of each slot, and the state some of them need. Owned by the loop thread.

    A row's token depends on its own logits, parameters and history alone: noise is a function of (seed, sample index,
    output position), whatever else is in the batch.
    """

    def __init__(self, vocab_size: int, max_slots: int, eos_token_ids: tuple[int, ...]) -> None:
        self._adjustments = Adjustments(vocab_size, max_slots, eos_token_ids)
        self._temperature = np.zeros(max_slots, np.float64)
        self._top_k = np.zeros(max_slots, np.int64)
        self._top_p = np.ones(max_slots, np.float64)
        self._min_p = np.zeros(max_slots, np.float64)
        self._seed = np.zeros(max_slots, np.uint64)
        self._sample_index = np.zeros(max_slots, np.uint64)
        self._wants_logprobs = np.zeros(max_slots, np.bool_)
        self._num_top_logprobs = np.zeros(max_slots, np.int64)

    def start(self, start: SlotStart, request: TokenRequest) -> None:
        """The slot now belongs to `request`."""
        slot, sampling = start.slot, request.sampling
        self._adjustments.start(start, request)
        self._temperature[slot] = sampling.temperature
        self._top_k[slot] = sampling.top_k
        self._top_p[slot] = sampling.top_p
        self._min_p[slot] = sampling.min_p
        self._seed[slot] = word(sampling.seed)
        self._sample_index[slot] = sampling.sample_index
        self._wants_logprobs[slot] = sampling.num_logprobs is not None
        self._num_top_logprobs[slot] = sampling.num_logprobs or 0

    def draw(self, logits: Tensor, slots: Ints, output_positions: Ints) -> Drawn:
        """logits [rows, vocab] float32, changed in place; slots and output_positions [rows].

        output_positions: which token of its answer each row draws, from 0.
        """
        asked = np.flatnonzero(self._wants_logprobs[slots])
        raw = log_probabilities(logits[asked]) if len(asked) else None
        self._adjustments.apply(logits.numpy(), slots, output_positions)
        tokens = self._choose(logits, slots, output_positions)
        self._adjustments.count(slots, tokens)
        if raw is None:
            return Drawn(tokens, {})
        entries = describe(raw, tokens[asked], self._num_top_logprobs[slots[asked]])
        return Drawn(tokens, dict(zip(asked.tolist(), entries, strict=True)))

    def _choose(self, logits: Tensor, slots: Ints, output_positions: Ints) -> Ints:
        temperature = self._temperature[slots]
        random = np.flatnonzero(temperature > 0)
        tokens: Ints = logits.numpy().argmax(axis=1)  # many times faster than torch's
        if len(random):
            at = slots[random]
            filters = Filters(temperature[random], self._top_k[at], self._top_p[at], self._min_p[at])
            noise = uniforms(self._seed[at], self._sample_index[at], output_positions[random].astype(np.uint64))
            tokens[random] = draw(logits[random], filters, noise)
        return tokens
