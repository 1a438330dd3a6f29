"""Presets fit what they are for: lengths a deployment can hold, arrivals of the right shape, rates that load it."""

from __future__ import annotations

import itertools
import statistics
from random import Random

import pytest

from pdserve.errors import StartupError
from pdserve.sim.arrivals import Shape
from pdserve.sim.capacity import capacity_per_s
from pdserve.sim.deployment import Deployment
from pdserve.sim.lengths import Fixed
from pdserve.sim.presets import PRESETS, preset
from pdserve.sim.report import Report
from pdserve.sim.simulation import Simulation
from pdserve.sim.traffic import Sample, preset_traffic, trace_traffic
from tests.sim.worlds import COSTS, DECODE_S

SMALL = Deployment(COSTS, num_kv_blocks=256, max_num_seqs=8, chunked_prefill_size=64)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("longest", [512, 8_192, 131_072, 1_048_576])
def test_every_request_fits(name: str, longest: int) -> None:
    random = Random(0)
    shapes = preset(name).shapes(longest)
    drawn = [shapes.draw(random) for _ in range(500)]
    assert max(prompt + output for prompt, output in drawn) <= longest
    assert min(min(pair) for pair in drawn) >= 1
    assert len(set(drawn)) > 100


def test_coding_s_contexts_are_those_of_a_long_model_and_no_longer() -> None:
    def longest_prompt(longest_request: int) -> int:
        shapes, random = preset("coding").shapes(longest_request), Random(1)
        return max(shapes.draw(random)[0] for _ in range(2_000))

    assert longest_prompt(131_072) == 100_000 == longest_prompt(1_048_576)
    assert longest_prompt(8_192) == 6_250


def test_bursts_come_in_bursts() -> None:
    def variation(name: str) -> float:
        times = [one.arrival_s for one in preset(name).workload(8_192, 5.0, 4_000, seed=3).arrivals()]
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
        return statistics.stdev(gaps) / statistics.fmean(gaps)

    assert variation("chat") == pytest.approx(1, rel=0.1)
    assert variation("burst") > 2


def test_an_unknown_workload_is_refused_with_those_there_are() -> None:
    with pytest.raises(StartupError, match="no workload chats; give one of chat, coding, burst"):
        preset("chats")


# ---------------------------------------------------------------- how much a deployment can take


def test_the_capacity_is_what_a_full_rank_finishes() -> None:
    """Eight streams of 9 tokens: a prefill of an eighth of a chunk's second each, then 8 decode rounds for all."""
    shapes = Shape(Fixed(8), Fixed(9))
    round_trip_s = 1.0 + 8 * DECODE_S
    assert capacity_per_s(SMALL, shapes) == pytest.approx(8 / round_trip_s, rel=0.05)


def test_nodes_that_do_not_know_of_each_other_add_up() -> None:
    shapes = preset("chat").shapes(SMALL.longest_request)
    assert capacity_per_s(SMALL.replace(num_nodes=3), shapes) == pytest.approx(3 * capacity_per_s(SMALL, shapes))


def test_a_preset_s_rate_is_the_share_of_the_capacity() -> None:
    half = preset_traffic(PRESETS["chat"], SMALL, 0.5, 100)
    assert half.rate_per_s == pytest.approx(half.capacity_per_s(SMALL) / 2)


def test_samples_differ_and_held_out_ones_are_none_of_the_others() -> None:
    traffic = preset_traffic(PRESETS["chat"], SMALL, 0.5, 20)
    drawn = [
        tuple(traffic.workload(Sample(seed, held_out)).arrivals()) for seed in range(4) for held_out in (False, True)
    ]
    assert len(set(drawn)) == 8
    assert tuple(traffic.workload(Sample(2)).arrivals()) in drawn


def test_a_trace_is_halved_and_its_load_scaled(tmp_path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = (
        f'{{"timestamp": {n * 1000}, "input_length": 40, "output_length": 4, "hash_ids": [{n}]}}' for n in range(80)
    )
    path.write_text("\n".join(lines) + "\n")
    traffic = trace_traffic(path, SMALL, 0.5, 10)
    for seed in range(6):
        searched, held_out = (list(traffic.workload(Sample(seed, part)).arrivals()) for part in (False, True))
        assert max(one.hash_ids[0] for one in searched) < 40 <= min(one.hash_ids[0] for one in held_out)
        assert [one.number for one in searched] == list(range(10))
        assert searched[0].arrival_s == 0
        assert 1 / searched[1].arrival_s == pytest.approx(0.5 * traffic.capacity_per_s(SMALL), rel=0.05)


def test_a_trace_that_is_too_short_to_hold_half_out_is_refused(tmp_path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 4, "output_length": 4, "hash_ids": [1]}\n' * 7)
    with pytest.raises(StartupError, match=r"7 requests.*give --requests 1 or a longer trace"):
        trace_traffic(path, SMALL, 0.5, 2)


@pytest.mark.parametrize("name", PRESETS)
def test_a_deployment_at_seven_tenths_keeps_up(name: str) -> None:
    report = Report()
    workload = preset_traffic(PRESETS[name], SMALL, 0.7, 60).workload(Sample(0))
    Simulation(SMALL.topology(), COSTS, workload, report).run()
    assert report.num_finished == 60
    last_call_s = max(one.arrival_s for one in workload.arrivals())
    assert report.elapsed_s < 2 * last_call_s
