"""A decode node whose prefill node is away, does not match, or dies; and a prefill node whose decode node dies."""

from __future__ import annotations

import threading
from random import Random
from typing import Any

import pytest

from pdserve.client import Answer
from pdserve.config import Role
from pdserve.config.ports import free_port
from pdserve.errors import PeerMismatch
from tests.system.conftest import NUM_BYTES, TRANSPORTS, Greedy, Pair, over_both
from tests.system.nodes import BLOCK_SIZE, CHUNK, Node, Nodes, wait_for, wait_until_connected

pytestmark = pytest.mark.system

NUM_NEW = 6
# Many small chunks: a second at least, which is time enough to look and to kill.
LONG = 160 * CHUNK
SLOW: dict[str, Any] = {"chunked_prefill_size": BLOCK_SIZE}


def prompt_of(length: int, seed: int) -> list[int]:
    return [Random(f"peers {seed} {length}").randrange(NUM_BYTES) for _ in range(length)]


class Asking(threading.Thread):
    """One answer, waited for in a thread of its own."""

    def __init__(self, node: Node, prompt: list[int]) -> None:
        super().__init__()
        self._node = node
        self._prompt = prompt
        self.answer: Answer | None = None
        self.start()

    def run(self) -> None:
        self.answer = self._node.ask(self._prompt, NUM_NEW)

    def result(self) -> Answer:
        self.join()
        assert self.answer is not None, self._node.log
        return self.answer


def num_computed(prefill: Node) -> int:
    """Prompt tokens, so far."""
    return prefill.load().counters["prompt_tokens_computed"]


def wait_until_computing(prefill: Node, before: int) -> None:
    """Some of a prompt is computed there, most of it is not. before: what was computed when nobody had asked."""
    wait_for(lambda: num_computed(prefill) > before, lambda: prefill.log, poll_s=0.0)


def test_without_a_reachable_peer_a_decode_node_prefills_and_says_so(nodes: Nodes, tiny_greedy: Greedy) -> None:
    peer = f"127.0.0.1:{free_port()}"
    decode = nodes.start(Role.DECODE, prefill_peers=(peer,))
    prompt = prompt_of(3 * CHUNK, seed=0)
    answer = decode.ask(prompt, NUM_NEW)
    assert answer.token_ids == tiny_greedy(prompt, NUM_NEW)
    assert answer.placement == "local;reason=no_peer"
    assert decode.load().counters["decode_fallback_total:no_peer"] == 1
    wait_for(lambda: f"prefill node {peer} is not usable" in decode.log, lambda: decode.log)


def test_a_decode_node_without_peers_prefills_and_goes_on(nodes: Nodes, tiny_greedy: Greedy) -> None:
    decode = nodes.start(Role.DECODE)
    for seed in range(2):
        prompt = prompt_of(3 * CHUNK, seed)
        answer = decode.ask(prompt, NUM_NEW)
        assert (answer.token_ids, answer.placement) == (tiny_greedy(prompt, NUM_NEW), "local;reason=no_peer")
    assert decode.process.is_serving()


def test_the_first_prompt_of_a_node_that_serves_goes_to_its_peer(nodes: Nodes) -> None:
    prefill = nodes.start(Role.PREFILL)
    decode = nodes.start(Role.DECODE, prefill_peers=(prefill.address,))
    assert decode.ask(prompt_of(CHUNK, seed=0), NUM_NEW).placement == f"remote;peer={prefill.address}"


def test_a_peer_that_does_not_match_is_refused_with_the_field_and_both_values(
    nodes: Nodes, pair_by_default: Pair
) -> None:
    prefill, _ = pair_by_default
    other_size = 2 * BLOCK_SIZE
    decode = nodes.start(Role.DECODE, prefill_peers=(prefill.address,), block_size=other_size, decode_fallback="fail")
    told = f"block_size: {other_size} here, {BLOCK_SIZE} there"
    wait_for(lambda: told in decode.log, lambda: decode.log)
    with pytest.raises(PeerMismatch, match=told):
        decode.ask([1, 2, 3])


@over_both
def test_a_prefill_node_killed_in_the_middle_costs_no_answer_and_is_used_again_when_it_is_back(
    nodes: Nodes, tiny_greedy: Greedy, ucx_tls: str | None
) -> None:
    prefill, decode = nodes.start_pair(ucx_tls=ucx_tls, **SLOW)
    prompt, before = prompt_of(LONG, seed=1), num_computed(prefill)
    asking = Asking(decode, prompt)
    wait_until_computing(prefill, before)
    prefill.kill()
    answer = asking.result()
    assert answer.token_ids == tiny_greedy(prompt, NUM_NEW)
    assert answer.placement == "local;reason=transfer_failed"
    assert decode.process.is_serving()
    decode.wait_until_quiet()

    nodes.start(Role.PREFILL, port=prefill.args.port, ucx_tls=ucx_tls)
    wait_until_connected(decode)
    again = prompt_of(3 * CHUNK, seed=2)
    assert decode.ask(again, NUM_NEW).token_ids == tiny_greedy(again, NUM_NEW)
    decode.wait_until_quiet()


@pytest.mark.parametrize(
    "ucx_tls", [pytest.param(None, id="default"), pytest.param(TRANSPORTS["tcp"], id="tcp", marks=pytest.mark.soak)]
)
def test_a_decode_node_killed_in_the_middle_leaves_nothing_held_and_the_next_one_works(
    nodes: Nodes, tiny_greedy: Greedy, ucx_tls: str | None
) -> None:
    """Over tcp UCX may abort a rank that is just sending to the one that is killed (transfer/nixl.py).

    With small chunks, each of which is read at once, it does in one of fifty runs.
    """
    prefill, decode = nodes.start_pair(ucx_tls=ucx_tls, **({} if ucx_tls else SLOW))
    with decode.client() as client:
        decoding = client.stream(token_ids=prompt_of(CHUNK, seed=3), max_new_tokens=4000, ignore_eos=True)
        next(decoding)
        before = num_computed(prefill)
        arriving = client.stream(token_ids=prompt_of(LONG, seed=4), max_new_tokens=NUM_NEW)
        wait_until_computing(prefill, before)
        decode.kill()
        arriving.close()
    prefill.wait_until_quiet()
    assert prefill.process.is_serving()

    successor = nodes.start(Role.DECODE, prefill_peers=(prefill.address,), ucx_tls=ucx_tls)
    wait_until_connected(successor)
    prompt = prompt_of(3 * CHUNK, seed=5)
    assert successor.ask(prompt, NUM_NEW).token_ids == tiny_greedy(prompt, NUM_NEW)
    prefill.wait_until_quiet()
