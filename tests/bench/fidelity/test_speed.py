"""How much slower than its cost file a machine is just now."""

from __future__ import annotations

import pytest

from pdserve.bench.fidelity.speed import PROBE, Speed, without_noise
from pdserve.bench.simulated import hear_simulated
from pdserve.sim import cost_files
from pdserve.sim.deployment import Deployment


def heard_at(speed: Speed, deployment: Deployment) -> Speed:
    quiet = deployment.replace(costs=without_noise(deployment.costs))
    return Speed.of(hear_simulated(speed.applied(quiet), [PROBE], seed=0), deployment)


@pytest.mark.parametrize("name", ["smollm2-cpu", "seed-context"])
@pytest.mark.parametrize("num_nodes", [None, 1])
def test_a_machine_is_as_slow_as_its_probe_shows(name: str, num_nodes: int | None) -> None:
    deployment = cost_files.load(name).deployment.replace(num_prefill_nodes=num_nodes, num_decode_nodes=num_nodes)
    found = heard_at(Speed(prefill=1.3, decode=0.8), deployment)
    assert found.prefill == pytest.approx(1.3, rel=0.02)
    assert found.decode == pytest.approx(0.8, rel=0.02)
    assert heard_at(Speed(1.0, 1.0), deployment) == Speed(pytest.approx(1.0), pytest.approx(1.0))
