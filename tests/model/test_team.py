"""When one thread computes for all, and when they meet again."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from pdserve.model.team import (
    CONTENDED,
    FIRST_HOLD_S,
    FREE,
    LONGEST_HOLD_S,
    MAX_SECONDS_AWAY,
    MEMORY_S,
    Team,
    idle_seconds,
)

ROUND_S = 0.005


@dataclass
class Rounds:
    """Rounds of a team of two, on a machine whose clock and idle cores are told."""

    now_s: float = 0.0
    idle_s: float = 0.0
    team: Team = field(init=False)

    def __post_init__(self) -> None:
        self.team = Team(2, lambda: self.now_s, lambda: self.idle_s)

    def run(self, seconds: float, *, away: float = 0.0, idle: float = 0.0) -> None:
        """For so long. away: the share of their time that the threads are off their cores. idle: cores that are."""
        for _ in range(round(seconds / ROUND_S)):
            self.now_s += ROUND_S
            self.idle_s += idle * ROUND_S
            self.team.note(ROUND_S, away * ROUND_S * self.team.num_threads)

    def seconds_until(self, num_threads: int, *, away: float = 0.0, idle: float = 0.0) -> float:
        began_s = self.now_s
        while self.team.num_threads != num_threads:
            assert self.now_s < began_s + 100, "it never comes to that"
            self.run(ROUND_S, away=away, idle=idle)
        return self.now_s - began_s


def test_threads_that_keep_their_cores_stay_together() -> None:
    rounds = Rounds()
    rounds.run(10.0, away=0.9 * CONTENDED)
    assert rounds.team.num_threads == 2


def test_a_late_round_is_no_reason_unless_it_is_very_late() -> None:
    rounds = Rounds()
    rounds.run(1.0)
    rounds.run(ROUND_S, away=1.0)
    rounds.run(1.0)
    assert rounds.team.num_threads == 2
    rounds.team.note(1.0, 1.1 * MAX_SECONDS_AWAY)
    assert rounds.team.num_threads == 1


def test_one_goes_alone_while_others_have_the_cores_and_no_longer(caplog: pytest.LogCaptureFixture) -> None:
    rounds = Rounds()
    assert rounds.seconds_until(1, away=0.5) < 2 * MEMORY_S
    assert "other processes compute on this rank's cores" in caplog.text
    rounds.run(10.0, idle=0.9 * FREE)
    assert rounds.team.num_threads == 1
    assert rounds.seconds_until(2, idle=1.1 * FREE) <= 2 * FIRST_HOLD_S


def test_it_stays_alone_for_longer_each_time_that_the_cores_were_not_free(caplog: pytest.LogCaptureFixture) -> None:
    """As beside a process that computes now and then."""
    rounds = Rounds()
    held_s = []
    for _ in range(8):
        rounds.seconds_until(1, away=0.5)
        held_s.append(rounds.seconds_until(2, idle=1.0))
    longer = [min(FIRST_HOLD_S * 2**times, LONGEST_HOLD_S) for times in range(len(held_s))]
    assert longer[-1] == LONGEST_HOLD_S
    assert held_s == pytest.approx(longer, abs=2 * ROUND_S)
    assert len(caplog.records) == 1  # it is told once
    rounds.run(2 * LONGEST_HOLD_S)
    rounds.seconds_until(1, away=0.5)
    assert rounds.seconds_until(2, idle=1.0) == pytest.approx(held_s[0], abs=2 * ROUND_S)
    assert len(caplog.records) == 2


def test_a_rank_of_one_thread_has_nothing_to_choose() -> None:
    team = Team(1)
    for _ in range(100):
        team.note(1.0, 1.0)
    assert team.num_threads == 1


def test_idle_time_is_that_of_this_machine_and_only_grows() -> None:
    first, second = idle_seconds(), idle_seconds()
    assert 0.0 < first <= second
