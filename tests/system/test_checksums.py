"""A pair that compares every block it moves, over each transport."""

from __future__ import annotations

from random import Random

import pytest

from tests.system.conftest import NUM_BYTES, Greedy, over_both
from tests.system.nodes import BLOCK_SIZE, CHUNK, Nodes

pytestmark = pytest.mark.system


@over_both
def test_with_checksums_every_block_arrives_as_it_was_announced(
    nodes: Nodes, tiny_greedy: Greedy, ucx_tls: str | None
) -> None:
    prefill, decode = nodes.start_pair(kv_checksum=True, ucx_tls=ucx_tls)
    shared = [Random(1).randrange(NUM_BYTES) for _ in range(20 * CHUNK)]
    for length in (1, BLOCK_SIZE, BLOCK_SIZE + 1, 4 * CHUNK + 5, 20 * CHUNK):
        answer = decode.ask(shared[-length:], 8)
        assert answer.token_ids == tiny_greedy(shared[-length:], 8)
        assert answer.placement == f"remote;peer={prefill.address}"
    decode.wait_until_quiet()
    prefill.wait_until_quiet()
    assert decode.load().counters["kv_checksum_failures_total"] == 0
