"""The row of the failure matrix in which KV no longer comes through, and control does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from pdserve.bench.data_channel import data_channel_cut
from tests.system.conftest import TRANSPORTS
from tests.system.control import Asking, stopped
from tests.system.matrix import FAR, NUM_NEW, Watched, assert_pair_works, new_prompt, watched_pair
from tests.system.nodes import Node, Nodes, wait_until_connected

pytestmark = pytest.mark.system

# So that the last resort, cutting the peer off, comes while the test waits.
QUARANTINE_S = 3.0


@pytest.fixture
def watched(quick_nodes: Nodes) -> Iterator[Watched]:
    pair = watched_pair(quick_nodes, TRANSPORTS["tcp"], quarantine_s=QUARANTINE_S)
    yield pair
    pair.end()


def test_kv_that_no_longer_comes_through_costs_no_answer_and_no_block_and_the_pair_mends(
    watched: Watched, whole: Node
) -> None:
    prompt = new_prompt(FAR)
    before = watched.control.count("chunk_ready")
    rank_pid = watched.prefill.rank_pid
    asking = Asking(watched.decode, prompt, NUM_NEW)
    watched.control.wait_for("chunk_ready", before + 2)
    with ExitStack() as cut:
        with stopped(rank_pid):
            cut.enter_context(data_channel_cut(rank_pid, watched.decode.rank_pid))
        answer = asking.result()
        assert answer.token_ids == whole.ask(prompt, NUM_NEW).token_ids
        assert answer.placement.startswith("local;reason=")
        assert watched.decode.process.is_serving()
        assert watched.prefill.process.is_serving()
        watched.settle()
    wait_until_connected(watched.decode)
    assert_pair_works(watched, whole)
