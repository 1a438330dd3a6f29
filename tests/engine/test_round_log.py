"""What a rank remembers of its rounds, and what it tells of them."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest

from pdserve.engine.gating import Gating
from pdserve.engine.messages import AskRounds, RoundsReport
from pdserve.engine.round_log import RoundLog
from pdserve.request import RequestId
from pdserve.rounds import GateDecision, Round
from pdserve.scheduler.config import CadenceLimits, SchedulerConfig
from pdserve.scheduler.gate import GateRow, PrefillGate
from pdserve.scheduler.plan import RoundPlan, Row
from pdserve.scheduler.scheduler import Scheduler
from tests.engine.loops import Loop, running
from tests.engine.test_rank_policies import GATED, serve_beside_a_stream
from tests.roles.cluster import prompt_of
from tests.roles.inside import CHUNK, Size

STEP_US = 10
ROW = Row(RequestId("a"), 0, 0, 5, (), samples=True)
PLAN = RoundPlan(1, prefill=(ROW, ROW), decode=(ROW._replace(start=4),))


def ungated() -> Gating:
    return Gating(Scheduler(SchedulerConfig(8, 4, 4, 8, 64)), None)


def gated() -> Gating:
    return Gating(Scheduler(SchedulerConfig(8, 4, 4, 8, 64, prefill_watermark=9)), PrefillGate(2, 4))


def log_of(num_rounds: int, size: int = 4) -> RoundLog:
    """Its clock moves on by STEP_US each time it is looked at."""
    times = (STEP_US * 1000 * number for number in count())
    log = RoundLog(size, clock_ns=lambda: next(times), wall_ns=lambda: 7_000_000_000)
    for _ in range(num_rounds):
        note(log)
    return log


def note(log: RoundLog, gating: Gating | None = None, group_number: int | None = None) -> None:
    log.begin()
    log.on_planned()
    log.on_gathered()
    log.begin_forward()
    log.end_forward()
    log.note(
        PLAN, gating or ungated(), (GateRow(11, 3, 2, False, True), GateRow(9, 1, 1, True, True)), group_number, None
    )


def numbers(rounds: tuple[Round, ...]) -> list[int]:
    return [one.number for one in rounds]


def test_the_newest_rounds_are_kept_and_the_rest_forgotten() -> None:
    assert numbers(log_of(10).since(None, 100)[0]) == [7, 8, 9, 10]


@pytest.mark.parametrize(
    ("after", "most", "wanted", "num_lost"),
    [
        (None, 2, [9, 10], 0),  # nobody has asked before, so nothing is missing
        (None, 0, [], 0),
        (8, 100, [9, 10], 0),
        (6, 100, [7, 8, 9, 10], 0),
        (5, 100, [7, 8, 9, 10], 1),
        (0, 100, [7, 8, 9, 10], 6),
        (6, 1, [10], 3),
        (10, 100, [], 0),
    ],
)
def test_who_asks_for_what_is_new_gets_it_or_hears_how_much_is_lost(
    after: int | None, most: int, wanted: list[int], num_lost: int
) -> None:
    rounds, lost = log_of(10).since(after, most)
    assert (numbers(rounds), lost) == (wanted, num_lost)


def test_a_round_without_group_gate_or_transport_has_no_values_of_them() -> None:
    ((one,), _) = log_of(1).since(None, 1)
    assert one == Round(
        number=1,
        start_us=STEP_US,
        plan_us=STEP_US,
        total_us=5 * STEP_US,
        num_prefill_rows=2,
        num_prefill_tokens=10,
        num_decode_rows=1,
        forward_at_us=3 * STEP_US,
        forward_us=STEP_US,
    )


def test_a_round_of_a_gated_group_has_its_number_its_largest_row_and_the_decision() -> None:
    log, gating = log_of(0), gated()
    gating.options()
    gating.row(PLAN)
    note(log, gating, group_number=12)
    ((one,), _) = log.since(None, 1)
    assert (one.group_number, one.step, one.gather_us, one.num_largest_tokens) == (12, 12, STEP_US, 11)
    assert (one.decision, one.vote, one.is_held) == (GateDecision.IDLE, False, False)


def test_a_round_without_a_forward_has_no_time_of_one() -> None:
    log = log_of(1)
    log.begin()
    log.on_planned()
    log.on_gathered()
    log.note(RoundPlan(2), ungated(), (), None, 0)
    ((before, one), _) = log.since(None, 2)
    assert before.forward_us == STEP_US
    assert (one.forward_at_us, one.forward_us, one.num_transfers) == (None, None, 0)


def test_times_add_up_and_the_clock_is_tied_to_the_time_of_day() -> None:
    log = log_of(3)
    assert log.counters() == {"plan_microseconds_total": 3 * STEP_US, "forward_microseconds_total": 3 * STEP_US}
    assert log.unix_offset_us == 7_000_000  # minus the first look at the clock, which was 0


# ---------------------------------------------------------------- in a real loop


def rounds_of(loop: Loop, after: int | None = None, most: int = 4096) -> RoundsReport:
    loop.front.send(AskRounds(3, after, most))
    report = loop.front.hear(RoundsReport)
    assert report.number == 3
    return report


def test_a_loop_tells_of_every_round_it_planned(sockets: Path) -> None:
    with running(sockets, Size()) as loop:
        serve_beside_a_stream(loop, prompt_of(3 * CHUNK))
        before, report, counters = loop.counters(), rounds_of(loop), loop.until_idle()
        assert before["rounds"] <= report.newest <= counters["rounds"]
        assert numbers(report.rounds) == list(range(1, report.newest + 1))
        computed = [one for one in report.rounds if one.forward_us is not None]
        plans = loop.plans()
        assert [(one.num_prefill_rows, one.num_prefill_tokens, one.num_decode_rows) for one in computed] == [
            (len(plan.prefill), plan.num_tokens - len(plan.decode), len(plan.decode)) for plan in plans
        ]
        assert all(one.total_us >= one.plan_us + (one.forward_us or 0) for one in report.rounds)
        assert sum(one.forward_us or 0 for one in computed) <= counters["forward_microseconds_total"]
        assert {one.decision for one in report.rounds} == {None}


def test_nothing_is_told_unless_asked_and_only_what_is_new(sockets: Path) -> None:
    with running(sockets, Size()) as loop:
        loop.submit("a", [1, 2, 3], 5)
        loop.until_over("a")
        first = rounds_of(loop)
        loop.submit("b", [1, 2, 3], 5)
        loop.until_over("b")
        second = rounds_of(loop, after=first.newest)
        assert numbers(first.rounds + second.rounds) == list(range(1, second.newest + 1))
        assert sum(one.num_decode_rows for one in second.rounds) == 4
        loop.until_idle()
        assert sum(isinstance(message, RoundsReport) for message in loop.front.seen) == 2


def test_a_round_before_which_the_cadence_owed_a_decode_says_so(sockets: Path) -> None:
    with running(sockets, Size(cadence=CadenceLimits(prefill_rounds=2))) as loop:
        shape = serve_beside_a_stream(loop, prompt_of(6 * CHUNK))
        computed = [one for one in rounds_of(loop).rounds if one.forward_us is not None][1:]
        due = [one.decision is GateDecision.CADENCE for one in computed]
        assert shape.startswith("dPPdPPdPPd")
        # After two rounds of prefill a decode is due; the stream's own prompt was one of them.
        assert due[:10] == [False, False, False, True, False, False, True, False, False, True]


def test_the_rounds_of_a_gated_rank_say_why_they_could_prefill_or_not(sockets: Path) -> None:
    with running(sockets, GATED) as loop:
        serve_beside_a_stream(loop, prompt_of(3 * CHUNK))
        rounds = rounds_of(loop).rounds
        said = ["" if one.decision is None else one.decision.value for one in rounds]
        held = [one.decision.value for one in rounds if one.is_held and one.decision is not None]
        prefilled = [one.decision.value for one in rounds if one.num_prefill_rows and one.decision is not None]
        assert held == ["between"] * 3
        assert prefilled == ["idle", "all", "burst", "burst"]
        assert "" not in said
        assert "decoding" in said  # once the prompt is through, the stream wants no more of them
        assert all(one.vote is not None and one.group_number is None for one in rounds)
