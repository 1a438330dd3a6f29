"""Figures and checks of rows that nobody had to serve."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from pdserve.bench.interference.cases import ALONE, POLICIES, QUICK, SPLIT, SPLIT_ALONE, UNSET, Experiment
from pdserve.bench.interference.chunks import ChunkShape
from pdserve.bench.interference.outcome import all_figures, count_checks, time_checks
from pdserve.bench.interference.served import Row, Served
from pdserve.bench.listening import Heard

EXPERIMENT = Experiment()
SHAPE = ChunkShape(0.1, 0.002)
DECODE_S = 0.02


def row(case, runs: list[int], tokens: tuple[int, ...] = (5,) * 40) -> Row:
    """One token, then the runs of chunks with a token after each, then decodes only."""
    at_s, done, arrivals_s = DECODE_S, 0, [DECODE_S]
    prompt_s = 0.0
    for run in runs:
        at_s += SHAPE.seconds(done + run) - SHAPE.seconds(done)
        done, prompt_s = done + run, at_s
        at_s += DECODE_S
        arrivals_s.append(at_s)
    while len(arrivals_s) < len(tokens):
        at_s += DECODE_S
        arrivals_s.append(at_s)
    attacker = Heard(1, DECODE_S, (prompt_s,)) if case.has_attacker else None
    return Row(case, Heard(0, 0.0, tuple(arrivals_s), tokens), attacker)


EIGHT, SIXTEEN = POLICIES[0], POLICIES[1]


def rows() -> list[Row]:
    return [
        row(ALONE, []),
        row(UNSET, [58]),
        row(EIGHT, EXPERIMENT.runs(8)),
        row(SIXTEEN, EXPERIMENT.runs(16)),
        row(SPLIT_ALONE, []),
        dataclasses.replace(row(SPLIT, []), attacker=Heard(1, DECODE_S, (0.5,))),
    ]


def test_a_run_as_it_should_be_meets_every_check() -> None:
    found = all_figures(rows(), EXPERIMENT, SHAPE)
    checks = [*count_checks(rows(), found, EXPERIMENT), *time_checks(served([(10.0, 10.2)], [(0.1, 0.11)]))]
    assert [check.name for check in checks if not check.is_met] == []
    assert {check.name: check.found for check in checks}["long gaps at 8"] == 7
    assert found["interleave_16"]["whole_runs"] == 3
    assert found["unset"]["long_gaps"] == 1
    assert "long_gaps" not in found["split"]


def test_figures_are_those_of_the_client() -> None:
    found = all_figures(rows(), EXPERIMENT, SHAPE)["unset"]
    assert found["worst_gap_s"] == pytest.approx(SHAPE.seconds(58) + DECODE_S)
    assert found["gap_p50_s"] == pytest.approx(DECODE_S)
    assert found["victim_wall_s"] == pytest.approx(SHAPE.seconds(58) + 40 * DECODE_S)


def test_what_the_prompts_own_answer_costs_is_told_apart_from_its_prefill() -> None:
    victim = Heard(0, 0.0, (1.0, 1.1, 1.25, 1.35, 1.75), (5,) * 5)
    beside = Row(SPLIT, victim, Heard(1, 1.0, (1.4, 1.75)))
    assert beside.worst_gap_meanwhile_s == pytest.approx(0.15)
    assert Row(SPLIT_ALONE, victim).worst_gap_meanwhile_s == pytest.approx(0.4)


def test_a_cadence_one_too_wide_is_found() -> None:
    wide = [*rows()[:2], row(EIGHT, [9] * 6 + [4]), *rows()[3:]]
    checks = count_checks(wide, all_figures(wide, EXPERIMENT, SHAPE), EXPERIMENT)
    assert {check.name for check in checks if not check.is_met} >= {"long gaps at 8"}


def test_another_token_in_any_row_is_found() -> None:
    other = (5,) * 20 + (6,) * 20
    wrong = [*rows()[:3], row(SIXTEEN, EXPERIMENT.runs(16), other), *rows()[4:]]
    (check,) = [c for c in count_checks(wrong, all_figures(wrong, EXPERIMENT, SHAPE), EXPERIMENT) if not c.is_met]
    assert (check.name, check.found) == ("streams with other tokens than the victim alone", 1)


def test_a_longer_stream_is_compared_as_far_as_the_victim_alone_went() -> None:
    longer = [*rows()[:-1], dataclasses.replace(row(SPLIT, [], (5,) * 60), attacker=Heard(1, DECODE_S, (0.5,)))]
    checks = count_checks(longer, all_figures(longer, EXPERIMENT, SHAPE), EXPERIMENT)
    assert all(check.is_met for check in checks)


def served(walls_s: list[tuple[float, float]], worst_gaps_s: list[tuple[float, float]]) -> Served:
    return Served(rows(), SHAPE, walls_s, worst_gaps_s)


def test_a_wall_four_percent_longer_and_a_pair_that_is_disturbed_are_found() -> None:
    checks = time_checks(served([(10.0, 10.4)], [(0.1, 0.125)]))
    assert [check.is_met for check in checks] == [False, False]


def test_neighbouring_pairs_are_compared_and_one_stray_among_three_decides_nothing() -> None:
    checks = time_checks(served([(10.0, 10.1), (14.0, 14.2), (10.0, 15.0)], [(0.1, 0.1), (0.1, 0.9), (0.2, 0.2)]))
    assert [check.is_met for check in checks] == [True, True]


def test_the_quick_experiment_leaves_as_many_chunks_over_as_the_whole_one() -> None:
    assert [QUICK.runs(every)[-1] for every in (8, 4)] == [EXPERIMENT.runs(every)[-1] for every in (8, 4)]
    assert QUICK.num_before < QUICK.num_streamed


def test_the_picture_has_a_panel_a_row(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from pdserve.bench.interference.picture import PANEL_IN, write_png

    write_png(str(tmp_path / "one.png"), rows()[:1])
    write_png(str(tmp_path / "all.png"), rows())
    heights = [int.from_bytes((tmp_path / f"{name}.png").read_bytes()[20:24]) for name in ("one", "all")]
    assert heights[1] == len(rows()) * heights[0] == len(rows()) * round(PANEL_IN * 100)
