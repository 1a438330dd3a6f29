"""What a report says, against what one reckons from the same tokens by hand."""

from __future__ import annotations

import itertools
import math
from random import Random

import pytest

from pdserve.sim.observer import SimRound, Transferred
from pdserve.sim.report import Report, Slo
from pdserve.sim.workload import SimRequest


def request(number: int, num_output_tokens: int, arrival_s: float = 0.0, num_prompt_tokens: int = 10) -> SimRequest:
    return SimRequest(number, arrival_s, num_prompt_tokens, num_output_tokens)


def tell(report: Report, asked: SimRequest, times_s: list[float], num_cached_tokens: int = 0) -> None:
    for time_s in times_s:
        report.on_tokens(time_s, [asked.number])
    report.on_end(asked, times_s[-1], num_cached_tokens)


def rank_round(num_prefill_rows: int, num_decode_rows: int, busy_s: float, is_held: bool = False) -> SimRound:
    return SimRound("fused", 0, 0, 0.0, 1.0, busy_s, num_prefill_rows, 0, num_decode_rows, is_held, False, 0)


def random_answers(seed: int, num: int) -> list[tuple[SimRequest, list[float]]]:
    random = Random(seed)
    answers = []
    for number in range(num):
        start_s = random.uniform(0, 50)
        asked = request(number, random.randint(1, 30), start_s)
        times_s = [start_s + random.expovariate(2)]
        for _ in range(asked.num_output_tokens - 1):
            times_s.append(times_s[-1] + random.lognormvariate(-3, 1.5))
        answers.append((asked, times_s))
    return answers


@pytest.mark.parametrize("seed", range(3))
def test_figures_are_those_of_a_naive_reckoning(seed: int) -> None:
    answers = random_answers(seed, 300)
    report = Report(Slo(ttft_s=0.5, itl_s=0.3))
    tokens = sorted((time_s, asked.number) for asked, times_s in answers for time_s in times_s)
    by_number = {asked.number: (asked, times_s) for asked, times_s in answers}
    for time_s, number in tokens:
        report.on_tokens(time_s, [number])
        if time_s == by_number[number][1][-1]:
            report.on_end(by_number[number][0], time_s, 0)
    ttfts = [times_s[0] - asked.arrival_s for asked, times_s in answers]
    gaps = [[b - a for a, b in itertools.pairwise(times_s)] for _, times_s in answers]
    all_gaps = [gap for of_one in gaps for gap in of_one]
    tpots = [sum(of_one) / len(of_one) for of_one in gaps if of_one]
    assert report.ttft.mean == pytest.approx(math.fsum(ttfts) / 300)
    assert report.ttft.p99 == pytest.approx(sorted(ttfts)[297 - 1])
    assert report.tpot.p50 == pytest.approx(sorted(tpots)[math.ceil(len(tpots) / 2) - 1])
    assert (report.itl.num, report.itl.max) == (len(all_gaps), pytest.approx(max(all_gaps)))
    assert report.itl.mean == pytest.approx(sum(all_gaps) / len(all_gaps))
    assert report.itl.p95 == pytest.approx(sorted(all_gaps)[math.ceil(0.95 * len(all_gaps)) - 1], rel=0.01)
    for threshold_s, num in report.gaps_over.items():
        assert num == sum(gap > threshold_s for gap in all_gaps)
    met = [
        ttft <= 0.5 and (not of_one or sorted(of_one)[math.ceil(0.99 * len(of_one) - 1e-9) - 1] <= 0.3)
        for ttft, of_one in zip(ttfts, gaps, strict=True)
    ]
    assert 0 < report.num_met == sum(met) < 300
    elapsed_s = max(times_s[-1] for _, times_s in answers) - min(asked.arrival_s for asked, _ in answers)
    assert report.elapsed_s == pytest.approx(elapsed_s)
    assert report.goodput_per_s == pytest.approx(sum(met) / elapsed_s)
    assert report.num_output_tokens == sum(asked.num_output_tokens for asked, _ in answers)


