"""Readiness, drain, and what is left when a process of a node is killed."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from pdserve.client import Client, Stream
from pdserve.config import Role
from pdserve.errors import NotReady
from pdserve.request import FinishReason
from tests.system.nodes import PATIENCE_S, Node, Nodes, wait_for, wait_until_gone

pytestmark = pytest.mark.system

# More than is ever reached: the answer is running for as long as the test needs it to.
ENDLESS = 12_000
# Seconds of rounds, so that it is running when its node is stopped after the first token; it ends once that goes on.
LONG = 1_000


def long_answer(client: Client, max_new_tokens: int = ENDLESS) -> Stream:
    """A stream whose first piece has come."""
    stream = client.stream(token_ids=[1, 2, 3], max_new_tokens=max_new_tokens, temperature=0.0, ignore_eos=True)
    next(stream)
    return stream


def test_a_node_is_not_serving_until_it_answers(nodes: Nodes) -> None:
    node = nodes.begin(Role.FUSED)
    assert not node.process.is_serving()
    with node.client() as client, pytest.raises(NotReady):
        client.generate(token_ids=[1], max_new_tokens=1)
    wait_for(node.process.is_serving, lambda: node.log)
    assert node.ask([1], 1).finish is FinishReason.LENGTH


def test_sigterm_lets_a_running_answer_finish_and_refuses_new_ones(nodes: Nodes) -> None:
    node = nodes.start(Role.FUSED)
    with node.client() as client:
        stream = long_answer(client, max_new_tokens=LONG)
        os.kill(node.rank_pid, signal.SIGSTOP)  # so that the answer is still running when the others have been asked
        node.process.ask_to_stop()
        wait_for(lambda: not node.process.is_serving(), lambda: node.log)
        with pytest.raises(NotReady, match="draining"):
            client.generate(token_ids=[1], max_new_tokens=1)
        os.kill(node.rank_pid, signal.SIGCONT)
        pieces = list(stream)
    assert pieces[-1].finish is FinishReason.LENGTH
    assert pieces[-1].usage.num_completion_tokens == LONG
    assert node.wait_until_ended() == 0
    assert "Traceback" not in node.log


def test_a_second_sigterm_ends_running_answers_with_unavailable(nodes: Nodes) -> None:
    node = nodes.start(Role.FUSED)
    rank_pid = node.rank_pid
    with node.client() as client:
        stream = long_answer(client)
        node.process.ask_to_stop()
        wait_for(lambda: "draining, requests left: 1" in node.log, lambda: node.log)
        node.process.ask_to_stop()
        with pytest.raises(NotReady):
            list(stream)
    assert node.wait_until_ended() == 0
    wait_until_gone(rank_pid)
    assert "Traceback" not in node.log


def test_a_caller_who_waits_for_the_first_token_hears_of_the_nodes_end(nodes: Nodes) -> None:
    node = nodes.start(Role.FUSED)
    os.kill(node.rank_pid, signal.SIGSTOP)  # no token will come
    with Client(node.address, timeout_s=PATIENCE_S) as client:
        stream = client.stream(token_ids=[1, 2, 3], max_new_tokens=8)
        client.model_info()  # on the same connection: the request has arrived
        node.kill()
        with ThreadPoolExecutor() as threads, pytest.raises(NotReady):
            threads.submit(next, stream).result(PATIENCE_S)


def test_killing_the_front_leaves_no_rank_behind(nodes: Nodes) -> None:
    node = nodes.start(Role.FUSED)
    rank_pid = node.rank_pid
    node.kill()
    wait_until_gone(rank_pid)


def test_killing_the_rank_fails_its_answers_and_ends_a_node_that_is_to_end_with_it(nodes: Nodes) -> None:
    node = nodes.start(Role.FUSED, on_rank_death="exit")
    with node.client() as client:
        stream = long_answer(client)
        os.kill(node.rank_pid, signal.SIGKILL)
        with pytest.raises(NotReady, match="the process of the rank ended with status -9"):
            list(stream)
    assert node.wait_until_ended() == 1
    assert_one_error(node)


def assert_one_error(node: Node) -> None:
    assert "Traceback" not in node.log
    (line,) = [line for line in node.log.splitlines() if " ERROR " in line]
    assert "every live request has failed, the node ends" in line
