"""One group of ranks on two nodes: the same answers, and a node that is gone is missed at once and waited for."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest

from pdserve.bench.processes import children
from pdserve.config import Role
from pdserve.config.ports import free_port
from pdserve.errors import NotReady
from tests.system.conftest import NUM_BYTES, Greedy
from tests.system.nodes import (
    BLOCK_SIZE,
    CHUNK,
    Node,
    Nodes,
    wait_for,
    wait_until_connected,
    wait_until_gone,
    wait_until_serving,
)
from tests.system.test_life import long_answer

pytestmark = pytest.mark.system

NUM_NEW = 12
LENGTHS = (1, 2 * BLOCK_SIZE, CHUNK + 1, 3 * CHUNK + 3)
GATE = {"prefill_attempt_interval": 2, "prefill_any_attempt_interval": 6}


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [Random(f"nodes {seed} {length}").randrange(NUM_BYTES) for _ in range(length)]


@dataclass(frozen=True, slots=True)
class Group:
    """first: has the front. settings: of both, but for their rank."""

    nodes: Nodes
    role: Role
    first: Node
    settings: dict[str, Any]
    inside: Sequence[str]

    def begin_headless(self) -> Node:
        """Told as little as it needs."""
        needed = {name: self.settings[name] for name in ("nnodes", "dist_init_addr", "insecure")}
        return self.nodes.begin(self.role, node_rank=1, inside=self.inside, **needed)


def begin_group(nodes: Nodes, role: Role, host: str = "127.0.0.1", inside: Sequence[str] = (), **more: Any) -> Group:
    """inside: where its headless node is to run."""
    settings = {
        "nnodes": 2,
        "data_parallel_size": 2,
        "dist_init_addr": f"{host}:{free_port()}",
        "host": host,
        "insecure": host != "127.0.0.1",
        **more,
    }
    return Group(nodes, role, nodes.begin(role, **settings), settings, inside)


def asked_all(node: Node, greedy: Greedy, seed: int = 0) -> list[str]:
    """Answers to prompts that come together are the reference's. Returns their placements."""
    prompts = [prompt_of(length, seed) for length in LENGTHS]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda prompt: node.ask(prompt, NUM_NEW), prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == greedy(prompt, NUM_NEW), f"{len(prompt)} tokens"
    node.wait_until_quiet()
    return [answer.placement for answer in answers]


def wait_until_it_serves_again(node: Node) -> None:
    wait_for(lambda: "serving again with a new rank" in node.log, lambda: node.log)
    wait_until_serving(node)


def test_two_nodes_with_experts_and_a_gate_answer_as_one_and_a_killed_one_is_missed_and_taken_back(
    mixtral: Path, mixtral_greedy: Greedy, tmp_path: Path
) -> None:
    nodes = Nodes(str(mixtral), tmp_path)
    try:
        group = begin_group(nodes, Role.FUSED, **GATE)
        headless = group.begin_headless()
        wait_until_serving(group.first)
        asked_all(group.first, mixtral_greedy)
        assert all(load.counters["output_tokens"] for load in group.first.loads())
        (its_rank,) = children(headless.process.pid)
        with group.first.client() as client, group.first.client() as other:
            streams = [long_answer(client), long_answer(other)]
            headless.kill()
            for stream in streams:
                with pytest.raises(NotReady, match="rank"):
                    list(stream)
        wait_until_gone(its_rank)
        again = group.begin_headless()
        wait_until_it_serves_again(group.first)
        asked_all(group.first, mixtral_greedy, seed=1)
        assert "Traceback" not in again.log
    finally:
        nodes.end()


@pytest.mark.soak
def test_a_headless_node_outlives_a_killed_rank_and_its_first_node(
    mixtral: Path, mixtral_greedy: Greedy, tmp_path: Path
) -> None:
    nodes = Nodes(str(mixtral), tmp_path)
    try:
        group = begin_group(nodes, Role.FUSED)
        headless = group.begin_headless()
        wait_until_serving(group.first)
        (its_rank,) = children(headless.process.pid)
        os.kill(its_rank, signal.SIGKILL)
        wait_until_it_serves_again(group.first)
        asked_all(group.first, mixtral_greedy)
        (its_rank,) = children(headless.process.pid)
        group.first.kill()
        wait_until_gone(its_rank)
        successor = nodes.begin(Role.FUSED, **group.settings)
        wait_until_serving(successor)
        asked_all(successor, mixtral_greedy, seed=1)
        assert "Traceback" not in headless.log
    finally:
        nodes.end()


def test_prompts_are_prefilled_by_ranks_of_two_nodes(mixtral: Path, mixtral_greedy: Greedy, tmp_path: Path) -> None:
    nodes = Nodes(str(mixtral), tmp_path)
    try:
        group = begin_group(nodes, Role.PREFILL, ucx_tls="tcp,self")
        group.begin_headless()
        decode = nodes.begin(Role.DECODE, ucx_tls="tcp,self", prefill_peers=(group.first.address,))
        for node in (group.first, decode):
            wait_until_serving(node)
        wait_until_connected(decode)
        assert set(asked_all(decode, mixtral_greedy)) == {f"remote;peer={group.first.address}"}
        group.first.wait_until_quiet()
        assert all(load.counters["output_tokens"] for load in group.first.loads())
    finally:
        nodes.end()


def test_a_node_with_another_model_is_refused_with_both_revisions(
    mixtral: Path, tiny_model: Path, tmp_path: Path
) -> None:
    nodes = Nodes(str(mixtral), tmp_path)
    try:
        group = begin_group(nodes, Role.FUSED)
        other = nodes.begin(Role.FUSED, node_rank=1, **group.settings | {"model": str(tiny_model)})
        assert other.wait_until_ended() == 2
        assert "model_revision is" in other.log
        assert "give every node the same model" in other.log
        assert not group.first.process.has_ended
    finally:
        nodes.end()
