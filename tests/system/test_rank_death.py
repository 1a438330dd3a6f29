"""A rank that is killed: its requests fail at once, its node stays and goes on with another one."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.bench.processes import children
from pdserve.client import Client
from pdserve.config import Role
from pdserve.errors import NotReady
from pdserve.node.restarts import MAX_DEATHS
from pdserve.request import FinishReason
from tests.system.conftest import Greedy, Pair
from tests.system.control import stopped
from tests.system.nodes import CHUNK, Node, Nodes, wait_for, wait_until_connected, wait_until_gone
from tests.system.test_life import long_answer
from tests.system.test_peers import LONG, NUM_NEW, SLOW, Asking, num_computed, prompt_of, wait_until_computing

pytestmark = pytest.mark.system


def kill_rank(node: Node) -> None:
    pid = node.rank_pid
    os.kill(pid, signal.SIGKILL)
    wait_until_gone(pid)


def incarnation(node: Node) -> str:
    with node.client() as client:
        return client.server_info().settings["incarnation"]


def wait_until_serving_again(node: Node) -> None:
    wait_for(lambda: "serving again with a new rank" in node.log, lambda: node.log)
    wait_for(node.process.is_serving, lambda: node.log)


@pytest.fixture(scope="module")
def lasting_pair(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Its ranks may die: each test leaves it as it was."""
    nodes = Nodes(str(tiny_model), tmp_path_factory.mktemp("lasting"))
    try:
        yield nodes.start_pair(**SLOW)
    finally:
        nodes.end()


def test_a_fused_node_goes_on_with_a_new_rank_and_its_health_tells_of_the_time_between(nodes: Nodes) -> None:
    node = nodes.start(Role.FUSED)
    before = incarnation(node)
    with node.client() as client:
        stream = long_answer(client)
        kill_rank(node)
        with pytest.raises(NotReady, match="the process of the rank ended with status -9"):
            list(stream)
        wait_for(lambda: not node.process.is_serving(), lambda: node.log)
        with pytest.raises(NotReady, match="the process of the rank ended with status -9"):
            client.generate(token_ids=[1], max_new_tokens=1)
    wait_until_serving_again(node)
    assert not node.process.has_ended
    assert node.ask([1, 2, 3], 4).finish is FinishReason.LENGTH
    assert incarnation(node) != before
    assert "Traceback" not in node.log
    assert "a new rank starts in 1 s" in node.log


