"""Nodes of every kind tell of their ranks' rounds, through real fronts."""

from __future__ import annotations

import pytest

from pdserve.config import Role
from pdserve.errors import NotReady
from pdserve.rounds import GateDecision, Round
from tests.roles.cluster import Cluster, Node, Pair, ask, prompt_of
from tests.roles.inside import CHUNK, Size


async def rounds_of(node: Node) -> list[Round]:
    return [one async for batch in node.client.rounds(last=4096) for one in batch.rounds]


async def test_a_fused_node_tells_of_every_round_and_of_its_gate(nodes: Cluster) -> None:
    node = await nodes.start(Role.FUSED, Size(gate=(2, 4, None)))
    await ask(node, prompt_of(2 * CHUNK), 4)
    rounds = await rounds_of(node)
    counters = await node.counters()
    assert [one.number for one in rounds] == list(range(1, len(rounds) + 1))
    assert sum(one.num_prefill_tokens for one in rounds) == 2 * CHUNK == counters["prompt_tokens_computed"]
    assert sum(one.num_decode_rows for one in rounds) == 3
    assert {one.decision for one in rounds if one.num_prefill_rows} == {GateDecision.IDLE}
    assert {one.num_transfers for one in rounds} == {None}
    assert counters["forward_microseconds_total"] >= sum(one.forward_us or 0 for one in rounds)


async def test_a_pair_shows_a_handoff_from_both_ends(pair: Pair) -> None:
    answer = await ask(pair.decode, prompt_of(2 * CHUNK), 4)
    assert answer.placement.startswith("remote")
    prefill, decode = await rounds_of(pair.prefill), await rounds_of(pair.decode)
    assert (sum(one.num_prefill_tokens for one in prefill), sum(one.num_decode_rows for one in prefill)) == (
        2 * CHUNK,
        0,
    )
    assert (sum(one.num_prefill_tokens for one in decode), sum(one.num_decode_rows for one in decode)) == (0, 3)
    for rounds in (prefill, decode):
        assert max(one.num_transfers for one in rounds if one.num_transfers is not None) == 1
        assert {one.decision for one in rounds} <= {None, GateDecision.CADENCE}
    await pair.settle()


async def test_a_follower_of_a_rank_that_is_lost_is_told_why(nodes: Cluster) -> None:
    node = await nodes.start(Role.FUSED)
    batches = node.client.rounds(follow=True)
    await anext(batches)
    node.lose_rank()
    with pytest.raises(NotReady, match="ended with status -9"):
        await anext(batches)
