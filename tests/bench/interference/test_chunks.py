"""Counting a prompt's chunks in the gaps of the stream beside it; late chunks cost several times the early ones."""

from __future__ import annotations

from random import Random

import pytest

from pdserve.bench.interference.chunks import (
    ChunkShape,
    chunks_in_gaps,
    expected_runs,
    num_long,
    num_whole_runs,
)
from pdserve.bench.listening import Heard

NUM_CHUNKS = 58
DECODE_S = 0.03
FLAT = ChunkShape(0.2, 0.0)
# The last chunk costs three times the first.
STEEP = ChunkShape(0.2, 0.4 / 57)


def heard_beside(shape: ChunkShape, runs: list[int], noise: float = 0.0) -> tuple[Heard, Heard]:
    """A victim who has ten tokens, then one after each run of chunks, then ten more; and the attacker."""
    random = Random(3)
    at_s, arrivals_s = 0.0, []
    for _ in range(10):
        at_s += DECODE_S
        arrivals_s.append(at_s)
    called_s, done = at_s - DECODE_S / 2, 0
    for run in runs:
        at_s += (shape.seconds(done + run) - shape.seconds(done)) * (1 + random.uniform(-noise, noise))
        done += run
        first_token_s = at_s
        at_s += DECODE_S
        arrivals_s.append(at_s)
    arrivals_s += [at_s + DECODE_S * (number + 1) for number in range(10)]
    return Heard(0, 0.0, tuple(arrivals_s)), Heard(1, called_s, (first_token_s,))


def counted(shape: ChunkShape, runs: list[int], noise: float = 0.0) -> list[float]:
    chunks = chunks_in_gaps(*heard_beside(shape, runs, noise), NUM_CHUNKS, DECODE_S, shape)
    assert chunks is not None
    return chunks


@pytest.mark.parametrize("shape", [FLAT, STEEP], ids=["flat", "steep"])
@pytest.mark.parametrize("noise", [0.0, 0.15])
def test_eight_chunks_at_a_time_are_seven_long_gaps_and_the_last_two_are_none(shape: ChunkShape, noise: float) -> None:
    chunks = counted(shape, expected_runs(NUM_CHUNKS, 8), noise)
    assert num_long(chunks) == 7
    assert num_whole_runs(chunks, 8) == 7


@pytest.mark.parametrize(("every", "num_runs"), [(16, 3), (4, 14), (8, 7)])
def test_whole_runs_are_the_decode_rounds_that_a_cadence_puts_between(every: int, num_runs: int) -> None:
    runs = expected_runs(NUM_CHUNKS, every)
    assert num_whole_runs(runs, every) == num_runs
    assert num_whole_runs(counted(STEEP, runs, noise=0.05), every) == num_runs


def test_without_a_cadence_one_gap_holds_the_whole_prompt() -> None:
    chunks = counted(STEEP, [NUM_CHUNKS])
    assert num_long(chunks) == 1
    assert max(chunks) == pytest.approx(NUM_CHUNKS)


def test_a_cadence_that_passes_nine_chunks_now_and_then_is_seen() -> None:
    chunks = counted(STEEP, [9, 7, 9, 7, 9, 7, 9, 1])
    assert [round(held) for held in chunks if held > 0.5] == [9, 7, 9, 7, 9, 7, 9, 1]


def test_chunks_in_all_gaps_sum_to_the_prompt() -> None:
    assert sum(counted(STEEP, [1] * NUM_CHUNKS, noise=0.3)) == pytest.approx(NUM_CHUNKS)


def test_a_victim_who_ended_before_the_prompt_says_nothing_of_its_chunks() -> None:
    victim, attacker = heard_beside(FLAT, expected_runs(NUM_CHUNKS, 8))
    shorter = Heard(0, 0.0, victim.arrivals_s[:12])
    assert chunks_in_gaps(shorter, attacker, NUM_CHUNKS, DECODE_S, FLAT) is None


@pytest.mark.parametrize("shape", [FLAT, STEEP], ids=["flat", "steep"])
def test_two_prompts_tell_the_shape(shape: ChunkShape) -> None:
    found = ChunkShape.of(29, shape.seconds(29), 58, shape.seconds(58))
    assert found.first_s == pytest.approx(shape.first_s)
    assert found.growth_s == pytest.approx(shape.growth_s, abs=1e-12)
    assert found.chunks(found.seconds(13)) == pytest.approx(13)


def test_a_shorter_prompt_that_was_slower_by_chance_gives_a_flat_shape() -> None:
    found = ChunkShape.of(10, 3.0, 20, 4.0)
    assert found.growth_s == 0.0
    assert found.seconds(20) == pytest.approx(4.0)
