"""How long a round takes lately: what is seen counts, one bad minute is forgotten, idleness makes nothing forgotten."""

from __future__ import annotations

import pytest

from pdserve.engine.pace import MAX_SCALE, WINDOW_S, Pace

FULL = 512


class World:
    """A hand-set clock, and rounds on it."""

    def __init__(self, warm_up_s: float) -> None:
        self.now_s = 1000.0
        self.pace = Pace(warm_up_s, FULL, clock=lambda: self.now_s)

    def rounds(self, num_tokens: int, elapsed_s: float, *, for_s: float) -> float:
        end_s = self.now_s + for_s
        while self.now_s < end_s:
            self.now_s += elapsed_s
            self.pace.observe(num_tokens, elapsed_s)
        return self.pace.longest_s


@pytest.fixture
def slow_start() -> World:
    """The warm-up ran on a machine that was busy with other things."""
    return World(warm_up_s=28.0)


def test_until_a_chunk_was_seen_the_warm_up_counts(slow_start: World) -> None:
    assert slow_start.pace.longest_s == 28.0
    assert slow_start.rounds(0, 0.1, for_s=1.0) == 28.0
    assert slow_start.rounds(1, 0.1, for_s=1.0) == 28.0, "a round of one token says nothing of a chunk"


@pytest.mark.parametrize("num_tokens", [FULL, FULL // 8])
def test_one_good_chunk_is_enough_to_forget_a_bad_warm_up(slow_start: World, num_tokens: int) -> None:
    assert slow_start.rounds(num_tokens, 0.5, for_s=0.5) == pytest.approx(0.5 * FULL / num_tokens)


def test_a_bad_warm_up_is_forgotten_after_two_minutes_of_anything(slow_start: World) -> None:
    assert slow_start.rounds(1, 0.01, for_s=2 * WINDOW_S + 1) == pytest.approx(0.01 * MAX_SCALE)


def test_a_bad_chunk_counts_for_a_window_and_is_forgotten_after_two(slow_start: World) -> None:
    slow_start.rounds(FULL, 20.0, for_s=20.0)
    assert slow_start.rounds(FULL, 0.5, for_s=WINDOW_S - 21) == 20.0
    assert slow_start.rounds(FULL, 0.5, for_s=2 * WINDOW_S) == 0.5


def test_an_idle_night_makes_nothing_forgotten(slow_start: World) -> None:
    slow_start.rounds(FULL, 6.0, for_s=6.0)
    slow_start.now_s += 30_000.0
    assert slow_start.pace.longest_s == 6.0
    assert slow_start.rounds(0, 0.1, for_s=0.1) == 6.0


def test_the_first_long_prompt_after_short_ones_is_no_surprise(slow_start: World) -> None:
    """They told how quick this machine is now."""
    assert slow_start.rounds(FULL // 4, 3.0, for_s=3 * WINDOW_S) == pytest.approx(12.0)


def test_a_round_in_which_the_process_was_stopped_says_nothing(slow_start: World) -> None:
    slow_start.rounds(FULL, 0.5, for_s=0.5)
    slow_start.pace.excuse()
    slow_start.pace.observe(FULL, 90.0)
    assert slow_start.pace.longest_s == 0.5
    slow_start.pace.observe(FULL, 0.7)
    assert slow_start.pace.longest_s == 0.7
