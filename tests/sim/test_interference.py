"""The published experiment of decode interleaving, through the production scheduler."""

from __future__ import annotations

import dataclasses

import pytest

from pdserve.errors import StartupError
from pdserve.sim import cost_files, published
from pdserve.sim.deployment import Deployment
from pdserve.sim.interference import Interference, interfere
from pdserve.sim.pair import Pair
from pdserve.sim.published import ALONE, CONTEXT, FLAT, UNSET, case_of

SEED = cost_files.load(FLAT).deployment


@pytest.fixture(scope="module")
def flat() -> dict[str, Interference]:
    return published.run_cases(SEED, Pair())


@pytest.fixture(scope="module")
def context() -> dict[str, Interference]:
    return published.run_cases(cost_files.load(CONTEXT).deployment, Pair())


def wrong(costs_name: str, cases: dict[str, Interference]) -> list[str]:
    found = published.checks(costs_name, cases)
    return [f"{check.published.case} {check.published.figure} {check.simulated}" for check in found if not check.is_met]


def test_every_published_figure_is_met_by_flat_chunks(flat: dict[str, Interference]) -> None:
    assert wrong(FLAT, flat) == []


def test_every_published_figure_is_met_by_chunks_that_grow(context: dict[str, Interference]) -> None:
    assert wrong(CONTEXT, context) == []


def test_the_table_is_that_of_the_specification(
    flat: dict[str, Interference], context: dict[str, Interference]
) -> None:
    """The numbers once more, apart from the code that compares them."""
    assert 11.7 * 0.98 <= flat[ALONE].victim_stream_s <= 11.8 * 1.02
    assert flat[UNSET].num_chunks == 58
    assert flat[UNSET].worst_gap_s == pytest.approx(77, rel=0.02)
    assert flat[UNSET].victim_stream_s == pytest.approx(90.4, rel=0.02)
    assert (flat[UNSET].gaps_over(5), flat[UNSET].gaps_over(20)) == (1, 1)
    for cases, worst_s in ((flat, 10.8), (context, 13.03)):
        eighth = cases[case_of(8)]
        assert (eighth.gaps_over(5), eighth.gaps_over(20)) == (7, 0)
        assert eighth.worst_gap_s == pytest.approx(worst_s, rel=0.02)
        assert eighth.victim_stream_s == pytest.approx(90.6, rel=0.02)
    for interval, worst_s, percent, num_decodes in ((16, 21.6, 0.8, 3), (8, 10.8, 1.6, 7), (4, 5.4, 3.2, 14)):
        run = flat[case_of(interval)]
        assert run.worst_gap_s == pytest.approx(worst_s, rel=0.02)
        assert run.num_decode_rounds == num_decodes
        assert 58 / interval * 0.17 / run.prefill_s * 100 == pytest.approx(percent, rel=0.02)
        assert run.prefill_added_share == pytest.approx(num_decodes / 59.4 / (58 * 1.35))


def test_a_wrong_figure_is_noticed(flat: dict[str, Interference]) -> None:
    slower = dataclasses.replace(flat[UNSET], victim_gaps_s=tuple(1.03 * gap for gap in flat[UNSET].victim_gaps_s))
    assert [line.rsplit(" ", 1)[0] for line in wrong(FLAT, {**flat, UNSET: slower})] == [
        "unset stream",
        "unset worst gap",
    ]
    fewer = dataclasses.replace(flat[case_of(8)], victim_gaps_s=(6.0,) * 6 + (84.0,))
    assert any("n = 8 gaps > 20 s 1" in line for line in wrong(FLAT, {**flat, case_of(8): fewer}))


def slowed(deployment: Deployment, factor: float) -> Deployment:
    costs = deployment.costs
    fused = dataclasses.replace(costs.fused, prefill_fixed_s=costs.fused.prefill_fixed_s * factor)
    return deployment.replace(costs=dataclasses.replace(costs, fused=fused))


def test_chunks_that_take_a_tenth_longer_hold_the_stream_up_a_tenth_longer(flat: dict[str, Interference]) -> None:
    decode_s = 1 / 59.4
    slower = interfere(slowed(SEED, 1.1), Pair())
    assert slower.worst_gap_s - decode_s == pytest.approx(1.1 * (flat[UNSET].worst_gap_s - decode_s))
    assert slower.prefill_s == pytest.approx(1.1 * flat[UNSET].prefill_s)


def test_a_prefill_node_keeps_the_prompt_away_from_the_stream() -> None:
    run = interfere(SEED.replace(num_prefill_nodes=1, num_decode_nodes=1), Pair())
    assert run.num_chunks == 58
    assert run.worst_gap_s < 0.1
    assert run.victim_stream_s == pytest.approx(698 / 59.4, rel=0.02)


def test_a_deployment_that_can_not_hold_the_prompt_says_so() -> None:
    with pytest.raises(StartupError, match="the attacker can't be served: "):
        interfere(SEED.replace(max_model_len=8192), Pair())
