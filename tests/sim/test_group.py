"""Ranks in lockstep: a round costs its slowest rank, and the gate of the group is every rank's."""

from __future__ import annotations

from random import Random

import pytest

from pdserve.engine.gating import Gating
from pdserve.errors import InternalError
from pdserve.request import RequestId
from pdserve.rounds import GateDecision
from pdserve.scheduler.gate import PrefillGate
from pdserve.scheduler.plan import RoundPlan, StepDone, Submission
from pdserve.scheduler.scheduler import Scheduler
from pdserve.sim.group import EMPTY_ROUND_S
from pdserve.sim.topology import Fused, GateSpec, GroupSpec
from tests.sim.worlds import CHUNK_S, CONFIG, DECODE_S, Everything, asked, check_all_answered, config, run

A, N = 3, 8
DP4 = GroupSpec(4, config(prefill_watermark=9), GateSpec(A, N))


def test_a_round_costs_its_slowest_rank() -> None:
    requests = [asked(0, prompt=64, output=3), asked(1, prompt=32, output=3)]
    seen, totals = run(Fused(GroupSpec(2, CONFIG)), requests)
    assert seen.tokens[0] == seen.tokens[1] == [CHUNK_S, CHUNK_S + DECODE_S, CHUNK_S + 2 * DECODE_S]
    first = seen.rounds[:2]
    assert [(r.rank, r.busy_s, r.ends_s) for r in first] == [(0, CHUNK_S, CHUNK_S), (1, CHUNK_S / 2, CHUNK_S)]
    assert totals.num_group_rounds == 4  # the last finds nothing to do


def test_nodes_do_not_wait_for_each_other() -> None:
    seen, _ = run(Fused(GroupSpec(1, CONFIG), 2), [asked(0, prompt=64, output=1), asked(1, prompt=32, output=1)])
    assert seen.tokens == {0: [CHUNK_S], 1: [CHUNK_S / 2]}


def test_a_rank_without_work_is_in_every_round_and_costs_nothing() -> None:
    seen, totals = run(Fused(GroupSpec(4, CONFIG)), [asked(0, prompt=64, output=3)])
    assert {record.rank for record in seen.rounds} == {0}
    assert totals.counters["rounds"] == 4 * totals.num_group_rounds


def test_requests_go_where_fewest_are_unfinished() -> None:
    seen, _ = run(Fused(GroupSpec(2, CONFIG), 2), [asked(n, output=20) for n in range(9)])
    at_once = [(r.node, r.rank, r.num_prefill_rows) for r in seen.rounds[:4]]
    assert at_once == [(0, 0, 3), (0, 1, 2), (1, 0, 2), (1, 1, 2)]


# ---------------------------------------------------------------- the gate


def busy_group(arrival_s: float) -> Everything:
    """Each of four ranks decodes for long; one more prompt comes to rank 0."""
    streams = [asked(n, prompt=64, output=100) for n in range(4)]
    lone = asked(4, arrival_s, prompt=64, output=2)
    seen, totals = run(Fused(DP4), [*streams, lone])
    check_all_answered([*streams, lone], seen, totals)
    return seen


@pytest.mark.parametrize("num_decodes_before", [0, 1, 5, 7])
def test_a_lone_prompt_in_a_busy_group_waits_for_exactly_r_equal_n(num_decodes_before: int) -> None:
    """R counts from the group's last prefill: that round is R = 0, and the round after N decodes is open."""
    seen = busy_group(CHUNK_S + num_decodes_before * DECODE_S)
    first = next(record for record in seen.rounds if record.num_prefill_rows and record.started_s > 0)
    assert first.started_s == CHUNK_S + N * DECODE_S
    held = [record for record in seen.rounds if record.is_held]
    assert [(record.rank, record.wants_prefill) for record in held] == [(0, True)] * (N - num_decodes_before)


