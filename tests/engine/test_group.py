"""Ranks in step: they agree on every round, sleep and wake together, whatever happens to each of them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest

from pdserve.engine.gating import Gating
from pdserve.engine.group import InStep, Lone
from pdserve.request import RequestId
from pdserve.scheduler.config import GATE_WATERMARK, SchedulerConfig
from pdserve.scheduler.gate import GateRow, PrefillGate
from pdserve.scheduler.plan import RoundPlan, StepDone, Submission
from pdserve.scheduler.scheduler import Scheduler

A, N = 3, 12
BLOCK_SIZE, CHUNK = 16, 32
IDLE = GateRow(0, 0, 0, False, False)
BUSY = GateRow(1, 1, 0, False, True)


@dataclass
class Sleepers:
    """Ranks of one group, and the front that wakes them."""

    num_ranks: int
    ranks: list[InStep] = field(init=False)
    asked: list[int] = field(default_factory=list)
    num_wakes: int = 0

    def __post_init__(self) -> None:
        def never(line: Sequence[int]) -> Sequence[Sequence[int]]:
            raise AssertionError("rounds are made by hand")

        self.ranks = [InStep(n, never, lambda n=n: self.asked.append(n)) for n in range(self.num_ranks)]

    def round(self, *rows: GateRow, wants_round: int | None = None) -> list[Sequence[GateRow]]:
        lines = [
            rank.line(row, wants_round=number == wants_round)
            for number, (rank, row) in enumerate(zip(self.ranks, rows, strict=True))
        ]
        return [rank.hear(lines) for rank in self.ranks]

    def wake(self, *ranks: int) -> None:
        self.num_wakes += 1
        for number in ranks or range(self.num_ranks):
            self.ranks[number].on_wake(self.num_wakes)

    @property
    def asleep(self) -> list[bool]:
        return [rank.is_asleep for rank in self.ranks]


def test_every_rank_hears_the_rows_of_all_in_rank_order() -> None:
    for heard in Sleepers(3).round(IDLE, BUSY, GateRow(7, 2, 1, True, True)):
        assert list(heard) == [IDLE, BUSY, GateRow(7, 2, 1, True, True)]


def test_a_rank_computes_beside_others_only_where_they_have_rows() -> None:
    group = Sleepers(2)
    group.round(IDLE, BUSY)
    assert [rank.others_compute for rank in group.ranks] == [True, False]


def test_all_sleep_when_nobody_has_anything_to_do_and_none_before() -> None:
    group = Sleepers(2)
    group.round(IDLE, BUSY)
    assert group.asleep == [False, False]
    group.round(IDLE, IDLE, wants_round=1)
    assert group.asleep == [False, False]
    group.round(IDLE, IDLE)
    assert group.asleep == [True, True]


def test_a_wake_that_some_have_not_heard_of_keeps_all_awake() -> None:
    """Its work may have come to the rank that has; who sleeps then would leave it alone in its next round."""
    group = Sleepers(2)
    group.wake(0)
    group.round(IDLE, IDLE)
    assert group.asleep == [False, False]
    group.ranks[1].on_wake(group.num_wakes)
    group.round(IDLE, IDLE)
    assert group.asleep == [True, True]


def test_news_to_a_sleeper_is_told_the_front_once_and_starts_no_round() -> None:
    group = Sleepers(2)
    group.round(IDLE, IDLE)
    for _ in range(3):
        group.ranks[1].on_news()
    assert (group.asked, group.asleep) == ([1], [True, True])
    group.wake()
    assert group.asleep == [False, False]
    group.ranks[1].on_news()  # a round is coming anyway
    assert group.asked == [1]


def test_a_lone_rank_wakes_by_itself() -> None:
    rank = Lone()
    assert list(rank.agree(BUSY, wants_round=False)) == [BUSY]
    assert not rank.is_asleep
    rank.agree(IDLE, wants_round=False)
    assert rank.is_asleep
    rank.on_news()
    assert not rank.is_asleep


# ---------------------------------------------------------------- with real schedulers and gates


class GatedRank:
    """A rank's scheduler, its gate, and its place in the group."""

    def __init__(self, step: InStep) -> None:
        self.scheduler = Scheduler(
            SchedulerConfig(
                num_blocks=24,
                block_size=BLOCK_SIZE,
                max_batch_size=4,
                max_scheduled_tokens=CHUNK,
                max_model_len=256,
                prefill_watermark=GATE_WATERMARK,
            )
        )
        self.gate = PrefillGate(A, N)
        self.gating = Gating(self.scheduler, self.gate)
        self.step = step
        self.live: list[RequestId] = []
        self.is_paused = False

    def plan(self) -> tuple[RoundPlan, Sequence[int]]:
        plan = self.scheduler.plan(self.gating.options())
        return plan, self.step.line(self.gating.row(plan), wants_round=plan.has_moves or self.gating.holds_prefill)

    def finish(self, plan: RoundPlan, lines: Sequence[Sequence[int]]) -> None:
        self.gating.observe(self.step.hear(lines))
        if plan.batch_size:
            self.scheduler.advance([StepDone(plan.round_id, [1] * len(plan.sampled_rows))])


