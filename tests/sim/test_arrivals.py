"""Made-up traffic: what a seed fixes, and that lengths and gaps are distributed as they are called."""

from __future__ import annotations

import math
import statistics
from itertools import pairwise
from random import Random

import pytest

from pdserve.errors import StartupError
from pdserve.sim.arrivals import ClosedLoop, MixedShapes, OpenLoop, Shape
from pdserve.sim.lengths import Fixed, Lengths, Lognormal, Mix, Uniform, parse_lengths
from pdserve.sim.pair import ATTACKER, VICTIM, Pair

SHAPE = Shape(Uniform(10, 20), Fixed(5))
MANY = 20_000


def gaps(workload: OpenLoop) -> list[float]:
    times = [0.0, *(request.arrival_s for request in workload.arrivals())]
    return [after - before for before, after in pairwise(times)]


# ---------------------------------------------------------------- open and closed loops


def test_a_seed_is_a_workload() -> None:
    again = [list(OpenLoop(2.0, 50, SHAPE, 0.5, seed).arrivals()) for seed in (1, 1, 2)]
    assert again[0] == again[1] != again[2]
    assert [request.number for request in again[0]] == list(range(50))


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_rate_and_the_burstiness_that_was_asked_for(burstiness: float) -> None:
    found = gaps(OpenLoop(8.0, MANY, SHAPE, burstiness))
    assert min(found) >= 0
    assert statistics.mean(found) == pytest.approx(1 / 8, rel=0.05)
    variation = statistics.stdev(found) / statistics.mean(found)
    assert variation == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)


def test_an_open_loop_asks_nothing_because_of_an_answer() -> None:
    workload = OpenLoop(1.0, 3, SHAPE)
    (first, *_) = workload.arrivals()
    assert workload.after(first, 9.0) is None


def test_a_closed_loop_has_as_many_questions_as_users_until_all_were_asked() -> None:
    workload = ClosedLoop(3, 5, SHAPE, think_s=2.0, seed=1)
    first = list(workload.arrivals())
    assert [request.number for request in first] == [0, 1, 2]
    assert [request.arrival_s for request in first] == sorted(request.arrival_s for request in first)
    later = [workload.after(first[0], now_s) for now_s in (10.0, 20.0, 30.0)]
    assert [None if request is None else request.number for request in later] == [3, 4, None]
    assert later[0] is not None
    assert later[0].arrival_s > 10.0


def test_users_who_do_not_think_ask_at_once() -> None:
    workload = ClosedLoop(2, 3, SHAPE)
    first = list(workload.arrivals())
    assert [request.arrival_s for request in first] == [0.0, 0.0]
    following = workload.after(first[1], 7.5)
    assert following is not None
    assert following.arrival_s == 7.5


def test_users_think_as_long_as_was_said_on_average() -> None:
    workload = ClosedLoop(1, MANY, SHAPE, think_s=3.0)
    (first,) = workload.arrivals()
    later = [workload.after(first, 100.0) for _ in range(MANY - 1)]
    thought = [request.arrival_s - 100.0 for request in later if request is not None]
    assert statistics.mean(thought) == pytest.approx(3.0, rel=0.05)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: OpenLoop(0.0, 1, SHAPE), "--rate 0 must be more than 0"),
        (lambda: OpenLoop(math.nan, 1, SHAPE), "--rate nan must be more than 0"),
        (lambda: OpenLoop(1.0, 0, SHAPE), "--requests 0 must be at least 1"),
        (lambda: OpenLoop(1.0, 1, SHAPE, -1.0), "--burstiness -1 must be more than 0"),
        (lambda: ClosedLoop(0, 1, SHAPE), "--users 0 must be at least 1"),
        (lambda: ClosedLoop(1, 1, SHAPE, think_s=-1.0), "--think-s -1 must be a number of seconds"),
    ],
)
def test_traffic_that_can_not_be_is_refused_with_its_flag(make, reason: str) -> None:
    with pytest.raises(StartupError, match=reason):
        make()


# ---------------------------------------------------------------- lengths


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("512", Fixed(512)),
        ("uniform:64:1024", Uniform(64, 1024)),
        ("lognormal:512:0.9", Lognormal(512, 0.9)),
        ("lognormal:512:0.9:8192", Lognormal(512, 0.9, 8192)),
        ("0.9*256+0.1*uniform:4000:8000", Mix(((0.9, Fixed(256)), (0.1, Uniform(4000, 8000))))),
    ],
)
def test_a_word_is_a_distribution(text: str, lengths: Lengths) -> None:
    assert parse_lengths(text, "--prompt-tokens") == lengths


@pytest.mark.parametrize(
    "text",
    ["", "x", "0", "1.5", "uniform:1", "uniform:9:3", "uniform:0:3", "lognormal:512", "lognormal:nan:1", "zipf:3:1",
     "lognormal:0.5:1", "lognormal:5:-1", "lognormal:5:1:0", "10000001", "uniform:1:10000001",
     "lognormal:1e9:1", "lognormal:500:99", "*5", "0*5", "-1*5", "nan*5", "0.5*4+", "0.5*x"],
)  # fmt: skip
def test_other_words_are_refused_with_the_forms_that_are_known(text: str) -> None:
    with pytest.raises(StartupError) as error:
        parse_lengths(text, "--prompt-tokens")
    assert error.value.message.startswith(f"--prompt-tokens {text}")
    assert "uniform:LOW:HIGH" in error.value.message


@pytest.mark.parametrize("text", ["7", "uniform:1:9", "lognormal:200:0.8", "3*100+1*uniform:10:30"])
def test_draws_have_the_mean_that_is_told(text: str) -> None:
    lengths = parse_lengths(text, "--prompt-tokens")
    random = Random(3)
    drawn = [lengths.draw(random) for _ in range(MANY)]
    assert min(drawn) >= 1
    assert statistics.mean(drawn) == pytest.approx(lengths.mean, rel=0.05)


def test_a_bounded_lognormal_is_never_longer() -> None:
    random = Random(3)
    drawn = [Lognormal(100, 2.0, 300).draw(random) for _ in range(1000)]
    assert max(drawn) == 300


def test_kinds_of_request_differ_in_both_lengths_together() -> None:
    kinds = MixedShapes(((3.0, Shape(Fixed(100), Fixed(10))), (1.0, Shape(Fixed(900), Fixed(2)))))
    random = Random(3)
    drawn = [kinds.draw(random) for _ in range(MANY)]
    assert set(drawn) == {(100, 10), (900, 2)}
    assert drawn.count((100, 10)) / MANY == pytest.approx(0.75, rel=0.05)
    assert kinds.mean == pytest.approx((300, 8))


# ---------------------------------------------------------------- the pair


def test_the_pair_is_that_of_the_published_experiment() -> None:
    victim, attacker = Pair().arrivals()
    assert (victim.number, victim.num_output_tokens) == (VICTIM, 699)
    assert (attacker.number, attacker.arrival_s - victim.arrival_s) == (ATTACKER, 6.0)
    assert (attacker.num_prompt_tokens, attacker.num_output_tokens) == (200_019, 3)
    assert [request.number for request in Pair(has_attacker=False).arrivals()] == [VICTIM]
