"""The prefill gate: its table, its counter, and what it promises a group of ranks."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from pdserve.rounds import GateDecision
from pdserve.scheduler.gate import IDLE_ROW, GateRow, PrefillGate, Window
from tests.scheduler.group import Group

DECODES = GateRow(3, 3, 0, wants_prefill=False, has_decode_work=True)
DECODES_AND_WANTS = GateRow(3, 3, 0, wants_prefill=True, has_decode_work=True)
WANTS = GateRow(0, 0, 0, wants_prefill=True, has_decode_work=False)
PREFILLS = GateRow(16, 1, 1, wants_prefill=True, has_decode_work=True)


def after(gate: PrefillGate, *rounds: Sequence[GateRow]) -> PrefillGate:
    for rows in rounds:
        gate.observe(rows)
    return gate


# ---------------------------------------------------------------- the table


def test_a_new_gate_is_open_as_it_has_seen_only_idle_ranks() -> None:
    assert PrefillGate(4, 16).window is Window.IDLE


def test_any_is_looked_at_before_all() -> None:
    """At R = 8 both points fall: one wish is enough, though not every rank wants."""
    gate = after(PrefillGate(4, 8), *[[DECODES_AND_WANTS, DECODES]] * 8)
    assert (gate.rounds_since_prefill, gate.window) == (8, Window.ANY)


def test_round_zero_is_an_all_point_and_never_an_any_point() -> None:
    gate = after(PrefillGate(1, 1), [PREFILLS, DECODES])
    assert (gate.rounds_since_prefill, gate.is_open) == (0, False)
    assert after(gate, [PREFILLS, DECODES_AND_WANTS]).window is Window.ALL


def test_all_asks_each_rank_to_want_or_to_have_nothing_to_decode() -> None:
    for rows, is_open in (
        ([DECODES_AND_WANTS, DECODES_AND_WANTS], True),
        ([DECODES_AND_WANTS, IDLE_ROW], True),
        ([DECODES_AND_WANTS, DECODES], False),
        ([DECODES, DECODES], False),
    ):
        assert after(PrefillGate(4, 16), *[rows] * 4).is_open == is_open, rows


def test_between_the_points_the_gate_is_closed_to_everybody() -> None:
    gate = PrefillGate(4, 16)
    for rounds in range(1, 16):
        after(gate, [DECODES_AND_WANTS] * 2)
        assert gate.is_open == (rounds % 4 == 0), rounds


def test_the_counter_restarts_with_a_prefill_in_any_rank() -> None:
    gate = after(PrefillGate(4, 16), *[[DECODES, DECODES]] * 5, [DECODES, PREFILLS])
    assert gate.rounds_since_prefill == 0


def test_the_counter_restarts_when_all_ranks_are_idle_and_only_then() -> None:
    gate = after(PrefillGate(4, 16), *[[DECODES, IDLE_ROW]] * 5)
    assert gate.rounds_since_prefill == 5
    assert after(gate, [IDLE_ROW, IDLE_ROW]).rounds_since_prefill == 0


def test_a_window_in_which_nothing_could_be_scheduled_does_not_restart_the_counter() -> None:
    gate = after(PrefillGate(4, 16), *[[DECODES_AND_WANTS]] * 4)
    assert gate.is_open
    assert after(gate, [DECODES_AND_WANTS]).rounds_since_prefill == 5


def test_after_m_rounds_of_prefill_the_next_is_closed_whatever_the_ranks_want() -> None:
    gate = PrefillGate(1, 1, max_open_rounds=3)
    opened = []
    for _ in range(9):
        opened.append(gate.is_open)
        after(gate, [PREFILLS if gate.is_open else DECODES_AND_WANTS])
    assert opened == [True, True, True, False] * 2 + [True]


def test_a_pressured_rank_that_decodes_blocks_all_for_its_group() -> None:
    """Above the watermark it wants nothing, so its peers wait for ANY."""
    opened = [after(PrefillGate(4, 16), *[[DECODES_AND_WANTS, DECODES]] * r).is_open for r in range(1, 17)]
    assert opened == [False] * 15 + [True]


# What two ranks did in the last rounds, with A = 2, N = 4 and at most two rounds with prefill in a row.
REASONS: dict[GateDecision, list[list[GateRow]]] = {
    GateDecision.IDLE: [[WANTS, IDLE_ROW]],
    GateDecision.BETWEEN: [[DECODES_AND_WANTS, DECODES_AND_WANTS]],
    GateDecision.ALL: [[DECODES_AND_WANTS, DECODES_AND_WANTS]] * 2,
    GateDecision.DECODING: [[DECODES_AND_WANTS, DECODES]] * 2,
    GateDecision.ANY: [[DECODES_AND_WANTS, DECODES]] * 4,
    GateDecision.UNWANTED: [[DECODES, DECODES]] * 4,
    GateDecision.BURST: [[PREFILLS, DECODES_AND_WANTS]],
    GateDecision.LIMIT: [[PREFILLS, DECODES_AND_WANTS]] * 2,
}


@pytest.mark.parametrize("decision", REASONS)
def test_the_gate_says_why_it_is_open_or_closed(decision: GateDecision) -> None:
    gate = after(PrefillGate(2, 4, max_open_rounds=2), *REASONS[decision])
    assert (gate.decision, gate.is_open) == (decision, decision.is_open)


def test_every_reason_is_a_gate_s_but_that_of_the_cadence() -> None:
    assert set(GateDecision) - set(REASONS) == {GateDecision.CADENCE}


# ---------------------------------------------------------------- every rank decides alike


def reference(rows_by_round: Sequence[Sequence[GateRow]], a: int, n: int) -> bool:
    """The spec's table, written again: whether the round after these is open."""
    rounds = 0
    for rows in rows_by_round:
        if sum(row.num_extends for row in rows) > 0 or sum(row.num_tokens for row in rows) == 0:
            rounds = 0
        else:
            rounds += 1
    last = rows_by_round[-1] if rows_by_round else [IDLE_ROW]
    if rounds > 0 and rounds % n == 0 and [row for row in last if row.wants_prefill]:
        return True
    blockers = [row for row in last if row.has_decode_work and not row.wants_prefill]
    return rounds % a == 0 and not blockers


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_ranks_never_disagree_and_always_agree_with_the_table(num_ranks: int) -> None:
    rng = random.Random(num_ranks)
    seen: Counter[Window] = Counter()
    for _ in range(120):
        a = rng.randint(1, 5)
        n = rng.randint(a, 12)
        gates = [PrefillGate(a, n) for _ in range(num_ranks)]
        history: list[list[GateRow]] = []
        shares = rng.random() ** 2, rng.random(), rng.random()
        for _ in range(120):
            rows = [random_row(rng, *shares) for _ in range(num_ranks)]
            history.append(rows)
            for gate in gates:
                gate.observe(rows)
            windows = {gate.window for gate in gates}
            assert len(windows) == 1
            assert gates[0].is_open == reference(history, a, n)
            seen.update(windows)
    assert all(seen[window] >= 100 for window in Window), seen


