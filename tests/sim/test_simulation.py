"""The simulator as a whole: exact where the costs are exact, the same each time, and never silent about an end."""

from __future__ import annotations

import dataclasses

import pytest

from pdserve.errors import InternalError, InvalidRequest, StartupError
from pdserve.scheduler.config import CadenceLimits
from pdserve.sim.prefill_side import PrefillSide
from pdserve.sim.simulation import Simulation
from pdserve.sim.topology import Fused, GateSpec, GroupSpec, Split
from pdserve.sim.workload import SimRequest
from tests.sim.worlds import (
    CHUNK_S,
    CONFIG,
    COSTS,
    DECODE_S,
    Everything,
    Listed,
    asked,
    check_all_answered,
    config,
    run,
)

ONE = Fused(GroupSpec(1, CONFIG))
SPLIT = Split(GroupSpec(1, CONFIG), GroupSpec(1, CONFIG))
MANY = [asked(n, n / 16, prompt=16 + 13 * n % 200, output=1 + n % 7) for n in range(60)]


@pytest.mark.parametrize("topology", [ONE, SPLIT, Fused(GroupSpec(3, CONFIG), 2)], ids=["fused", "split", "groups"])
def test_every_token_of_every_request_is_told_once(topology: Fused | Split) -> None:
    seen, totals = run(topology, MANY)
    check_all_answered(MANY, seen, totals)
    assert (totals.num_requests, totals.num_ended, totals.num_failed) == (60, 60, 0)


@pytest.mark.parametrize("topology", [ONE, SPLIT], ids=["fused", "split"])
def test_a_seed_gives_the_same_run_and_another_seed_another(topology: Fused | Split) -> None:
    noisy = dataclasses.replace(COSTS, noise=0.2)
    (first, totals), (second, again), (other, _) = (run(topology, MANY, noisy, seed) for seed in (1, 1, 2))
    assert (first, totals) == (second, again)
    assert first.tokens != other.tokens


def test_a_lone_stream_gets_a_token_a_decode_round_and_none_of_another_length() -> None:
    seen, totals = run(ONE, [asked(0, prompt=64, output=100)])
    assert seen.tokens[0][0] == CHUNK_S
    assert set(seen.gaps(0)) == {DECODE_S}
    assert totals.seconds == CHUNK_S + 99 * DECODE_S


@pytest.mark.parametrize(("every", "num_decodes"), [(4, 14), (8, 7), (16, 3)])
def test_a_long_prompt_beside_a_stream_runs_in_pieces_of_the_cadence(every: int, num_decodes: int) -> None:
    cadenced = Fused(GroupSpec(1, config(num_blocks=512, cadence=CadenceLimits(every))))
    seen, _ = run(cadenced, [asked(0, prompt=64, output=200), asked(1, CHUNK_S + DECODE_S, prompt=58 * 64)])
    runs = seen.kinds().strip("D").split("D")
    assert [len(chunks) for chunks in runs if chunks][1:] == [every] * num_decodes + [58 - every * num_decodes]
    worst = max(seen.gaps(0))
    assert worst == every * CHUNK_S + DECODE_S


def test_without_a_cadence_it_runs_in_one_piece() -> None:
    seen, _ = run(
        Fused(GroupSpec(1, config(num_blocks=512))),
        [asked(0, prompt=64, output=200), asked(1, CHUNK_S, prompt=58 * 64)],
    )
    assert max(seen.gaps(0)) == 58 * CHUNK_S + DECODE_S


def test_calls_and_tokens_take_their_time_on_the_way() -> None:
    far = dataclasses.replace(COSTS, front=dataclasses.replace(COSTS.front, arrival_s=0.5, delivery_s=0.125))
    seen, _ = run(ONE, [asked(0, arrival_s=2.0, prompt=64, output=2)], far)
    assert seen.tokens[0] == [2 + 0.5 + CHUNK_S + 0.125, 2 + 0.5 + CHUNK_S + DECODE_S + 0.125]


