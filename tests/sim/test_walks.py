"""Random small workloads through random small deployments: every request ends, and every block comes back."""

from __future__ import annotations

import dataclasses
from random import Random

import pytest

from pdserve.scheduler.config import CadenceLimits, SchedulerConfig
from pdserve.sim.topology import Fused, GateSpec, GroupSpec, Split, Topology
from pdserve.sim.workload import SimRequest
from tests.sim.worlds import COSTS, Everything, asked, config, run


def some_config(random: Random, **changes: object) -> SchedulerConfig:
    return config(
        num_blocks=random.choice((12, 24, 64)),
        max_batch_size=random.choice((1, 3, 8)),
        answer_headroom=random.choice((0, 32)),
        enable_mixed_batch=random.random() < 0.3,
        prefix_caching=random.random() < 0.7,
        num_host_blocks=random.choice((0, 16)),
        has_storage=random.random() < 0.5,
        **changes,
    )


def some_topology(random: Random) -> Topology:
    kind = random.choice(("gated", "cadenced", "fused", "split"))
    num_ranks = random.choice((1, 3))
    if kind == "gated":
        fill = random.choice((None, 64))
        gated = some_config(random, prefill_watermark=9, fill_tokens=fill, fill_max_holds=5)
        return Fused(GroupSpec(num_ranks, gated, GateSpec(2, random.choice((4, 7)), random.choice((None, 2)))))
    if kind == "cadenced":
        limits = random.choice((CadenceLimits(3), CadenceLimits(1, 2, 10)))
        return Fused(GroupSpec(num_ranks, some_config(random, cadence=limits)), 2)
    if kind == "fused":
        return Fused(GroupSpec(num_ranks, some_config(random)), 2)
    return Split(
        GroupSpec(num_ranks, some_config(random)),
        GroupSpec(random.choice((1, 2)), some_config(random, cadence=random.choice((None, CadenceLimits(1, 4))))),
        num_prefill_nodes=random.choice((1, 3)),
        num_decode_nodes=random.choice((1, 2)),
        min_remote_tokens=random.choice((0, 40)),
    )


def some_requests(random: Random) -> list[SimRequest]:
    requests, now_s = [], 0.0
    for number in range(40):
        now_s += random.choice((0.0, random.expovariate(2.0), 5.0))
        names = (random.randint(0, 3), random.randint(0, 3), 9, 9) if random.random() < 0.5 else ()
        requests.append(asked(number, now_s, random.randint(1, 220), random.randint(1, 40), names))
    return requests


def check_ends(requests: list[SimRequest], seen: Everything) -> None:
    """Each has ended once, with all its tokens, or failed with a reason."""
    assert sorted([*seen.ended, *seen.failed]) == [request.number for request in requests]
    for request in requests:
        num_told = len(seen.tokens.get(request.number, ()))
        is_whole = num_told == request.num_output_tokens
        assert is_whole if request.number in seen.ended else seen.failed[request.number]


@pytest.mark.parametrize("seed", range(60))
def test_every_request_ends_and_every_block_comes_back(seed: int) -> None:
    random = Random(seed)
    topology, requests = some_topology(random), some_requests(random)
    seen, totals = run(topology, requests, dataclasses.replace(COSTS, noise=0.1), seed)
    check_ends(requests, seen)
    assert totals.is_complete
    assert totals.num_ended > 0
    assert totals.counters["output_tokens"] >= sum(len(times) for times in seen.tokens.values()) > 0
