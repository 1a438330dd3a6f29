"""The last rounds of a rank, noted as it makes them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice

from pdserve.engine.gating import Gating
from pdserve.rounds import NUM_KEPT, Round
from pdserve.scheduler.gate import GateRow
from pdserve.scheduler.plan import RoundPlan


class RoundLog:
    """Owned by the loop thread; a round costs it less than 5 µs.

    begin ─▶ on_planned ─▶ on_gathered ─▶ (begin_forward ─▶ end_forward) ─▶ note

    size: rounds that are kept. unix_offset_us: clock_ns and this is the time of day, as it was at the start.
    """

    def __init__(
        self,
        size: int = NUM_KEPT,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._rounds: deque[Round] = deque(maxlen=size)
        self._clock_ns = clock_ns
        self.unix_offset_us = (wall_ns() - clock_ns()) // 1000
        self.newest = 0  # the number of the last round
        self._start_ns = self._planned_ns = self._gathered_ns = 0
        self._forward_ns: int | None = None  # when it began, in this round
        self._computed_ns = 0
        self._plan_total_ns = self._forward_total_ns = 0

    # ------------------------------------------------------------ a round

    def begin(self) -> None:
        self._forward_ns = None
        self._start_ns = self._clock_ns()

    def on_planned(self) -> None:
        self._planned_ns = self._clock_ns()
        self._plan_total_ns += self._planned_ns - self._start_ns

    def on_gathered(self) -> None:
        self._gathered_ns = self._clock_ns()

    def begin_forward(self) -> None:
        self._forward_ns = self._clock_ns()

    def end_forward(self) -> None:
        assert self._forward_ns is not None, "the end of a forward that never began"
        self._computed_ns = self._clock_ns()
        self._forward_total_ns += self._computed_ns - self._forward_ns

    def note(
        self,
        plan: RoundPlan,
        gating: Gating,
        rows: Sequence[GateRow],
        group_number: int | None,
        num_transfers: int | None,
    ) -> None:
        """The round is over. rows: of all ranks of the group that goes in step, if there is a group_number."""
        self.newest += 1
        start_ns, forward_ns = self._start_ns, self._forward_ns
        is_grouped = group_number is not None
        num_decodes = len(plan.decode)
        self._rounds.append(
            Round(
                self.newest,
                start_ns // 1000,
                (self._planned_ns - start_ns) // 1000,
                (self._clock_ns() - start_ns) // 1000,
                len(plan.prefill),
                plan.num_tokens - num_decodes if plan.prefill else 0,
                num_decodes,
                group_number,
                (self._gathered_ns - self._planned_ns) // 1000 if is_grouped else None,
                None if forward_ns is None else (forward_ns - start_ns) // 1000,
                None if forward_ns is None else (self._computed_ns - forward_ns) // 1000,
                gating.vote,
                gating.decision,
                gating.is_held if gating.has_gate else None,
                max(rows).num_tokens if is_grouped else None,  # what a row begins with
                num_transfers,
            )
        )

    # ------------------------------------------------------------ what others may ask

    def since(self, after: int | None, most: int) -> tuple[tuple[Round, ...], int]:
        """The last rounds, `most` at most, and how many others came later than the one numbered `after`.

        after None: nobody has asked before, so nothing is missing.
        """
        num_new = self.newest - (after or 0)
        num_sent = min(num_new, most, len(self._rounds))
        rounds = tuple(islice(self._rounds, len(self._rounds) - num_sent, None))
        return rounds, 0 if after is None else num_new - num_sent

    def counters(self) -> dict[str, int]:
        """Time of all rounds so far: in the scheduler's plans, and in forwards, with or without rows of this rank."""
        return {
            "plan_microseconds_total": self._plan_total_ns // 1000,
            "forward_microseconds_total": self._forward_total_ns // 1000,
        }