def test_what_comes_during_a_round_is_seen_after_it() -> None:
    seen, _ = run(ONE, [asked(0, prompt=64, output=1), asked(1, arrival_s=0.25, prompt=64, output=1)])
    assert seen.tokens == {0: [CHUNK_S], 1: [2 * CHUNK_S]}


def test_prompts_that_begin_alike_are_computed_once() -> None:
    requests = [asked(n, arrival_s=10.0 * n, prompt=180, hash_ids=(7, 8, 100 + n)) for n in range(3)]
    seen, totals = run(ONE, [*requests, asked(3, 40.0, prompt=180)])
    assert seen.cached == {0: 0, 1: 128, 2: 128, 3: 0}
    assert totals.counters["prefix_hit_tokens"] == 256
    assert totals.counters["prompt_tokens_computed"] == 4 * 180 - 256


@pytest.mark.parametrize("topology", [ONE, SPLIT], ids=["fused", "split"])
def test_a_request_that_can_never_fit_fails_and_the_others_go_on(topology: Fused | Split) -> None:
    seen, totals = run(topology, [asked(0), asked(1, prompt=5000), asked(2)])
    assert list(seen.failed) == [1]
    assert "5000" in seen.failed[1]
    assert sorted(seen.ended) == [0, 2]
    assert (totals.num_failed, totals.is_complete) == (1, True)


def test_a_client_asks_again_when_its_answer_has_reached_it() -> None:
    far = dataclasses.replace(COSTS, front=dataclasses.replace(COSTS.front, delivery_s=0.5))
    seen = Everything()

    def following(request: SimRequest, now_s: float) -> SimRequest | None:
        return asked(request.number + 1, now_s + 1.0, prompt=64, output=1) if request.number < 3 else None

    totals = Simulation(ONE, far, Listed([asked(0, prompt=64, output=1)], following), seen).run()
    period_s = CHUNK_S + 0.5 + 1.0
    assert seen.ended == {n: n * period_s + CHUNK_S + 0.5 for n in range(4)}
    assert totals.peak_live == 1


def test_a_run_stops_when_it_is_told_to() -> None:
    seen, totals = run(ONE, [asked(0, prompt=64, output=100), asked(1, 50.0)], until_s=CHUNK_S + 10 * DECODE_S)
    assert len(seen.tokens[0]) == 11
    assert (totals.seconds, totals.is_complete, totals.num_requests) == (CHUNK_S + 10 * DECODE_S, False, 1)


def test_where_nothing_can_go_on_the_request_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefillSide, "start", lambda self, handoff: None)  # a peer that never hears of it
    with pytest.raises(InternalError, match=r"request 7 is stuck.* rank 0 of decode node 0"):
        run(SPLIT, [asked(7)])


def test_requests_out_of_order_are_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"request 1 arrives at 1\.0 s"):
        run(ONE, [asked(0, 2.0), asked(1, 1.0)])


def test_a_topology_that_no_deployment_has_is_refused() -> None:
    with pytest.raises(StartupError, match="gate"):
        run(Split(GroupSpec(1, CONFIG, GateSpec(4, 16)), GroupSpec(1, CONFIG)), [])
    with pytest.raises(StartupError, match="block_size is 32"):
        run(Fused(GroupSpec(1, config(block_size=32))), [])


def test_occupancy_is_weighed_by_time() -> None:
    """64 tokens of prompt and 64 of headroom are 8 blocks of 256, held for the answer, then nothing until the end."""
    seen, totals = run(ONE, [asked(0, prompt=64, output=5), asked(1, 6.0, prompt=5000)])
    assert seen.ended[0] == CHUNK_S + 4 * DECODE_S
    assert totals.peak_occupancy == 5 / 256  # an answer of 5 tokens needs one block
    assert totals.mean_occupancy == pytest.approx(5 / 256 * 2.0 / 6.0)