def random_row(rng: random.Random, prefills: float, wants: float, decodes: float) -> GateRow:
    num_extends = int(rng.random() < prefills)
    num_decodes = rng.randint(1, 4) if rng.random() < decodes else 0
    return GateRow(
        num_extends + num_decodes, num_extends + num_decodes, num_extends, rng.random() < wants, num_decodes > 0
    )


# ---------------------------------------------------------------- real schedulers in a group


def test_an_idle_engine_admits_at_once() -> None:
    group = Group(4, attempt=4, any_rank=16)
    group.ranks[2].submit("a", range(6))
    assert group.round()[2].num_extends == 1


def test_a_lone_arrival_among_ranks_that_decode_and_want_nothing_opens_at_exactly_n() -> None:
    group = Group(3, attempt=4, any_rank=9)
    for rank in group.ranks:
        rank.submit("runs", range(4), 40)
    group.round()
    group.ranks[1].submit("late", range(20, 26))
    rounds = group.rounds_until(lambda plans: plans[1].num_extends > 0)
    assert (rounds, group.gates[1].rounds_since_prefill) == (10, 0), "R = 0 is closed, then R counts to N = 9"


@pytest.mark.parametrize("arrives_after", range(1, 9))
def test_on_one_rank_a_lone_arrival_opens_at_the_next_multiple_of_a(arrives_after: int) -> None:
    group = Group(1, attempt=4, any_rank=16)
    group.ranks[0].submit("runs", range(4), 50)
    group.rounds(1 + arrives_after)  # its prefill, and decodes that bring R to arrives_after - 1
    group.ranks[0].submit("late", range(20, 26))
    group.rounds_until(lambda plans: plans[0].num_extends > 0)
    assert (group.num_rounds - 1 - 1) % 4 == 0, "the round of R = 0, 4, 8 … since the first prefill"


def test_a_burst_drains_in_consecutive_rounds() -> None:
    group = Group(2, attempt=4, any_rank=16)
    for rank in group.ranks:
        rank.submit("runs", range(4), 30)
    group.rounds(3)
    for rank in group.ranks:
        for name in ("a", "b", "c"):
            rank.submit(name, [ord(name)] * 13, 2)
    group.rounds_until(lambda plans: any(plan.num_extends for plan in plans))
    assert [[plan.num_extends > 0 for plan in group.round()] for _ in range(2)] == [[True, True]] * 2


def test_a_rank_whose_fresh_wish_is_gone_prefills_nothing_though_the_vote_is_open() -> None:
    group = Group(2, attempt=1, any_rank=1)
    for rank in group.ranks:
        rank.submit("runs", range(4), 30)
    group.round()
    for rank in group.ranks:
        rank.submit("a", range(20, 26))
    group.round()
    group.ranks[0].abort("a")
    plans = group.round()
    assert [plan.num_extends for plan in plans] == [0, 1]
    assert plans[0].decode, "an open window without a wish plans as a closed one"


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_with_room_a_prompt_waits_for_n_plus_one_plans_at_most(num_ranks: int) -> None:
    rng = random.Random(num_ranks)
    worst = 0
    for _ in range(12):
        a = rng.randint(1, 4)
        n = rng.randint(a, 9)
        group = Group(num_ranks, attempt=a, any_rank=n, num_blocks=400, max_batch_size=40, max_scheduled_tokens=64)
        waits = group.run_with_arrivals(rng, num_rounds=120, most_live=12)
        worst = max(worst, max(waits) - (n + 1))
        group.check_alike()
    assert worst <= 0, f"a chunk was planned {worst} plans too late"
