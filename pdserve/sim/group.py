"""Ranks of one node, whose rounds begin and end together: each costs what its slowest rank does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pdserve.errors import InternalError
from pdserve.scheduler.gate import PrefillGate
from pdserve.sim.clock import Clock
from pdserve.sim.costs import RankCosts
from pdserve.sim.observer import Observer, SimRound
from pdserve.sim.rank import Message, Rank

# What a round takes in which nothing is computed or copied.
EMPTY_ROUND_S = 0.0002
# Gates and cadences count in tens of rounds; after this many empty ones in a row nothing will ever run.
MAX_EMPTY_ROUNDS = 10_000


class Group:
    """gate: the one that every rank's Gating asks; each rank would feed its own the same rows.

    noise: a factor for a round's duration, drawn anew for each.
    """

    def __init__(
        self,
        ranks: Sequence[Rank],
        gate: PrefillGate | None,
        costs: RankCosts,
        clock: Clock,
        observer: Observer,
        noise: Callable[[], float],
    ) -> None:
        self.ranks = ranks
        self._gate = gate
        self._costs = costs
        self._clock = clock
        self._observer = observer
        self._noise = noise
        self._is_awake = False
        self._num_empty_rounds = 0
        self.num_rounds = 0

    def put(self, rank: int, message: Message) -> None:
        """Into the rank's inbox: it is seen by the next round, which begins at once if none is under way."""
        self.ranks[rank].inbox.append(message)
        self._num_empty_rounds = 0
        if not self._is_awake:
            self._is_awake = True
            self._clock.after_messages(0.0, self._begin_round)

    def _begin_round(self) -> None:
        now_s = self._clock.now_s
        for rank in self.ranks:
            rank.receive()
        for rank in self.ranks:
            rank.begin_round(now_s)
        self.num_rounds += 1
        votes = self._gather()
        busy = [self._busy_s(rank) if rank.is_busy else 0.0 for rank in self.ranks]
        is_busy = any(rank.is_busy for rank in self.ranks)
        factor = self._noise() if is_busy else 1.0
        duration_s = max(busy) * factor if is_busy else EMPTY_ROUND_S
        self._report(votes, [seconds * factor for seconds in busy], now_s + duration_s)
        if is_busy:
            self._num_empty_rounds = 0
            self._clock.after_messages(duration_s, self._end_round)
        else:
            self._go_on(duration_s)

    def _gather(self) -> list[bool]:
        """The group's only collective: every rank's row, and from them what the next round may do."""
        if self._gate is None:
            return [False] * len(self.ranks)
        rows = [rank.gating.row(rank.plan) for rank in self.ranks]
        self._gate.observe(rows)
        return [row.wants_prefill for row in rows]

    def _busy_s(self, rank: Rank) -> float:
        return self._costs.round_s(rank.plan) + rank.copies_s()

    def _end_round(self) -> None:
        now_s = self._clock.now_s
        for rank in self.ranks:
            rank.finish_round(now_s)
        self._begin_round()

    def _go_on(self, duration_s: float) -> None:
        """After a round in which nothing ran: another one where that may be different, else sleep until a message."""
        if not any(rank.has_changed for rank in self.ranks):
            self._is_awake = False
            return
        self._num_empty_rounds += 1
        if self._num_empty_rounds > MAX_EMPTY_ROUNDS:
            stuck = next((rank for rank in self.ranks if rank.oldest_unstarted is not None), self.ranks[0])
            raise InternalError(
                f"request {stuck.oldest_unstarted} is stuck at {stuck.place}: "
                f"{MAX_EMPTY_ROUNDS} rounds in a row ran nothing"
            )
        self._clock.after_messages(duration_s, self._begin_round)

    def _report(self, votes: Sequence[bool], busy: Sequence[float], ends_s: float) -> None:
        for rank, vote, busy_s in zip(self.ranks, votes, busy, strict=True):
            is_held = rank.gating.is_held
            if not is_held and not rank.is_busy:
                continue
            plan, place = rank.plan, rank.place
            self._observer.on_round(
                SimRound(
                    place.kind,
                    place.node,
                    place.rank,
                    self._clock.now_s,
                    ends_s,
                    busy_s,
                    len(plan.prefill),
                    plan.num_tokens - len(plan.decode),
                    len(plan.decode),
                    is_held,
                    vote,
                    rank.scheduler.num_held_blocks,
                )
            )
