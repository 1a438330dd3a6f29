"""Ranks that go through their rounds in step: what they tell each other once a round, and when all of them may sleep.

    asleep ── Wake ──▶ plan ─▶ agree ─▶ execute ─▶ … ── nobody has anything to do ──▶ asleep
                        ▲                           │ somebody has
                        └───────────────────────────┘

Only the front wakes a group, all ranks with the same number: a rank that started a round of its own accord would wait
in it for the others. All of them sleep or none, as they judge by the same rows, which say which wake each has heard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import NamedTuple, Protocol

from pdserve.scheduler.gate import GateRow


class Said(NamedTuple):
    """What a rank tells the others of the round it has planned. last_wake: the number of the last Wake it heard."""

    row: GateRow
    wants_round: bool
    last_wake: int

    @property
    def is_at_rest(self) -> bool:
        return not (self.row.num_tokens or self.wants_round)


# One rank's integers in, those of all ranks out, in rank order. Blocks until every rank has called it.
Gather = Callable[[Sequence[int]], Sequence[Sequence[int]]]
NUM_INTEGERS = len(GateRow._fields) + 2


class Group(Protocol):
    """The loop's view of the ranks it goes in step with. Owned by the loop thread."""

    is_asleep: bool  # no round is to be started
    others_compute: bool  # some other rank's last planned round has rows

    @property
    def round_number(self) -> int | None:
        """Of the last round, the same in all ranks; None where they don't go in step."""

    def agree(self, row: GateRow, *, wants_round: bool) -> Sequence[GateRow]:
        """Once a round, after it was planned: the rows of all ranks, in rank order.

        wants_round: the next one may plan more than this one did though nothing else happens.
        """

    def on_news(self) -> None:
        """Something came in that a round should see."""

    def on_wake(self, number: int) -> None:
        """The front's word to all ranks; numbers only grow."""

    def counters(self) -> dict[str, int]:
        """What is counted, by name."""


class Lone:
    """One rank, which needs nobody's word."""

    def __init__(self) -> None:
        self.is_asleep = False
        self.others_compute = False

    @property
    def round_number(self) -> int | None:
        return None

    def agree(self, row: GateRow, *, wants_round: bool) -> Sequence[GateRow]:
        self.is_asleep = not (row.num_tokens or wants_round)
        return (row,)

    def on_news(self) -> None:
        self.is_asleep = False

    def on_wake(self, number: int) -> None:
        self.is_asleep = False

    def counters(self) -> dict[str, int]:
        return {}


class InStep:
    """One rank of several. gather: see Gather. ask_for_wake: has the front wake the whole group."""

    def __init__(self, rank: int, gather: Gather, ask_for_wake: Callable[[], None]) -> None:
        self._rank = rank
        self._gather = gather
        self._ask_for_wake = ask_for_wake
        self._last_wake = 0
        self._has_asked = False
        self.is_asleep = False
        self.others_compute = False
        self._num_rounds = 0
        self._num_idle_rounds = 0
        self._num_prefill_rounds = 0
        self._gather_ns = 0

    @property
    def round_number(self) -> int | None:
        return self._num_rounds

    def agree(self, row: GateRow, *, wants_round: bool) -> Sequence[GateRow]:
        line = self.line(row, wants_round=wants_round)
        start_ns = perf_counter_ns()
        lines = self._gather(line)
        self._gather_ns += perf_counter_ns() - start_ns
        return self.hear(lines)

    def line(self, row: GateRow, *, wants_round: bool) -> Sequence[int]:
        """What this rank tells of the round it has planned."""
        self._num_rounds += 1
        self._num_idle_rounds += row.num_tokens == 0
        return (*row, wants_round, self._last_wake)

    def hear(self, lines: Sequence[Sequence[int]]) -> Sequence[GateRow]:
        """What all of them told, in rank order."""
        said = [_said(line) for line in lines]
        self._num_prefill_rounds += any(one.row.num_extends for one in said)
        self.others_compute = any(one.row.num_tokens for rank, one in enumerate(said) if rank != self._rank)
        # Whoever has heard of a later wake may have work that came with it, which its row does not show yet.
        have_heard_the_same = len({one.last_wake for one in said}) == 1
        self.is_asleep = have_heard_the_same and all(one.is_at_rest for one in said)
        self._has_asked = False
        return [one.row for one in said]

    def on_news(self) -> None:
        if self.is_asleep and not self._has_asked:
            self._has_asked = True
            self._ask_for_wake()

    def on_wake(self, number: int) -> None:
        assert number > self._last_wake, f"wake {number} after {self._last_wake}"
        self._last_wake = number
        self.is_asleep = False

    def counters(self) -> dict[str, int]:
        """The group's rounds: all, those with prefill anywhere, those without rows of this rank; time in the gather."""
        return {
            "group_rounds_total": self._num_rounds,
            "group_prefill_rounds_total": self._num_prefill_rounds,
            "group_idle_rounds_total": self._num_idle_rounds,
            "group_gather_microseconds_total": self._gather_ns // 1000,
        }


def _said(line: Sequence[int]) -> Said:
    num_tokens, batch_size, num_extends, vote, has_decode_work, wants_round, last_wake = line
    row = GateRow(num_tokens, batch_size, num_extends, bool(vote), bool(has_decode_work))
    return Said(row, bool(wants_round), last_wake)