def test_a_prompt_that_has_just_missed_the_window_waits_for_the_next() -> None:
    seen = busy_group(CHUNK_S + N * DECODE_S)
    first = next(record for record in seen.rounds if record.num_prefill_rows and record.started_s > 0)
    assert first.started_s == CHUNK_S + 2 * N * DECODE_S


def test_an_idle_group_prefills_at_once() -> None:
    seen, totals = run(Fused(DP4), [asked(0, 5.0, prompt=64, output=1)])
    assert seen.tokens[0] == [5.0 + CHUNK_S]
    assert totals.counters["gate_windows_idle"] == 1


def test_ranks_that_all_want_prefill_have_it_at_the_next_multiple_of_a() -> None:
    streams = [asked(n, prompt=64, output=100) for n in range(4)]
    more = [asked(4 + n, CHUNK_S, prompt=64, output=2) for n in range(4)]
    seen, totals = run(Fused(DP4), [*streams, *more])
    later = [record for record in seen.rounds if record.num_prefill_rows and record.started_s > 0]
    assert [(record.rank, record.started_s) for record in later] == [(n, CHUNK_S + A * DECODE_S) for n in range(4)]
    assert totals.counters["gate_windows_all"] == 4
    assert totals.counters["gate_rounds_held"] == 4 * A


def test_time_passes_in_rounds_that_are_empty_because_they_are_closed() -> None:
    """Its stream has just ended, the gate is closed: the rank has nothing to run, and the round after is open."""
    one = Fused(GroupSpec(1, config(prefill_watermark=9), GateSpec(A, N)))
    seen, _ = run(one, [asked(0, prompt=64, output=2), asked(1, CHUNK_S + DECODE_S, prompt=64, output=1)])
    assert seen.tokens[1] == [CHUNK_S + DECODE_S + EMPTY_ROUND_S + CHUNK_S]


def test_a_gate_that_never_opens_is_an_error_that_names_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefillGate, "_decide", lambda self: GateDecision.BETWEEN)
    with pytest.raises(InternalError, match="request 7 is stuck at rank 0 of fused node 0"):
        run(Fused(DP4), [asked(7)])


class Twins:
    """Ranks of one group, gated by the given gates, and no time at all."""

    def __init__(self, gates: list[PrefillGate]) -> None:
        self.schedulers = [Scheduler(config(prefill_watermark=9)) for _ in gates]
        self.gatings = [Gating(scheduler, gate) for scheduler, gate in zip(self.schedulers, gates, strict=True)]
        self.gates = list({id(gate): gate for gate in gates}.values())

    def round(self) -> list[RoundPlan]:
        pairs = list(zip(self.schedulers, self.gatings, strict=True))
        plans = [scheduler.plan(gating.options()) for scheduler, gating in pairs]
        rows = [gating.row(plan) for gating, plan in zip(self.gatings, plans, strict=True)]
        for gate in self.gates:
            gate.observe(rows)
        for scheduler, plan in zip(self.schedulers, plans, strict=True):
            if plan.batch_size:
                scheduler.advance([StepDone(plan.round_id, [1] * len(plan.sampled_rows))])
        return plans


def test_one_gate_for_the_group_decides_as_one_for_each_rank_would() -> None:
    """Ranks of a served group cannot share one; fed the same rows, theirs answer alike."""
    random = Random(1)
    shared, apart = Twins([PrefillGate(A, N)] * 3), Twins([PrefillGate(A, N) for _ in range(3)])
    num_prefills = 0
    for number in range(400):
        rank = random.randrange(12)
        if rank < 3:
            prompt, output = range(random.randint(1, 150)), random.randint(1, 20)
            for twins in (shared, apart):
                twins.schedulers[rank].submit(Submission(RequestId(str(number)), prompt, output))
        plans = shared.round()
        assert plans == apart.round()
        num_prefills += sum(bool(plan.prefill) for plan in plans)
    assert [g.counters for g in shared.gatings] == [g.counters for g in apart.gatings]
    assert num_prefills > 40
