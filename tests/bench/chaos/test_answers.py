"""A chaos run tells right answers from wrong ones, however far they went."""

from __future__ import annotations

import pytest

from pdserve.bench.chaos.answers import Answered, Parting, compare
from pdserve.bench.chaos.requests import (
    HANG_S,
    HANG_TIMES,
    Attempted,
    ChaosAsk,
    Kind,
    Sample,
    attempt,
    hang_s_of,
    make_chaos_asks,
)
from pdserve.errors import NotReady
from pdserve.request import FinishReason, TokenLogprobs

DONE = FinishReason.LENGTH


def entry(token: int, logprob: float = -1.0) -> TokenLogprobs:
    return TokenLogprobs(token, logprob, ((token, logprob), (99, logprob - 1)))


def answer(
    *token_ids: int, finish: FinishReason | None = DONE, text: str | None = None, kind: Kind = Kind.GREEDY
) -> Attempted:
    made = attempt(ChaosAsk(0, kind, (1, 2), {"temperature": 0.0}), "D0", HANG_S)
    told = "".join(chr(97 + token) for token in token_ids) if text is None else text
    made.samples = [Sample(list(token_ids), told, [entry(token) for token in token_ids], finish)]
    return made


def test_the_same_answer_is_right() -> None:
    assert compare(answer(1, 2, 3), answer(1, 2, 3)) == (Answered.RIGHT, [])


@pytest.mark.parametrize(
    "wrong",
    [
        answer(1, 2),  # complete, and too short
        answer(1, 2, 3, 4),
        answer(1, 2, 3, finish=FinishReason.STOP),
        answer(1, 2, 3, text="bcx"),
    ],
)
def test_a_complete_answer_that_differs_in_any_way_is_wrong(wrong: Attempted) -> None:
    assert compare(wrong, answer(1, 2, 3)) == (Answered.WRONG, [])


def test_an_answer_that_was_cut_short_is_right_as_far_as_it_goes() -> None:
    cut = answer(1, 2, finish=None)
    cut.error = NotReady("killed")
    assert compare(cut, answer(1, 2, 3)) == (Answered.RIGHT, [])


def test_a_differing_token_is_a_parting_that_is_judged_apart() -> None:
    assert compare(answer(1, 7, 3), answer(1, 2, 3)) == (Answered.RIGHT, [Parting(0, 1, 7)])


def test_another_logprob_is_wrong_where_they_were_asked_for() -> None:
    mine = answer(1, 2, kind=Kind.LOGPROBS)
    mine.samples[0].logprobs[1] = entry(2, -1.1)
    assert compare(mine, answer(1, 2, kind=Kind.LOGPROBS)) == (Answered.WRONG, [])


def test_a_seed_is_a_workload_of_every_kind() -> None:
    asks = make_chaos_asks(200, seed=3)
    assert asks == make_chaos_asks(200, seed=3)
    assert asks != make_chaos_asks(200, seed=4)
    assert {ask.kind for ask in asks} == set(Kind)


def test_a_slow_model_gets_its_time_before_an_answer_counts_as_hung() -> None:
    quick, slow = answer(1), answer(2)
    quick.ended_s, slow.ended_s = quick.started_s + 1, slow.started_s + 100
    assert hang_s_of([]) == hang_s_of([quick]) == HANG_S
    assert hang_s_of([quick, slow]) == pytest.approx(HANG_TIMES * 100)
    slow.hang_s = 99.0
    assert slow.is_hung
    assert not quick.is_hung
