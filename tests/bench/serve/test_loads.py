"""The same requests at the same moments by a seed, and recorded traffic in small."""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
from pathlib import Path

import pytest

from pdserve.bench.listening import Call
from pdserve.bench.serve import loads
from pdserve.bench.serve.loads import ClosedLoad, Limit, LongPromptLoad, Material, PoissonLoad, TraceLoad
from pdserve.errors import StartupError
from pdserve.sim.arrivals import Shape
from pdserve.sim.lengths import Uniform
from tests.bench.serve.fakes import FakeServer

MATERIAL = Material(tuple(range(1000)), Shape(Uniform(40, 200), Uniform(2, 9)), seed=1, timeout_s=20.0)
UNLIMITED = Limit()
OTHER_SEED = dataclasses.replace(MATERIAL, seed=2)


def lengths(calls: list[Call]) -> list[tuple[int, int]]:
    return [(len(call.prompt), call.num_output_tokens) for call in calls]


def test_a_sequence_is_the_same_by_its_seed_and_each_repetition_has_other_prompts() -> None:
    first, again, next_time, other = (
        list(itertools.islice(material.calls("x", repeat), 30))
        for material, repeat in ((MATERIAL, 0), (MATERIAL, 0), (MATERIAL, 1), (OTHER_SEED, 0))
    )
    assert first == again
    assert lengths(first) == lengths(next_time) != lengths(other)
    beginnings = [call.prompt[:16] for call in first + next_time + other]
    assert len(set(beginnings)) == 90


async def test_every_server_is_asked_the_same_by_a_closed_loop() -> None:
    slow, quick = FakeServer(), FakeServer()
    load = ClosedLoad(3, MATERIAL, Limit(num_requests=12))
    for server in (slow, quick):
        await load.put_to(server, 0)
    assert slow.calls == quick.calls
    assert len(slow.calls) == 12


async def test_a_closed_loop_ends_by_time() -> None:
    server = FakeServer()
    driven = await ClosedLoad(2, MATERIAL, Limit(seconds=0.1)).put_to(server, 0)
    assert driven.full_s >= 0.1
    assert len(driven.asked) == len(server.calls) > 2


def test_poisson_arrivals_come_at_their_rate_and_are_the_same_by_the_seed() -> None:
    limit = Limit(num_requests=400)
    calls, again, others = (PoissonLoad(4.0, one, limit).calls(0) for one in (MATERIAL, MATERIAL, OTHER_SEED))
    assert calls == again
    assert [call.at_s for call in calls] != [call.at_s for call in others]
    gaps_s = [after.at_s - before.at_s for before, after in itertools.pairwise(calls)]
    assert statistics.mean(gaps_s) == pytest.approx(0.25, rel=0.2)
    assert statistics.stdev(gaps_s) == pytest.approx(0.25, rel=0.25)


def test_poisson_arrivals_end_by_time_or_number() -> None:
    by_time = PoissonLoad(5.0, MATERIAL, Limit(seconds=20.0)).calls(0)
    assert len(by_time) == pytest.approx(100, abs=40)
    assert max(call.at_s for call in by_time) < 20.0
    assert len(PoissonLoad(5.0, MATERIAL, Limit(20.0, 7)).calls(0)) == 7


async def test_a_long_prompt_is_as_long_as_asked() -> None:
    server = FakeServer()
    await LongPromptLoad(2, 3000, MATERIAL).put_to(server, 0)
    (long,) = [call for call in server.calls if call.number == loads.LONG_NUMBER]
    assert (len(long.prompt), long.num_output_tokens) == (3000, loads.NUM_ASKED)


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    """Two requests that share their first two pieces, and one that shares nothing."""
    path = tmp_path / "small.jsonl"
    rows = [(0, 1200, 100, [0, 1, 2]), (1000, 1536, 50, [0, 1, 3]), (4000, 600, 10, [7, 8])]
    keys = ("timestamp", "input_length", "output_length", "hash_ids")
    path.write_text("".join(json.dumps(dict(zip(keys, row, strict=True))) + "\n" for row in rows))
    return path


def trace(path: Path, limit: Limit = UNLIMITED) -> TraceLoad:
    return TraceLoad(path, rate_scale=0.5, length_scale=0.25, material=MATERIAL, limit=limit)


def test_a_trace_s_times_and_lengths_are_scaled(trace_file: Path) -> None:
    calls = trace(trace_file).calls(0)
    assert [call.at_s for call in calls] == [0.0, 2.0, 8.0]
    assert lengths(calls) == [(300, 25), (384, 12), (150, 2)]


def test_prompts_of_a_trace_share_what_their_hash_ids_share(trace_file: Path) -> None:
    first, second, third = (call.prompt for call in trace(trace_file).calls(0))
    assert first[:256] == second[:256]
    assert first[256:300] != second[256:300]
    assert third[:16] != first[:16]
    assert trace(trace_file).calls(1)[0].prompt[:16] != first[:16]


@pytest.mark.parametrize("scale", [0.001, 0.013, 0.3, 0.7, 1.0, 2.5])
def test_pieces_always_fill_a_scaled_prompt(trace_file: Path, scale: float) -> None:
    load = TraceLoad(trace_file, 1.0, scale, MATERIAL, UNLIMITED)
    wanted = [max(1, round(scale * num_tokens)) for num_tokens in (1200, 1536, 600)]
    assert [len(call.prompt) for call in load.calls(0)] == wanted


def test_a_trace_ends_by_time_or_number(trace_file: Path) -> None:
    assert len(trace(trace_file, Limit(seconds=3.0)).calls(0)) == 2
    assert len(trace(trace_file, Limit(num_requests=1)).calls(0)) == 1


def test_what_is_no_trace_is_told(tmp_path: Path) -> None:
    path = tmp_path / "wrong.jsonl"
    path.write_text('{"timestamp": 0}\n')
    with pytest.raises(StartupError, match="line 1 lacks input_length"):
        trace(path).calls(0)
