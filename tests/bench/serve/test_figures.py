"""Figures of answers whose every moment is known."""

from __future__ import annotations

import pytest

from pdserve.bench.listening import Heard
from pdserve.bench.serve.figures import Slo, figures, tpot_s
from tests.bench.serve.fakes import asked, driven, failed, heard

SLO = Slo(ttft_s=2.0, itl_s=0.15)
# Smooth; late; one gap of 0.3 s in five, whose mean is 0.14 s; slow throughout.
SMOOTH = heard(1.0, 1.1, 1.2)
LATE = heard(3.0, 3.1, 3.2)
FROZEN = heard(1.0, 1.1, 1.2, 1.3, 1.6, 1.7)
SLOW = heard(1.0, 1.2, 1.4)


@pytest.mark.parametrize(
    ("answer", "is_met", "is_met_strictly"),
    [
        (SMOOTH, True, True),
        (LATE, False, False),
        (FROZEN, True, False),
        (SLOW, False, False),
        (heard(2.0), True, True),
        (heard(3.5, called_s=1.5), True, True),
    ],
)
def test_goodput_is_of_the_mean_gap_and_strict_goodput_of_each(
    answer: Heard, is_met: bool, is_met_strictly: bool
) -> None:
    assert (SLO.is_met(answer), SLO.is_met_strictly(answer)) == (is_met, is_met_strictly)


def test_a_failed_request_is_not_good_and_a_refused_one_is_among_the_failed() -> None:
    found = figures(driven(asked(SMOOTH), asked(FROZEN), failed("gone"), failed("full", is_refused=True)), SLO)
    assert (found["num_requests"], found["num_failed"], found["num_refused"]) == (4, 2, 1)
    assert (found["goodput"], found["strict_goodput"]) == (0.5, 0.25)
    assert (found["goodput_per_s"], found["strict_goodput_per_s"]) == (0.2, 0.1)


def test_times_are_from_the_call_and_between_tokens() -> None:
    found = figures(driven(asked(heard(2.0, 3.0, 5.0, called_s=1.0)), asked(heard(4.0, 8.0, called_s=1.0))), SLO)
    assert found["ttft_p50_s"] == 2.0
    assert found["ttft_p90_s"] == pytest.approx(1.0 + 0.9 * 2.0)
    assert (found["itl_p50_s"], found["worst_gap_s"]) == (2.0, 4.0)
    assert found["itl_p99_s"] == pytest.approx(2.0 + 0.98 * 2.0)
    assert found["tpot_p50_s"] == pytest.approx((1.5 + 4.0) / 2)
    assert found["e2e_p50_s"] == pytest.approx((4.0 + 7.0) / 2)


def test_an_answer_of_one_token_has_no_time_between_tokens() -> None:
    found = figures(driven(asked(heard(1.0))), SLO)
    assert tpot_s(heard(1.0)) == 0.0
    assert not {name for name in found if name.startswith(("itl", "tpot", "worst_gap"))}
    assert found["ttft_p99_s"] == found["e2e_p99_s"] == 1.0


def test_only_what_came_while_the_load_was_full_counts_as_speed() -> None:
    early, late = heard(1.0, 2.0, 3.0), heard(3.5, 4.5, 5.5, called_s=2.0)
    found = figures(driven(asked(early, 20), asked(late, 40), full_s=4.0), SLO)
    assert found["output_tokens_per_s"] == 4 / 4.0
    assert found["prompt_tokens_per_s"] == (20 + 40) / 4.0
    generous = figures(driven(asked(early), asked(late), full_s=4.0), Slo(10.0, 10.0))
    assert (generous["goodput"], generous["goodput_per_s"]) == (1.0, 0.25)


def test_where_nothing_was_heard_there_are_no_times() -> None:
    found = figures(driven(failed("gone")), SLO)
    assert found["goodput"] == found["output_tokens_per_s"] == 0.0
    assert not {name for name in found if name.endswith(("p50_s", "p99_s"))}


def test_what_a_long_prompt_did_to_others_is_from_its_call_to_its_first_token() -> None:
    long_prompt = asked(heard(14.0, 20.0, called_s=10.0))
    before, frozen, after = heard(1.0, 9.0), heard(9.5, 14.5, 15.0, called_s=9.0), heard(16.0, 30.0, called_s=15.0)
    waiting = heard(13.0, 13.5, called_s=11.0)
    others = [asked(answer) for answer in (before, frozen, after, waiting)]
    found = figures(driven(*others, full_s=30.0, long_prompt=long_prompt), SLO)
    assert (found["long_ttft_s"], found["beside_worst_gap_s"], found["beside_worst_wait_s"]) == (4.0, 5.0, 2.0)
    assert found["num_requests"] == 4
    assert found["worst_gap_s"] == 14.0


def test_a_long_prompt_that_failed_has_no_figures() -> None:
    found = figures(driven(asked(SMOOTH), long_prompt=failed("too long", is_refused=True)), SLO)
    assert not {name for name in found if name.startswith(("long", "beside"))}
