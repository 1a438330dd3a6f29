"""Nodes of different versions: they work together, or are told at connect what keeps them apart."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc
import pytest

from decode_node import peers
from pdserve.config import DecodeFallback, Role
from pdserve.errors import PdserveError
from pdserve.rpc import handoff
from pdserve.v1 import handoff_pb2 as pb
from tests.roles.cluster import Cluster, Node, ask, prompt_of, settle, until, until_ready
from tests.roles.inside import CHUNK, Size
from tests.roles.relay import decode_by_hand, relay_to

PROMPT = prompt_of(CHUNK)

Redescribe = Callable[[pb.DescribeResponse], None]


async def refusal_of(decode: Node, field: str) -> str:
    """What a caller is told once the peer was looked at."""
    message = ""
    async with asyncio.timeout(20):
        while field not in message:
            with pytest.raises(PdserveError) as caught:
                await ask(decode, PROMPT)
            message = caught.value.message
    return message


def speaks(newest: int, oldest: int) -> Redescribe:
    def change(described: pb.DescribeResponse) -> None:
        described.protocol_version, described.min_protocol_version = newest, oldest

    return change


async def test_a_prefill_node_from_before_there_were_versions_is_refused(nodes: Cluster) -> None:
    prefill = await nodes.start_prefill()
    async with relay_to(prefill, nodes.journal) as relay:
        relay.redescribe = speaks(0, 0)
        decode = await nodes.start(Role.DECODE, prefill_peers=(relay.address,), decode_fallback=DecodeFallback.FAIL)
        assert "protocol_version: 1 to 1 here, 0 to 0 there" in await refusal_of(decode, "protocol_version")
        relay.redescribe = speaks(handoff.PROTOCOL_VERSION + 3, handoff.PROTOCOL_VERSION)
        await until_ready(decode)
        assert (await ask(decode, PROMPT)).placement == f"remote;peer={relay.address}"
        await settle(prefill, decode)
        await decode.stop()


async def test_a_prefill_node_refuses_a_decode_node_that_shares_no_version(nodes: Cluster) -> None:
    prefill = await nodes.start_prefill()
    async with decode_by_hand(prefill) as decode:
        for newest, oldest in ((0, 0), (9, 2)):
            request = pb.DescribeRequest(protocol_version=newest, min_protocol_version=oldest)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await decode.stub.Describe(request)
            assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert f"protocol_version: 1 to 1 here, {oldest} to {newest} there" in str(caught.value.details())
        overlapping = pb.DescribeRequest(protocol_version=9, min_protocol_version=1)
        assert (await decode.stub.Describe(overlapping)).incarnation == f"life-of-{prefill.name}"


async def test_a_decode_node_tells_its_callers_that_its_peer_refused_its_version(nodes: Cluster) -> None:
    prefill = await nodes.start_prefill()
    async with relay_to(prefill, nodes.journal) as relay:
        relay.reask = lambda _: pb.DescribeRequest(protocol_version=7, min_protocol_version=6)
        decode = await nodes.start(Role.DECODE, prefill_peers=(relay.address,), decode_fallback=DecodeFallback.FAIL)
        assert "protocol_version: 1 to 1 here, 6 to 7 there" in await refusal_of(decode, "protocol_version")
        relay.reask = lambda request: request
        await until_ready(decode)
        await settle(prefill, decode)
        await decode.stop()


async def test_a_peer_whose_chunks_take_longer_than_the_deadline_allows_is_used_and_waited_for(
    nodes: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(peers, "CHECK_S", 0.02)
    prefill = await nodes.start_prefill(Size(longest_chunk_s=28.2))
    async with relay_to(prefill, nodes.journal) as relay:
        num_described = 0

        def count(_: object) -> None:
            nonlocal num_described
            num_described += 1

        relay.redescribe = count
        decode = await nodes.decode_of(relay.address, transfer_timeout_s=60.0)
        await until(lambda: num_described >= 3)
        told = [record for record in caplog.records if "takes up to" in record.getMessage()]
        assert [record.levelname for record in told] == ["WARNING"]
        assert f"prefill node {relay.address} takes up to 28.2 s for a chunk" in told[0].getMessage()
        assert "without progress for 84.6 s, and not --transfer-timeout-s 60," in told[0].getMessage()
        assert (await ask(decode, prompt_of(200))).placement == f"remote;peer={relay.address}"
        await settle(prefill, decode)
        await decode.stop()
