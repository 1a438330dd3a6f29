"""The fill condition: a rank votes for a prefill round only when what waits is worth one.

It shapes votes and nothing else. Once a window is open every rank with backlog uses it, full or not.
"""

from __future__ import annotations


class FillCondition:
    """tokens: waiting prefill tokens that are worth a round. max_holds: rounds after which anything is."""

    def __init__(self, tokens: int, max_holds: int) -> None:
        assert tokens >= 1, f"{tokens} tokens"
        assert max_holds >= 1, f"{max_holds} holds"
        self.tokens = tokens
        self._max_holds = max_holds
        self._num_holds = 0

    def is_ready(self, waiting_tokens: int, *, has_decode_work: bool) -> bool:
        """Whether new prompts alone are worth a vote: enough tokens, or nothing to protect, or held for long enough."""
        if waiting_tokens == 0:
            return False
        return waiting_tokens >= self.tokens or not has_decode_work or self._num_holds >= self._max_holds

    def on_round(self, waiting_tokens: int, *, has_decode_work: bool, wants_prefill: bool) -> None:
        """Once a round, before it is planned. A hold is a round whose vote is withheld for the fill alone."""
        if waiting_tokens >= self.tokens or not has_decode_work:
            self._num_holds = 0
        elif wants_prefill and waiting_tokens > 0:
            self._num_holds += 1

    def on_prefill(self) -> None:
        self._num_holds = 0
