"""A rank's own rhythm between prefill and decode rounds, for one long prompt not to freeze every stream.

at most `prefill_rounds` rounds with prefill in a row, then `decode_rounds` rounds of decode while any can run

--decode-interleave-every n      (n, 1)    P P P … P D P P P … P D      worst gap: n chunks
--prefill-decode-interval k      (1, k)    P D D … D P D D … D          a prompt is held k rounds between chunks

Without bounds a decode is never due: prefill first, and the decode side isn't asked in a round that prefills.
"""

from __future__ import annotations


class Cadence:
    """Counts rounds that were really scheduled. A due decode that cannot run is not paid with an idle round."""

    def __init__(self, prefill_rounds: int | None = None, decode_rounds: int = 1) -> None:
        assert prefill_rounds is None or prefill_rounds >= 1, f"{prefill_rounds} prefill rounds"
        assert decode_rounds >= 1, f"{decode_rounds} decode rounds"
        self._max_prefill_rounds = prefill_rounds
        self._min_decode_rounds = decode_rounds
        self._num_prefill_rounds = 0
        self._num_decode_rounds = 0

    @property
    def owes_decode(self) -> bool:
        """The next round asks decode first; where none can run, prefill goes on and decode stays due."""
        return self._max_prefill_rounds is not None and self._num_prefill_rounds >= self._max_prefill_rounds

    def on_prefill_round(self) -> None:
        self._num_prefill_rounds += 1
        self._num_decode_rounds = 0

    def on_decode_round(self) -> None:
        self._num_decode_rounds += 1
        if self._num_decode_rounds >= self._min_decode_rounds:
            self._num_prefill_rounds = 0