def walk(num_ranks: int, num_rounds: int, seed: int) -> Iterator[tuple[list[GatedRank], list[RoundPlan]]]:
    """Rounds of a group under random arrivals and aborts; a rank sometimes starts over with a request it had."""
    rng = random.Random(seed)
    group = Sleepers(num_ranks)
    ranks = [GatedRank(step) for step in group.ranks]
    numbers = iter(range(10**9))
    for _ in range(num_rounds):
        for rank in ranks:
            if rng.random() < 0.06 and rank.scheduler.num_waiting < 8:
                name = RequestId(f"r{next(numbers)}")
                prompt = tuple(rng.randrange(50) for _ in range(rng.choice((1, 5, 40, 120))))
                rank.scheduler.submit(Submission(name, prompt, rng.randrange(1, 60)))
                rank.live.append(name)
            if rank.live and rng.random() < 0.01:
                rank.scheduler.abort(rank.live.pop(rng.randrange(len(rank.live))))
        planned = [rank.plan() for rank in ranks]
        lines = [line for _, line in planned]
        for rank, (plan, _) in zip(ranks, planned, strict=True):
            rank.finish(plan, lines)
        yield ranks, [plan for plan, _ in planned]
        if ranks[0].step.is_asleep:
            group.wake()


def check_agreement(ranks: list[GatedRank], plans: list[RoundPlan], was_open: bool) -> None:
    assert len({(rank.gate.rounds_since_prefill, rank.gate.window) for rank in ranks}) == 1
    assert len({rank.step.is_asleep for rank in ranks}) == 1
    assert was_open or not any(plan.num_extends for plan in plans)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_gates_never_differ_and_prompts_run_in_open_rounds_only(num_ranks: int) -> None:
    follow(num_ranks, num_rounds=3000)


@pytest.mark.soak
def test_gates_never_differ_over_100_000_rounds() -> None:
    follow(num_ranks=4, num_rounds=100_000)


def follow(num_ranks: int, num_rounds: int) -> None:
    was_open, num_prefills, num_slept = True, 0, 0
    for ranks, plans in walk(num_ranks, num_rounds, seed=num_ranks):
        check_agreement(ranks, plans, was_open)
        was_open = ranks[0].gate.is_open
        num_prefills += any(plan.num_extends for plan in plans)
        num_slept += ranks[0].step.is_asleep
    assert num_prefills > num_rounds / 50
    assert num_slept > 0
    for rank in ranks:
        rank.scheduler.check_integrity()


# ---------------------------------------------------------------- when the gate of a group opens


def group_of(num_ranks: int, *decoding: int) -> list[GatedRank]:
    """Ranks of which some have a stream under way, its prompt computed in the round before."""
    ranks = [GatedRank(step) for step in Sleepers(num_ranks).ranks]
    for number in decoding:
        ranks[number].scheduler.submit(Submission(RequestId("stream"), (1,), 200))
    if decoding:
        go(ranks)
    return ranks


def go(ranks: list[GatedRank]) -> list[int]:
    """One round; the extend rows of each rank."""
    planned = [rank.plan() for rank in ranks]
    for rank, (plan, _) in zip(ranks, planned, strict=True):
        rank.finish(plan, [line for _, line in planned])
    return [plan.num_extends for plan, _ in planned]


def rounds_until_prefill(ranks: list[GatedRank]) -> tuple[int, list[int]]:
    """Rounds before the first with extend rows, and those rows."""
    for number in range(10 * N):
        extends = go(ranks)
        if any(extends):
            return number, extends
    raise AssertionError("it never opened")


def test_a_lone_prompt_opens_the_group_at_exactly_any() -> None:
    ranks = group_of(4, 0, 1, 2, 3)
    ranks[2].scheduler.submit(Submission(RequestId("prompt"), (1,) * 20, 1))
    # The stream's prompt was round 0: this one runs in the round after R became N.
    assert rounds_until_prefill(ranks) == (N, [0, 0, 1, 0])


def test_prompts_on_all_ranks_open_the_group_at_all() -> None:
    ranks = group_of(4, 0, 1, 2, 3)
    for rank in ranks:
        rank.scheduler.submit(Submission(RequestId("prompt"), (1,) * 20, 1))
    assert rounds_until_prefill(ranks) == (A, [1, 1, 1, 1])


def test_a_burst_drains_in_consecutive_rounds() -> None:
    ranks = group_of(2, 0, 1)
    for rank in ranks:
        rank.scheduler.submit(Submission(RequestId("burst"), (1,) * (4 * CHUNK), 1))
    assert rounds_until_prefill(ranks)[0] == A
    assert [go(ranks) for _ in range(4)] == [[1, 1]] * 3 + [[0, 0]]


def test_an_idle_group_admits_a_prompt_in_its_first_round() -> None:
    ranks = group_of(4)
    ranks[3].scheduler.submit(Submission(RequestId("prompt"), (1,) * 20, 1))
    assert rounds_until_prefill(ranks) == (0, [0, 0, 0, 1])