def test_streams_of_a_batch_count_a_gap_each() -> None:
    report = Report()
    for time_s, numbers in ((1.0, [0, 1]), (2.0, [0, 1, 2]), (4.0, [2, 0, 1])):
        report.on_tokens(time_s, numbers)
    assert (report.itl.num, report.itl.max) == (5, 2.0)
    assert report.itl.mean == pytest.approx((1 + 1 + 2 + 2 + 2) / 5)


def test_one_late_token_in_a_hundred_is_within_the_slo_and_two_are_not() -> None:
    for num_late, is_met in ((1, True), (2, False)):
        report = Report(Slo(itl_s=0.1))
        gaps_s = [0.5] * num_late + [0.05] * (100 - num_late)
        times_s = [1.0 + sum(gaps_s[:count]) for count in range(101)]
        tell(report, request(0, 101), times_s)
        assert report.num_met == is_met, num_late


def test_a_short_answer_has_no_late_token_to_give_away() -> None:
    report = Report(Slo(itl_s=0.1))
    tell(report, request(0, 3), [1.0, 1.05, 1.5])
    assert (report.num_met, report.met_share) == (0, 0.0)


def test_a_failed_request_meets_no_slo_and_is_told_with_its_reason() -> None:
    report = Report()
    tell(report, request(0, 2), [1.0, 2.0])
    for number, tokens in ((1, 9000), (2, 9001)):
        report.on_failed(request(number, 2), 3.0, f"prompt has {tokens} tokens, the limit is 8,192")
    report.on_failed(request(3, 2), 4.0, "given up")
    assert (report.num_requests, report.num_finished, report.met_share) == (4, 1, 0.25)
    assert report.failures.figures() == [
        {"num": 2, "example": "prompt has 9000 tokens, the limit is 8,192"},
        {"num": 1, "example": "given up"},
    ]
    assert report.elapsed_s == 4.0


def test_the_gaps_of_a_watched_stream_are_kept_one_by_one() -> None:
    report = Report(watched=[1])
    for time_s, numbers in ((1.0, [0, 1]), (1.5, [0, 1]), (4.0, [0, 1])):
        report.on_tokens(time_s, numbers)
    assert report.watched_gaps_s == {1: [0.5, 2.5]}


def test_rounds_are_counted_by_what_they_were_for() -> None:
    report = Report()
    for record in (
        rank_round(1, 0, 2.0),
        rank_round(1, 3, 1.0),
        rank_round(0, 3, 0.25),
        rank_round(0, 2, 0.25, is_held=True),
        rank_round(0, 0, 0.0, is_held=True),
    ):
        report.on_round(record)
    assert dict(report.num_rounds) == {"prefill": 1, "mixed": 1, "decode": 2, "held": 2}
    assert report.busy_s == {"fused": 3.5}


def test_handoffs_are_summed_and_their_exposed_time_is_never_less_than_nothing() -> None:
    report = Report()
    report.on_transfer(Transferred(0, 1.0, 2.0, 1000, 0.5))
    report.on_transfer(Transferred(1, 1.0, 2.0, 500, -0.1))
    assert (report.num_bytes, report.exposed.max) == (1500, 0.5)
    assert report.exposed.mean == pytest.approx(0.25)


def test_a_report_of_nothing_has_figures() -> None:
    report = Report()
    assert (report.elapsed_s, report.goodput_per_s, report.met_share, report.ttft.p50) == (0.0, 0.0, 0.0, None)


def test_ended_streams_leave_nothing_behind() -> None:
    report = Report()
    for number in range(1000):
        tell(report, request(number, 2), [number + 1.0, number + 1.5])
    report.on_tokens(2000.0, [5000])
    report.on_failed(request(5000, 2), 2001.0, "given up")
    assert report._streams == {}
