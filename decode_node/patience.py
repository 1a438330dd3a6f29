"""When a peer is given up: after too long without a word, or without anything new."""

from __future__ import annotations

import time
from collections.abc import Callable

from pdserve.rpc.handoff import FirstToken, Progress, Released, ToDecode


class Patience:
    """Of one handoff. silence_s: how long the peer may tell nothing.

    no_progress_s: how long it may tell the same; asked each time, as that grows with how long its chunks take.
    """

    def __init__(
        self, no_progress_s: Callable[[], float], silence_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._no_progress_s = no_progress_s
        self._silence_s = silence_s
        self._clock = clock
        self._heard_s = self._news_s = clock()
        self._last_progress: Progress | None = None
        self._has_first_token = False
        self._is_done_talking = False

    @property
    def ends_s(self) -> float:
        """When the peer will be given up, if nothing comes until then."""
        no_news_s = self._news_s + self._no_progress_s()
        return no_news_s if self._is_done_talking else min(no_news_s, self._heard_s + self._silence_s)

    def why_over(self) -> str | None:
        """What the peer failed to do in time."""
        now_s = self._clock()
        if now_s < self.ends_s:
            return None
        if now_s >= self._news_s + (limit_s := self._no_progress_s()):
            return f"no progress for {limit_s:g} s"
        return f"not a word for {self._silence_s:g} s"

    def on_word(self, said: ToDecode) -> None:
        """The peer said something; a Progress that tells what the last one told is a sign of life and no news."""
        self._heard_s = self._clock()
        self._has_first_token |= isinstance(said, FirstToken)
        self._is_done_talking |= isinstance(said, Released)
        if not isinstance(said, Progress) or self._is_news(said):
            self.on_news()

    def on_own_pause(self) -> None:
        """We did not run for a while: what the peer said meanwhile, and says now, is heard before it is judged."""
        now_s = self._clock()
        self._heard_s = now_s
        self._news_s = max(self._news_s, now_s - self._no_progress_s() + self._silence_s)

    def on_news(self) -> None:
        """The handoff came forward."""
        self._news_s = self._clock()

    def _is_news(self, progress: Progress) -> bool:
        """While the prompt waits or is computed, its rank's work on others counts: that is queueing, no standstill.

        After the first token the peer has nothing to compute for it any more.
        """
        is_changed, self._last_progress = progress != self._last_progress, progress
        return is_changed and not self._has_first_token
