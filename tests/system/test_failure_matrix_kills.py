"""Rows of the failure matrix in which processes are killed; test_failure_matrix says where the others are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.system.conftest import MATRIX_TRANSPORTS, TRANSPORTS
from tests.system.control import Asking, Control, stopped
from tests.system.matrix import (
    FAR,
    NUM_NEW,
    Watched,
    assert_pair_works,
    begin_decode,
    begin_prefill,
    new_prompt,
    watched_pair,
)
from tests.system.nodes import CHUNK, Node, Nodes, wait_for, wait_until_connected, wait_until_serving

pytestmark = pytest.mark.system


@pytest.fixture(scope="module", params=MATRIX_TRANSPORTS)
def watched(request: pytest.FixtureRequest, quick_nodes: Nodes) -> Iterator[Watched]:
    """Each test leaves it with a prefill node that lives."""
    pair = watched_pair(quick_nodes, TRANSPORTS[request.param])
    yield pair
    pair.end()


def replace_prefill(watched: Watched, nodes: Nodes) -> None:
    """Another life at the same address, and the decode node uses it."""
    watched.prefill = begin_prefill(nodes, watched.prefill.ucx_tls, port=watched.prefill.args.port)
    wait_until_serving(watched.prefill)
    wait_until_connected(watched.decode)


def test_a_prefill_node_killed_idle_is_missed_by_nobody_and_its_successor_is_used(
    watched: Watched, quick_nodes: Nodes, whole: Node
) -> None:
    watched.prefill.kill()
    prompt = new_prompt(3 * CHUNK)
    answer = watched.decode.ask(prompt, NUM_NEW)
    assert answer.token_ids == whole.ask(prompt, NUM_NEW).token_ids
    assert answer.placement.startswith("local;reason=")
    assert watched.decode.process.is_serving()
    watched.decode.wait_until_quiet()
    replace_prefill(watched, quick_nodes)
    assert_pair_works(watched, whole)


def test_a_prefill_node_killed_while_it_is_read_from_costs_no_answer_and_no_block(
    watched: Watched, quick_nodes: Nodes, whole: Node
) -> None:
    prompt = new_prompt(FAR)
    before = watched.control.count("chunk_ready")
    asking = Asking(watched.decode, prompt, NUM_NEW)
    watched.control.wait_for("chunk_ready", before + 4)
    watched.prefill.kill()
    answer = asking.result()
    assert answer.token_ids == whole.ask(prompt, NUM_NEW).token_ids
    assert answer.placement.startswith("local;reason=")
    assert watched.decode.process.is_serving()
    watched.decode.wait_until_quiet()
    replace_prefill(watched, quick_nodes)
    assert_pair_works(watched, whole)


@pytest.fixture
def doomed(watched: Watched, quick_nodes: Nodes) -> Iterator[tuple[Node, Control]]:
    """Another decode node of the same prefill node, with a control channel of its own."""
    control = Control(watched.prefill.address)
    node = begin_decode(quick_nodes, watched.prefill.ucx_tls, control.address)
    wait_until_serving(node)
    wait_until_connected(node)
    yield node, control
    control.close()


def test_a_decode_node_killed_while_it_reads_harms_neither_its_peer_nor_the_next(
    watched: Watched, whole: Node, doomed: tuple[Node, Control]
) -> None:
    victim, control = doomed
    prompt = new_prompt()
    lost = Asking(victim, new_prompt(FAR), NUM_NEW)
    control.wait_for("chunk_ready", 4)
    unharmed = Asking(watched.decode, prompt, NUM_NEW)
    victim.kill()
    assert lost.fate() is not None
    answer = unharmed.result()
    assert answer.token_ids == whole.ask(prompt, NUM_NEW).token_ids
    assert answer.placement == f"remote;peer={watched.control.address}"
    watched.settle()
    assert_pair_works(watched, whole)


def test_a_prefill_node_that_is_stopped_while_its_reader_is_killed_serves_the_others_when_it_goes_on(
    watched: Watched, whole: Node, doomed: tuple[Node, Control]
) -> None:
    """UCX may abort a rank whose reader went while it was stopped; then the rank is started anew."""
    victim, control = doomed
    prompt = new_prompt()
    lost = Asking(victim, new_prompt(FAR), NUM_NEW)
    control.wait_for("chunk_ready", 4)
    with stopped(watched.prefill.process.pid, watched.prefill.rank_pid):
        victim.kill()
        assert lost.fate() is not None
        unharmed = Asking(watched.decode, prompt, NUM_NEW)
    assert unharmed.result().token_ids == whole.ask(prompt, NUM_NEW).token_ids
    wait_for(watched.prefill.process.is_serving, lambda: watched.prefill.log)
    wait_until_connected(watched.decode)
    assert_pair_works(watched, whole)
