"""How soon a rank follows one that died, and when none does."""

from __future__ import annotations

from pdserve.node.restarts import MAX_DEATHS, Restarts


def test_ranks_that_die_young_are_followed_ever_more_slowly_up_to_half_a_minute() -> None:
    restarts = Restarts()
    delays = [restarts.delay_s(born_s=50.0 * number - 20.0, died_s=50.0 * number) for number in range(8)]
    assert delays == [1, 2, 4, 8, 16, 30, 30, 30]


def test_a_rank_that_lived_for_a_minute_starts_that_over() -> None:
    restarts = Restarts()
    assert [restarts.delay_s(0.0, 1.0), restarts.delay_s(2.0, 3.0)] == [1, 2]
    assert restarts.delay_s(5.0, 65.0) == 1
    assert restarts.delay_s(66.0, 67.0) == 2


def test_more_than_five_deaths_within_a_minute_are_the_end() -> None:
    restarts = Restarts()
    delays = [restarts.delay_s(float(number), float(number)) for number in range(MAX_DEATHS + 1)]
    assert delays == [1, 2, 4, 8, 16, None]


def test_deaths_of_more_than_a_minute_ago_do_not_count() -> None:
    restarts = Restarts()
    for number in range(MAX_DEATHS):
        restarts.delay_s(float(number), float(number))
    assert restarts.delay_s(59.0, 60.0) is not None  # the first was at 0
