"""What a round costs."""

from __future__ import annotations

import dataclasses

import pytest

from pdserve.request import RequestId
from pdserve.scheduler.plan import RoundPlan, Row
from pdserve.sim.costs import RankCosts

LINE = RankCosts(0.1, 0.01, 0.0001, 0.02, 0.003, 0.00001)
CURVED = dataclasses.replace(LINE, decode_curve=((2, 0.05), (4, 0.09), (8, 0.07)))


def decodes(num_rows: int, context: int = 100) -> tuple[Row, ...]:
    return tuple(Row(RequestId(str(at)), at, context - 1, context, (), True) for at in range(num_rows))


def chunk(start: int, end: int) -> tuple[Row, ...]:
    return (Row(RequestId("p"), 99, start, end, (), False),)


def test_a_chunk_pays_for_its_tokens_and_their_mean_context() -> None:
    assert LINE.round_s(RoundPlan(0, (), chunk(64, 128), ())) == pytest.approx(0.1 + 64 * (0.01 + 0.0001 * 96))


def test_decodes_pay_a_fixed_part_and_for_rows_and_context() -> None:
    assert LINE.round_s(RoundPlan(0, (), (), decodes(5))) == pytest.approx(0.02 + 5 * 0.003 + 500 * 0.00001)


def test_a_mixed_round_pays_the_larger_fixed_part_once() -> None:
    both = RoundPlan(0, (), chunk(0, 64), decodes(5))
    assert LINE.round_s(both) == pytest.approx(0.1 + 64 * (0.01 + 0.0001 * 32) + 5 * 0.003 + 500 * 0.00001)
    assert CURVED.round_s(both) == pytest.approx(LINE.round_s(both))


@pytest.mark.parametrize(
    ("num_rows", "seconds"), [(1, 0.05), (2, 0.05), (3, 0.07), (4, 0.09), (6, 0.08), (8, 0.07), (10, 0.076)]
)
def test_a_curve_is_followed_between_its_points_and_goes_on_as_the_line(num_rows: int, seconds: float) -> None:
    assert CURVED.decode_rows_s(num_rows) == pytest.approx(seconds)
    plan = RoundPlan(0, (), (), decodes(num_rows))
    assert CURVED.round_s(plan) == pytest.approx(seconds + num_rows * 100 * 0.00001)


@pytest.mark.parametrize(("num_tokens", "seconds"), [(1, 0.2), (16, 0.2), (40, 0.25), (64, 0.3), (74, 0.4)])
def test_chunks_follow_their_curve_by_the_tokens_of_all_of_them(num_tokens: int, seconds: float) -> None:
    curved = dataclasses.replace(LINE, prefill_curve=((16, 0.2), (64, 0.3)))
    both = chunk(0, num_tokens - num_tokens // 2) + chunk(0, num_tokens // 2)
    context = sum(row.end * row.end / 2 for row in both)
    assert curved.round_s(RoundPlan(0, (), both, ())) == pytest.approx(seconds + context * 0.0001)


def test_an_empty_round_costs_nothing() -> None:
    assert LINE.round_s(RoundPlan(0, (), (), ())) == 0.0