def test_a_new_rank_loads_the_model_that_the_node_started_with_or_none(
    nodes: Nodes, tiny_model: Path, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    node = nodes.start(Role.FUSED, model=str(model))
    before = node.ask([1, 2, 3], NUM_NEW).token_ids
    weights = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    kill_rank(node)
    wait_for(lambda: f"{model} holds another model than when the node started" in node.log, lambda: node.log)
    assert not node.process.is_serving()
    (model / "model.safetensors").write_bytes(weights)
    wait_until_serving_again(node)
    assert node.ask([1, 2, 3], NUM_NEW).token_ids == before
    assert "Traceback" not in node.log


def test_a_node_told_to_stop_before_its_next_rank_starts_ends_in_order(nodes: Nodes) -> None:
    node = nodes.start(Role.FUSED)
    kill_rank(node)
    wait_for(lambda: "a new rank starts" in node.log, lambda: node.log)
    node.process.ask_to_stop()
    assert node.wait_until_ended() == 0
    assert "Traceback" not in node.log


@pytest.mark.soak
def test_a_node_whose_ranks_die_again_and_again_ends_and_says_why(nodes: Nodes) -> None:
    """Most of a minute is spent between them: each is waited for twice as long."""
    node = nodes.start(Role.FUSED)
    for _ in range(MAX_DEATHS):
        kill_rank(node)
        wait_for(lambda: bool(children(node.process.pid)), lambda: node.log)
    kill_rank(node)
    assert node.wait_until_ended() == 1
    assert f"the node ends, as more than {MAX_DEATHS} ranks died within" in node.log
    assert "Traceback" not in node.log


def test_prompts_of_a_prefill_nodes_dead_rank_are_computed_elsewhere_and_its_next_rank_is_used(
    lasting_pair: Pair, tiny_greedy: Greedy
) -> None:
    prefill, decode = lasting_pair
    prompt, before = prompt_of(LONG, seed=1), num_computed(prefill)
    asking = Asking(decode, prompt)
    wait_until_computing(prefill, before)
    kill_rank(prefill)
    answer = asking.result()
    assert answer.token_ids == tiny_greedy(prompt, NUM_NEW)
    assert answer.placement == "local;reason=transfer_failed"
    decode.wait_until_quiet()

    wait_until_serving_again(prefill)
    wait_until_connected(decode)
    again = prompt_of(3 * CHUNK, seed=2)
    answer = decode.ask(again, NUM_NEW)
    assert answer.token_ids == tiny_greedy(again, NUM_NEW)
    assert answer.placement == f"remote;peer={prefill.address}"
    assert not prefill.process.has_ended
    for node in (prefill, decode):
        node.wait_until_quiet()
        assert "Traceback" not in node.log


def test_a_decode_nodes_new_rank_finds_its_peers_again_and_the_dead_one_left_nothing_there(
    lasting_pair: Pair, tiny_greedy: Greedy
) -> None:
    prefill, decode = lasting_pair
    with decode.client() as client:
        decoding = client.stream(token_ids=prompt_of(CHUNK, seed=3), max_new_tokens=4000, ignore_eos=True)
        next(decoding)
        kill_rank(decode)
        with pytest.raises(NotReady, match="the process of the rank ended with status -9"):
            list(decoding)
    prefill.wait_until_quiet()

    wait_until_serving_again(decode)
    wait_until_connected(decode)
    prompt = prompt_of(3 * CHUNK, seed=4)
    answer = decode.ask(prompt, NUM_NEW)
    assert answer.token_ids == tiny_greedy(prompt, NUM_NEW)
    assert answer.placement == f"remote;peer={prefill.address}"
    for node in (prefill, decode):
        node.wait_until_quiet()
        assert "Traceback" not in node.log


def test_a_prefill_node_that_is_told_to_stop_finishes_the_prompts_it_has(nodes: Nodes, tiny_greedy: Greedy) -> None:
    prefill, decode = nodes.start_pair(**SLOW)
    prompt, before = prompt_of(LONG, seed=5), num_computed(prefill)
    asking = Asking(decode, prompt)
    wait_until_computing(prefill, before)
    with stopped(prefill.rank_pid):  # so that the prompt is still computed when the other one has been answered
        prefill.process.ask_to_stop()
        wait_for(lambda: "draining, requests left: 1" in prefill.log, lambda: prefill.log)
        short = prompt_of(CHUNK, seed=6)
        with Client(decode.address, max_attempts=1) as client:
            answer = client.generate(token_ids=short, max_new_tokens=2, temperature=0.0)
    assert answer.placement.startswith("local;reason=")
    answer = asking.result()
    assert answer.token_ids == tiny_greedy(prompt, NUM_NEW)
    assert answer.placement == f"remote;peer={prefill.address}"
    assert prefill.wait_until_ended() == 0


@pytest.mark.soak
def test_both_nodes_killed_and_started_at_once_work_together(nodes: Nodes, tiny_greedy: Greedy) -> None:
    prefill, decode = nodes.start_pair()
    ports = prefill.args.port, decode.args.port
    for node in (prefill, decode):
        node.kill()
        node.wait_until_ended()
    prefill = nodes.begin(Role.PREFILL, port=ports[0])
    decode = nodes.start(Role.DECODE, port=ports[1], prefill_peers=(prefill.address,))
    wait_until_connected(decode)
    prompt = prompt_of(3 * CHUNK, seed=7)
    answer = decode.ask(prompt, NUM_NEW)
    assert answer.token_ids == tiny_greedy(prompt, NUM_NEW)
    assert answer.placement == f"remote;peer={prefill.address}"
