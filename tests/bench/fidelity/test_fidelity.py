from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from pdserve.bench.fidelity.figures import Compared, compare, figures, percentile
from pdserve.bench.fidelity.loads import LOADS, Load, busy_share, calls, rate_for
from pdserve.bench.listening import Heard
from pdserve.bench.policy_runs import Model
from pdserve.sim import cost_files
from pdserve.sim.arrivals import Shape
from pdserve.sim.costs import RankCosts
from pdserve.sim.deployment import Deployment
from pdserve.sim.lengths import Fixed

MODEL = Model(Path("nowhere"), tuple(range(500)))


def test_percentiles_lie_between_the_nearest_values() -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0, 5.0], 0.5) == 3.0
    assert percentile([1.0, 2.0], 0.95) == pytest.approx(1.95)
    assert percentile([7.0], 0.99) == 7.0


def test_figures_are_of_all_answers_together() -> None:
    heard = [Heard(0, 1.0, (2.0, 2.1, 2.2)), Heard(1, 1.0, (4.0, 4.4))]
    found = figures(heard)
    assert found["ttft_p50_s"] == pytest.approx(2.0)
    assert found["itl_p50_s"] == pytest.approx(0.1)
    assert found["itl_p99_s"] == pytest.approx(0.1 + 0.98 * 0.3)


@pytest.mark.parametrize(
    ("name", "real_s", "simulated_s", "is_met"),
    [
        ("ttft_p50_s", [1.0, 1.0], 1.14, True),
        ("ttft_p50_s", [1.0, 1.0], 1.16, False),
        ("ttft_p99_s", [1.0, 1.0], 0.76, True),
        ("ttft_p99_s", [1.0, 1.0], 0.74, False),
        ("itl_p50_s", [0.8, 1.2], 1.7, True),  # within twice what two real runs differ by
        ("itl_p50_s", [0.8, 1.2], 1.9, False),
    ],
)
def test_a_figure_is_met_within_its_tolerance_or_twice_the_spread(
    name: str, real_s: list[float], simulated_s: float, is_met: bool
) -> None:
    assert Compared.of(name, real_s, [simulated_s]).is_met is is_met


def test_runs_are_averaged_and_the_error_is_the_simulators() -> None:
    (found,) = compare([{"itl_p50_s": 1.0}, {"itl_p50_s": 3.0}], [{"itl_p50_s": 1.0}, {"itl_p50_s": 2.0}])
    assert (found.real_s, found.spread_s, found.simulated_s) == (2.0, 2.0, 1.5)
    assert found.error == pytest.approx(-0.25)


@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.name)
def test_a_load_asks_the_same_at_the_same_moments_and_repeats_no_prompt(load: Load) -> None:
    requests = load.requests(2.0, 30.0)
    assert requests == load.requests(2.0, 30.0)
    assert len(requests) == 60
    first, second = (calls(requests, MODEL, load.name, repeat) for repeat in (0, 1))
    assert [call.at_s for call in first] == [call.at_s for call in second] == [r.arrival_s for r in requests]
    assert [len(call.prompt) for call in first] == [request.num_prompt_tokens for request in requests]
    beginnings = [call.prompt[:64] for call in first + second]
    assert len(set(beginnings)) == len(beginnings)


def test_the_rate_makes_the_busiest_rank_busy_for_six_tenths() -> None:
    """With costs of tokens and rows alone, a request costs the same whatever it shares its rounds with."""
    rank = RankCosts(0.0, 0.002, 0.0, 0.0, 0.01, 0.0)
    costs = dataclasses.replace(cost_files.load("seed-flat").costs, fused=rank)
    load = Load("plain", Shape(Fixed(100), Fixed(20)), seed=1)
    deployment = Deployment(costs, num_kv_blocks=400)
    rate = rate_for(load, [deployment], 60.0)
    assert rate * (100 * 0.002 + 19 * 0.01) == pytest.approx(0.6, rel=0.15)
    assert busy_share(deployment, load, 3 * rate, 60.0) > 1
