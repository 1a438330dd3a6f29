"""A deployment's knobs become what the scheduler is built with, and are refused as a node refuses them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pdserve.config import ConfigError, ServerArgs
from pdserve.engine.building import _scheduler_config
from pdserve.engine.launch import GridSpec
from pdserve.errors import StartupError
from pdserve.model.revision import Revision
from pdserve.node.spec import rank_spec
from pdserve.scheduler.config import CadenceLimits
from pdserve.sim import cost_files
from pdserve.sim.deployment import SETTINGS, Deployment
from pdserve.sim.topology import Fused, GateSpec, GroupSpec, Split

SEED = cost_files.load("seed-flat").deployment


def group(deployment: Deployment) -> GroupSpec:
    topology = deployment.topology()
    assert isinstance(topology, Fused)
    return topology.group


def refused(deployment: Deployment) -> str:
    with pytest.raises(ConfigError) as error:
        deployment.topology()
    return error.value.message


def test_the_published_deployment_is_the_source_s() -> None:
    scheduler = group(SEED).scheduler
    assert scheduler.num_blocks * scheduler.block_size == 327_680
    assert (scheduler.max_batch_size, scheduler.max_scheduled_tokens) == (50, 3456)
    assert (scheduler.cadence, scheduler.prefill_watermark, group(SEED).gate) == (None, None, None)


def test_the_slots_of_a_node_are_shared_by_its_ranks() -> None:
    spec = group(SEED.replace(data_parallel_size=8))
    assert (spec.num_ranks, spec.scheduler.max_batch_size) == (8, 6)
    assert "--max-num-seqs 50: leaves some of the node's 64 ranks" in refused(SEED.replace(data_parallel_size=64))


def test_a_cadence_and_a_gate_reach_the_group() -> None:
    assert group(SEED.replace(decode_interleave_every=8)).scheduler.cadence == CadenceLimits(8, 1, None)
    assert group(SEED.replace(prefill_decode_interval=3)).scheduler.cadence == CadenceLimits(1, 3, 30)
    gated = group(SEED.replace(prefill_attempt_interval=4, prefill_any_attempt_interval=16, prefill_max_open_rounds=2))
    assert (gated.gate, gated.scheduler.prefill_watermark) == (GateSpec(4, 16, 2), 9)


def test_a_fill_number_is_for_groups_of_several_ranks() -> None:
    """As for a node, but that a node has one rank."""
    filled = group(SEED.replace(data_parallel_size=2, prefill_fill_tokens=1000, prefill_fill_max_holds=7))
    assert (filled.gate, filled.scheduler.fill_tokens, filled.scheduler.fill_max_holds) == (GateSpec(1, 7), 1000, 7)
    assert group(SEED.replace(data_parallel_size=2, prefill_fill_tokens="auto")).scheduler.fill_tokens == 3456
    assert "on one rank this only delays first tokens" in refused(SEED.replace(prefill_fill_tokens=1000))


def test_a_pair_gets_the_policies_where_its_streams_are() -> None:
    topology = SEED.replace(
        num_prefill_nodes=2, num_decode_nodes=3, decode_data_parallel_size=5, prefill_decode_interval=2
    ).topology()
    assert isinstance(topology, Split)
    assert (topology.num_prefill_nodes, topology.num_decode_nodes, topology.decode.num_ranks) == (2, 3, 5)
    assert topology.prefill.scheduler.cadence is None
    assert topology.decode.scheduler.cadence == CadenceLimits(1, 2, 30)


@pytest.mark.parametrize(
    ("knobs", "reason"),
    [
        (
            {"prefill_attempt_interval": 4, "prefill_any_attempt_interval": 8},
            "--prefill-attempt-interval 4: a decode node runs without a prefill gate",
        ),
        ({"prefill_fill_tokens": 64}, "--prefill-fill-tokens 64: a decode node runs without a fill condition"),
        ({"data_parallel_size": 2}, "--data-parallel-size 2: counts fused nodes"),
    ],
)
def test_a_pair_refuses_what_is_for_fused_nodes(knobs: dict[str, int], reason: str) -> None:
    assert reason in refused(SEED.replace(num_prefill_nodes=1, num_decode_nodes=1, **knobs))


@pytest.mark.parametrize(
    ("knobs", "reason"),
    [
        ({"num_prefill_nodes": 1}, "--num-decode-nodes: is missing beside --num-prefill-nodes"),
        ({"prefill_data_parallel_size": 2}, "--prefill-data-parallel-size 2: is about a pair"),
        ({"remote_prefill_min_tokens": 5}, "--remote-prefill-min-tokens 5: is about a pair"),
        ({"num_nodes": 0}, "--num-nodes 0: must be a whole number of at least 1"),
        ({"data_parallel_size": True}, "--data-parallel-size True: must be a whole number of at least 1"),
        ({"chunked_prefill_size": 63}, "--chunked-prefill-size 63: must be at least --block-size (64)"),
        ({"max_num_seqs": "many"}, "--max-num-seqs 'many': must be a valid integer"),
        ({"prefill_any_attempt_interval": 4}, "--prefill-any-attempt-interval 4: needs --prefill-attempt-interval"),
        ({"data_parallel_size": 10_001, "max_num_seqs": 10_001}, "the number of ranks 10,001: must be at most 10,000"),
        ({"num_kv_blocks": 10**12}, "--num-kv-blocks 1,000,000,000,000: on 1 ranks must be at most 20,000,000 blocks"),
        ({"host_kv_gb": 1e-6}, "--host-kv-gb 1e-06: holds no KV block of"),
        (
            {"decode_interleave_every": 8, "prefill_attempt_interval": 1, "prefill_any_attempt_interval": 1},
            "can't go with --prefill-attempt-interval and --prefill-any-attempt-interval",
        ),
    ],
)
def test_what_no_deployment_can_have_is_refused_with_its_flag(knobs: dict[str, object], reason: str) -> None:
    assert reason in refused(SEED.replace(**knobs))


def test_everything_that_is_wrong_is_told_at_once() -> None:
    message = refused(SEED.replace(num_nodes=0, max_num_seqs=0, prefill_any_attempt_interval=4))
    assert message.startswith("3 settings are wrong:")
    assert all(flag in message for flag in ("--num-nodes 0", "--max-num-seqs 0", "--prefill-any-attempt-interval 4"))


def test_a_round_that_can_not_decode_every_stream_is_refused() -> None:
    with pytest.raises(StartupError, match="is below --max-num-seqs"):
        SEED.replace(chunked_prefill_size=64, max_num_seqs=65).topology()


def test_a_deployment_is_told_as_the_flags_that_make_it() -> None:
    bare = Deployment(SEED.costs, num_kv_blocks=10)
    assert bare.flags() == ["--num-kv-blocks", "10"]
    changed = bare.replace(
        prefix_caching=False, enable_mixed_batch=True, host_kv_gb=1.5, prefill_fill_tokens="auto", data_parallel_size=2
    )
    assert changed.describe() == (
        "--num-kv-blocks 10 --enable-mixed-batch --no-prefix-caching --host-kv-gb 1.5 --prefill-fill-tokens auto "
        "--data-parallel-size 2"
    )


def test_the_ranks_that_a_deployment_is_paid_by_are_counted() -> None:
    assert SEED.replace(num_nodes=3, data_parallel_size=4).num_ranks == 12
    pair = SEED.replace(num_prefill_nodes=2, num_decode_nodes=3, decode_data_parallel_size=4)
    assert pair.num_ranks == 14


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"decode_interleave_every": 8},
        {"prefill_decode_interval": 3, "prefill_hold_budget": 7, "enable_mixed_batch": True},
        {"prefill_attempt_interval": 4, "prefill_any_attempt_interval": 16, "prefill_fill_tokens": "auto"},
        {"max_model_len": 100, "prefix_caching": False},
        {"host_kv_gb": 1.0, "kv_dir": "cold"},
    ],
)
def test_a_node_with_the_same_flags_has_the_same_scheduler(knobs: dict[str, Any]) -> None:
    deployment = SEED.replace(num_kv_blocks=64, **knobs)
    for_pairs = {"remote_prefill_min_tokens"}
    args = ServerArgs(model="seed", **{name: getattr(deployment, name) for name in SETTINGS if name not in for_pairs})
    args.validate()
    spec = rank_spec(args, Revision(Path("model"), "r0", ()), Path("sockets"), "1", False, GridSpec())
    model = SimpleNamespace(max_position_embeddings=10**6)
    layout = SimpleNamespace(block_bytes=deployment.costs.block_bytes, num_blocks_for=lambda tokens: -(-tokens // 64))
    built = _scheduler_config(spec, model, layout, available=10**12)  # type: ignore[arg-type]
    ours = group(deployment).scheduler
    # A node without a cadence has one that never bounds anything.
    assert replace(ours, cadence=ours.cadence or CadenceLimits()) == built
