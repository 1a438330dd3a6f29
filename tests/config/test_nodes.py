"""A group on several machines: which settings go together, and what torchrun says of them."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.config import ConfigError, ServerArgs

ADDRESS = "127.0.0.1:29500"
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29400",
}


def faults_of(**settings: Any) -> list[str]:
    return [str(fault) for fault in ServerArgs(model="m", **settings).faults()]


def test_ranks_are_shared_evenly_by_the_nodes() -> None:
    args = ServerArgs(model="m", nnodes=2, node_rank=1, dist_init_addr=ADDRESS, data_parallel_size=4)
    assert args.faults() == []
    assert args.num_local_ranks == 2
    with_halves = args.model_copy(update={"tensor_parallel_size": 2})
    assert (with_halves.num_ranks, with_halves.num_local_ranks) == (8, 4)


def test_dense_mlps_are_split_over_data_parallel_ranks_and_over_nothing_less() -> None:
    told = "--dense-mlp-split: splits dense MLPs over data-parallel ranks, and there is one; give more, or leave it out"
    assert faults_of(dense_mlp_split=True, tensor_parallel_size=2) == [told]
    assert faults_of(dense_mlp_split=True, data_parallel_size=2) == []
    assert faults_of(dense_mlp_split=True, nnodes=2, node_rank=1, dist_init_addr=ADDRESS) == []


def test_another_node_needs_no_more_than_its_number_and_the_address() -> None:
    assert faults_of(nnodes=2, node_rank=1, dist_init_addr=ADDRESS) == []


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"node_rank": 1}, ["--node-rank 1: --nnodes is 1, so it is one of 0 to 0"]),
        (
            {"nnodes": 2, "dist_init_addr": ADDRESS, "data_parallel_size": 3},
            ["--data-parallel-size 3: --nnodes 2 share the data-parallel ranks evenly; give a multiple of 2"],
        ),
        (
            {"nnodes": 2, "dist_init_addr": ADDRESS, "tensor_parallel_size": 2},
            ["--data-parallel-size 1: --nnodes 2 share the data-parallel ranks evenly; give a multiple of 2"],
        ),
        (
            {"nnodes": 2, "data_parallel_size": 2},
            ["--dist-init-addr: is needed with --nnodes 2: HOST:PORT of node 0"],
        ),
        (
            {"dist_init_addr": ADDRESS},
            [f"--dist-init-addr {ADDRESS}: is for several machines; give --nnodes too, or leave it out"],
        ),
        (
            {"nnodes": 2, "data_parallel_size": 2, "dist_init_addr": "127.0.0.1"},
            ["--dist-init-addr 127.0.0.1: must be HOST:PORT with a port of 1 to 65535"],
        ),
        (
            {"nnodes": 2, "data_parallel_size": 2, "dist_init_addr": "10.0.0.1:29500"},
            [
                "--dist-init-addr 10.0.0.1:29500: other machines could reach the group, and there is no TLS yet; "
                "add --insecure to allow that"
            ],
        ),
    ],
)
def test_what_does_not_go_together_is_told_with_the_remedy(settings: dict[str, Any], told: list[str]) -> None:
    assert faults_of(**settings) == told


def test_torchrun_says_which_node_this_is_and_the_group_meets_beside_its_store(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    args = ServerArgs.from_command_line(["m", "--dp", "2"])
    assert (args.nnodes, args.node_rank, args.dist_init_addr) == (2, 1, "127.0.0.1:29401")
    assert ServerArgs.from_command_line(["m", "--dp", "2", "--node-rank", "0"]).node_rank == 0


def test_torchrun_on_one_machine_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (TORCHRUN | {"GROUP_WORLD_SIZE": "1", "GROUP_RANK": "0"}).items():
        monkeypatch.setenv(name, value)
    args = ServerArgs.from_command_line(["m"])
    assert (args.nnodes, args.dist_init_addr) == (1, None)


def test_several_processes_a_machine_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (TORCHRUN | {"LOCAL_WORLD_SIZE": "4"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"LOCAL_WORLD_SIZE.*4.*give torchrun --nproc-per-node 1"):
        ServerArgs.from_command_line(["m", "--dp", "2"])
