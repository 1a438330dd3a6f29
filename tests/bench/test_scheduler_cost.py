"""The bench measures what it says; how fast anything is, it says itself."""

from __future__ import annotations

import pytest

from pdserve.bench import scheduler_cost
from pdserve.bench.scheduler_cost import measure_scheduler_cost

CASES = [(1, 0, "-"), (3, 0, "-"), (1, 40, "a slot"), (3, 40, "a slot"), (1, 40, "blocks"), (3, 40, "blocks")]


def test_every_case_is_timed_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tokenspeed_scheduler")
    monkeypatch.setattr(scheduler_cost, "MAX_CYCLES", 1)
    rows = measure_scheduler_cost(row_counts=(1, 3), num_waiting=40)
    assert [(row.num_rows, row.num_waiting, row.waits_for) for row in rows] == CASES
    assert all(0 < row.ours.calls_us <= row.ours.caller_us for row in rows)
    assert all(row.theirs and 0 < row.theirs.calls_us <= row.theirs.caller_us for row in rows)


def test_without_the_other_scheduler_ours_is_timed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_cost, "find_spec", {}.get)
    monkeypatch.setattr(scheduler_cost, "MAX_CYCLES", 1)
    rows = measure_scheduler_cost(row_counts=(1,), num_waiting=4)
    assert len(rows) == 3
    assert all(row.ours.calls_us > 0 and row.theirs is None for row in rows)
