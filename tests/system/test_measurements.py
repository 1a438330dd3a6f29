"""The measurements of `pdserve bench` and of a calibration, on nodes of a tiny model: everything but the times."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest

from pdserve.bench.calibration.measure import calibrate
from pdserve.bench.calibration.plan import CalibrationPlan, DecodeBatch
from pdserve.bench.calibration.probes import Prober
from pdserve.bench.deployed import pair
from pdserve.bench.fidelity.loads import LOADS
from pdserve.bench.fidelity.run import measure as run_fidelity
from pdserve.bench.interference.cases import POLICIES, Experiment
from pdserve.bench.interference.outcome import all_figures, num_different
from pdserve.bench.interference.predicted import predict
from pdserve.bench.interference.served import serve_all
from pdserve.bench.listening import Call
from pdserve.bench.policy_runs import Model
from pdserve.bench.simulated import hear_simulated
from pdserve.model.progress import no_progress
from pdserve.sim import cost_files
from pdserve.sim.workload import SimRequest

pytestmark = pytest.mark.system

BLOCK_SIZE = 64
MIXED = POLICIES[-1]
TINY = Experiment(num_chunks=6, chunk=128, num_streamed=60, num_before=3, num_kv_blocks=96)
SMALL_PLAN = CalibrationPlan(
    lengths=(16, 64, 200),
    groups=((2, 16), (2, 60)),
    other_lengths=(),
    batches=(DecodeBatch(1, 20), DecodeBatch(2, 20), DecodeBatch(1, 90), DecodeBatch(2, 90)),
    handed_over=(30, 100),
    num_gaps=30,
    repeats=1,
    num_kv_blocks=96,
)


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> Model:
    return Model(tiny_model, tuple(range(250)))


@pytest.mark.soak  # a whole measurement, in small
def test_the_victim_gets_the_same_tokens_in_every_case_and_each_is_also_simulated(model: Model) -> None:
    served = serve_all(model, TINY, no_progress, [MIXED])
    assert num_different(served.rows) == 0
    found = all_figures(served.rows, TINY, served.shape)
    assert list(found) == ["alone", "unset", MIXED.name, "split_alone", "split"]
    for row in served.rows:
        assert len(row.victim.arrivals_s) == len(row.victim.token_ids) >= TINY.num_streamed
        assert (row.attacker is None) is (not row.case.has_attacker)
        assert row.attacker is None or len(row.attacker.token_ids) == TINY.num_asked
    split_alone, split = served.rows[-2:]
    assert len(split_alone.victim.token_ids) == len(split.victim.token_ids)
    costs = cost_files.load("smollm2-cpu").costs
    predicted = [predict(row, TINY, costs) for row in served.rows]
    assert [len(row.victim.arrivals_s) for row in predicted] == [len(row.victim.token_ids) for row in served.rows]


def test_requests_leave_at_their_times_and_go_where_they_should(model: Model) -> None:
    calls = [Call(number, (number + 1,) * 80, 4, at_s=0.05 * number) for number in range(4)]
    with pair(model, num_kv_blocks=96, block_size=BLOCK_SIZE) as node:
        heard = node.hear_all(calls)
        assert node.load().counters["remote_prefills_total"] >= len(calls)
    assert [answer.number for answer in heard] == [0, 1, 2, 3]
    assert all(len(answer.arrivals_s) == len(answer.token_ids) == 4 for answer in heard)
    assert all(after.called_s - before.called_s > 0.0 for before, after in itertools.pairwise(heard))
    assert all(answer.placement.startswith("remote;") for answer in heard)


@pytest.mark.soak  # a whole measurement, in small
def test_a_calibration_is_a_cost_file_that_can_be_read_and_simulated(model: Model, tmp_path: Path) -> None:
    whole = dataclasses.replace(SMALL_PLAN, other_lengths=(200,))
    found, table = calibrate(model, "tiny", "a tiny model", no_progress, whole, SMALL_PLAN)
    assert table.row_count == len(SMALL_PLAN.lengths + SMALL_PLAN.groups + SMALL_PLAN.batches) * 2 + 1
    cost_files.save(found, tmp_path / "tiny.json")
    read = cost_files.load(tmp_path / "tiny.json")
    assert read == found
    assert [rows for rows, _ in read.costs.fused.decode_curve] == [1, 2]
    assert read.deployment.num_kv_blocks == SMALL_PLAN.num_kv_blocks
    (heard,) = hear_simulated(read.deployment, [SimRequest(0, 0.0, 100, 5)], seed=0)
    assert len(heard.arrivals_s) == 5


def test_two_tokens_of_a_pair_have_the_handoff_between_them(model: Model) -> None:
    with pair(model, num_kv_blocks=96, block_size=BLOCK_SIZE) as node:
        heard = list(Prober(node, model).handoffs(SMALL_PLAN))
    assert [answer.number for answer in heard] == list(SMALL_PLAN.handed_over)
    assert all(answer.placement.startswith("remote;") and len(answer.gaps_s) == 1 for answer in heard)


@pytest.mark.soak  # a whole measurement, in small
def test_a_fidelity_run_compares_every_figure_of_both_deployments(model: Model) -> None:
    deployment = cost_files.load("smollm2-cpu").deployment.replace(num_kv_blocks=96, max_model_len=None)
    results = run_fidelity(model, deployment, LOADS[:1], 2.0, 2, no_progress)
    assert [result.nodes for result in results] == ["fused", "pair"]
    for result in results:
        assert {figure.name for figure in result.compared} == {
            f"{kind}_{share}_s" for kind in ("ttft", "itl") for share in ("p50", "p95", "p99")
        }
        assert all(figure.real_s > 0 and figure.simulated_s > 0 for figure in result.compared)
