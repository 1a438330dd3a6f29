"""Rows of the failure matrix that are about rare moments: over and over, with forwards of a second or more."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from pdserve.bench.tiny_model import SLOW, make_model
from pdserve.config import Role
from tests.system.conftest import over_both
from tests.system.control import Asking, Control
from tests.system.matrix import new_prompt, watched_pair
from tests.system.nodes import Node, Nodes, wait_until_connected, wait_until_serving

pytestmark = [pytest.mark.system, pytest.mark.soak, pytest.mark.timeout(3600)]


NUM_KILLS = 20
SLOW_CHUNK = 512
SLOW_SETTINGS = {"chunked_prefill_size": SLOW_CHUNK, "block_size": 64, "num_kv_blocks": 64, "max_num_seqs": 4}
NUM_STOPS = 12
SHORT_LEASE_S = 1.0


@pytest.fixture(scope="module")
def slow_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """Nodes whose full chunks take a second or more, and whose blocks are of 2 MB."""
    folder = tmp_path_factory.mktemp("slow-nodes")
    nodes = Nodes(str(make_model(folder / "model", SLOW)), folder)
    try:
        yield nodes
    finally:
        nodes.end()


@over_both
def test_twenty_decode_nodes_killed_in_mid_read_of_a_peer_inside_a_long_forward_leave_it_as_it_was(
    slow_nodes: Nodes, ucx_tls: str | None
) -> None:
    prefill = slow_nodes.start(Role.PREFILL, ucx_tls=ucx_tls, **SLOW_SETTINGS)
    rank_pid = prefill.rank_pid
    prompt = new_prompt(2 * SLOW_CHUNK)
    for number in range(NUM_KILLS):
        control = Control(prefill.address)
        decode = slow_nodes.start(Role.DECODE, ucx_tls=ucx_tls, prefill_peers=(control.address,), **SLOW_SETTINGS)
        wait_until_connected(decode)
        asking = Asking(decode, new_prompt(3 * SLOW_CHUNK), 2)
        # The first chunk is being read while the second is computed.
        control.wait_for("chunk_ready", 0)
        decode.kill()
        assert asking.fate() is not None
        assert prefill.process.is_serving(), f"after kill {number}\n{prefill.log[-3000:]}"
        prefill.wait_until_quiet()
        control.close()
    assert prefill.rank_pid == rank_pid
    last = slow_nodes.start(Role.DECODE, ucx_tls=ucx_tls, prefill_peers=(prefill.address,), **SLOW_SETTINGS)
    wait_until_connected(last)
    assert last.ask(prompt, 2).placement == f"remote;peer={prefill.address}"


@over_both
@pytest.mark.parametrize("who", ["prefill", "decode"])
def test_whoever_is_stopped_for_longer_than_the_lease_in_whatever_moment_no_answer_is_wrong(
    quick_nodes: Nodes, whole: Node, ucx_tls: str | None, who: str, tmp_path: Path
) -> None:
    random = Random(f"stops {who}")
    pair = watched_pair(quick_nodes, ucx_tls, lease_s=SHORT_LEASE_S)
    for number in range(NUM_STOPS):
        prompt = new_prompt()
        before = pair.control.count("chunk_ready")
        asking = Asking(pair.decode, prompt, 6)
        pair.control.wait_for("chunk_ready", before + random.randrange(20))
        node = pair.prefill if who == "prefill" else pair.decode
        freeze(node, SHORT_LEASE_S * random.uniform(1.1, 3.0), rank_only=number % 2 == 1)
        others = [Asking(pair.decode, new_prompt(200), 6) for _ in range(2)]
        assert asking.result().token_ids == whole.ask(prompt, 6).token_ids
        for other in others:
            other.result()
        pair.settle()
        wait_until_serving(pair.prefill)
        wait_until_connected(pair.decode)
    pair.end()


def freeze(node: Node, for_s: float, *, rank_only: bool) -> None:
    """The fault itself takes time: the processes are frozen that long."""
    pids = [node.rank_pid] if rank_only else [node.process.pid, node.rank_pid]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(for_s)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
