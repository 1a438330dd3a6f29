"""What the gate's bookkeeping allows and counts, round by round, over a real scheduler."""

from __future__ import annotations

import dataclasses
import itertools

from pdserve.engine.gating import Gating
from pdserve.request import RequestId
from pdserve.scheduler.config import SchedulerConfig
from pdserve.scheduler.gate import PrefillGate
from pdserve.scheduler.plan import RoundPlan, StepDone, Submission
from pdserve.scheduler.scheduler import Scheduler

A, N = 3, 6
CONFIG = SchedulerConfig(
    num_blocks=64, block_size=4, max_batch_size=4, max_scheduled_tokens=8, max_model_len=200, prefill_watermark=9
)


class Rounds:
    """Rounds as a rank makes them, without a model."""

    def __init__(self, gate: PrefillGate | None, config: SchedulerConfig = CONFIG) -> None:
        self.scheduler = Scheduler(config)
        self.gating = Gating(self.scheduler, gate)
        self._names = itertools.count()

    def submit(self, num_prompt: int = 4, max_new_tokens: int = 100) -> RequestId:
        name = RequestId(f"r{next(self._names)}")
        self.scheduler.submit(Submission(name, tuple(range(num_prompt)), max_new_tokens))
        return name

    def round(self) -> RoundPlan:
        plan = self.scheduler.plan(self.gating.options())
        self.gating.observe([self.gating.row(plan)])
        if plan.batch_size:
            self.scheduler.advance([StepDone(plan.round_id, (1,) * len(plan.sampled_rows))])
        return plan

    def until_prefill(self) -> int:
        """How many rounds without prefill came before the next that has some."""
        return next(number for number in itertools.count() if self.round().prefill)

    def __getitem__(self, counter: str) -> int:
        return self.gating.counters[counter]


def test_without_a_gate_everything_is_allowed_and_nothing_is_counted() -> None:
    rounds = Rounds(None, dataclasses.replace(CONFIG, prefill_watermark=None))
    rounds.submit()
    rounds.round()
    rounds.submit()
    assert rounds.round().prefill
    rounds.gating.on_first_chunk(5)
    assert not rounds.gating.holds_prefill
    assert rounds.gating.counters == {}


def test_an_idle_rank_prefills_at_once_and_a_decoding_one_at_the_next_multiple_of_a() -> None:
    rounds = Rounds(PrefillGate(A, N))
    rounds.submit()
    assert rounds.until_prefill() == 0
    assert (rounds["gate_windows_idle"], rounds["gate_windows_all"]) == (1, 0)
    rounds.round()
    rounds.submit()
    assert rounds.until_prefill() == A - 1
    assert (rounds["gate_windows_all"], rounds["gate_rounds_held"]) == (1, A - 1)
    # Held, it votes each time; its last chunk is in the plan of the round that opened, so that is no vote.
    assert rounds["gate_votes"] == A - 1


def test_where_both_points_fall_on_a_round_it_counts_as_any() -> None:
    rounds = Rounds(PrefillGate(A, A))
    rounds.submit()
    rounds.round()
    rounds.submit()
    assert rounds.until_prefill() == A
    assert (rounds["gate_windows_any"], rounds["gate_windows_all"]) == (1, 0)


def test_several_prompts_share_the_window_they_waited_for() -> None:
    rounds = Rounds(PrefillGate(A, N))
    rounds.submit()
    rounds.round()
    for _ in range(2):
        rounds.submit()
    assert rounds.until_prefill() == A
    assert rounds.scheduler.counters.prefill_rounds == 2


def test_a_rank_without_a_slot_votes_and_its_window_opens_for_nothing() -> None:
    rounds = Rounds(PrefillGate(A, N), dataclasses.replace(CONFIG, answer_headroom=0))
    for _ in range(CONFIG.max_batch_size):
        rounds.submit()
    while rounds.scheduler.has_free_slot:
        rounds.round()
    rounds.submit()
    before = rounds["gate_windows_all"] + rounds["gate_windows_any"]
    plans = [rounds.round() for _ in range(2 * N + 1)]
    assert not any(plan.prefill for plan in plans)
    # R goes on: every multiple of A is a window, and none of them is used.
    assert rounds["gate_windows_all"] + rounds["gate_windows_any"] - before == 2 * N // A
    assert rounds["gate_votes_without_slot"] == 2 * N + 1


def test_a_rank_above_the_watermark_wants_no_new_prompt_and_none_is_held() -> None:
    rounds = Rounds(PrefillGate(A, N), dataclasses.replace(CONFIG, num_blocks=20, answer_headroom=0))
    rounds.submit(num_prompt=76, max_new_tokens=4)
    while rounds.round().prefill:
        pass
    rounds.submit(num_prompt=2, max_new_tokens=2)
    rounds.round()
    assert not rounds.gating.holds_prefill
    assert rounds["gate_rounds_held"] == 0
    while rounds.scheduler.has_work:
        rounds.round()
    assert rounds.scheduler.counters.output_tokens == 6


def test_the_longest_wait_is_kept() -> None:
    rounds = Rounds(PrefillGate(A, N))
    for num_rounds in (1, 5, 2):
        rounds.gating.on_first_chunk(num_rounds)
    assert rounds["gate_worst_wait_rounds"] == 5


def test_a_closed_round_with_nothing_to_do_is_not_the_last() -> None:
    """A prompt that meets a closed gate on a rank whose streams have just ended runs in the round after."""
    rounds = Rounds(PrefillGate(A, N))
    rounds.submit(max_new_tokens=2)
    while rounds.scheduler.has_work:
        rounds.round()
    rounds.submit()
    assert not rounds.round().rows
    assert rounds.gating.holds_prefill
    assert rounds.round().prefill
