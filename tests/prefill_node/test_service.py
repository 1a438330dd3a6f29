"""The Handoff service over a rank whose two threads are played by hand."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from typing import Any

import pytest

from pdserve.engine import member
from pdserve.engine.channel import FrontChannel, RankChannel, private_directory
from pdserve.engine.front import Rank
from pdserve.engine.member import Member
from pdserve.engine.messages import (
    ChunkAnnounced,
    FromRank,
    FromTransport,
    LeaseOpened,
    Output,
    Ping,
    Pong,
    Ready,
    Submit,
    ToRank,
    ToTransport,
)
from pdserve.engine.ranks import Ranks
from pdserve.errors import NotReady
from pdserve.kv.layout import Fingerprint
from pdserve.request import BlockId, FinishReason, LeaseId, RequestId, SamplingParams
from pdserve.rpc.handoff import Accepted, ChunkReady, Computing, Description, FirstToken, Renew, RequestKey, Start
from pdserve.rpc.handoff_codec import decode_description, decode_to_decode, encode_describe, encode_to_prefill
from pdserve.v1 import handoff_pb2 as pb
from prefill_node import handoff as one_handoff
from prefill_node.handoff import Handoff
from prefill_node.parts import FromPart
from prefill_node.service import HandoffServicer
from prefill_node.workload import Workload

LIMIT_S = 20.0
FINGERPRINT = Fingerprint(1, "LlamaForCausalLM", "r0", "float32", 16, 2, 2, 16, 288)
P = Description("life-1", "0", FINGERPRINT, 0, 8, 1024, (b"",), 512, 4, 30.0)


@dataclass(frozen=True)
class ByHand:
    """A front's rank, and the ends that a rank process would have."""

    ranks: Ranks
    loop: RankChannel[ToRank, FromRank]
    transport: RankChannel[ToTransport, FromTransport]

    @property
    def rank(self) -> Rank:
        return self.ranks[0]

    def say(self, message: LeaseOpened | ChunkAnnounced) -> None:
        """As the transport of its only process."""
        self.rank.members[0].on_transport(message)

    async def until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not is_so():  # noqa: ASYNC110 - nothing would set an event for it
                await asyncio.sleep(0)

    async def asked_for_life(self) -> None:
        await self.until(lambda: any(isinstance(message, Ping) for message in self.loop.receive_all()))

    async def submitted(self) -> RequestId:
        """What the rank is to call the request that came."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                for message in self.loop.receive_all():
                    if isinstance(message, Submit):
                        return message.request.request_id
                await asyncio.sleep(0)


@pytest.fixture
async def by_hand() -> AsyncIterator[ByHand]:
    with private_directory() as sockets:
        loop, transport = f"ipc://{sockets}/loop", f"ipc://{sockets}/transport"
        to_loop: FrontChannel[FromRank, ToRank] = FrontChannel(loop, FromRank)
        to_transport: FrontChannel[FromTransport, ToTransport] = FrontChannel(transport, FromTransport)
        hand = ByHand(
            Ranks([Rank([Member(to_loop, to_transport)], max_live=4)]),
            RankChannel(loop, ToRank),
            RankChannel(transport, ToTransport),
        )
        hand.loop.send(Ready(8, 1024, 512, 288, (), FINGERPRINT, b""))
        await hand.rank.members[0].attach(timeout_s=LIMIT_S)
        yield hand
        hand.loop.close()
        hand.transport.close()
        await hand.rank.stop()


class Context:
    """As much of gRPC's as is asked for."""

    def peer(self) -> str:
        return "ipv4:10.0.0.9:4711"


CONTEXT: Any = Context()


async def start_alone() -> AsyncIterator[pb.PrefillRequest]:
    key = RequestKey("decode-life", RequestId("r"), attempt=0)
    yield encode_to_prefill(Start("life-1", key, 0, (1, 2, 3), SamplingParams(4), 0, FINGERPRINT))


async def requests() -> AsyncIterator[pb.PrefillRequest]:
    """A Start, and then silence."""
    async for request in start_alone():
        yield request
    await asyncio.Event().wait()


async def test_the_lease_is_told_before_the_first_token_whichever_came_first(by_hand: ByHand) -> None:
    """The token comes from the loop and the lease from the transport thread, by sockets of their own."""
    servicer = HandoffServicer(by_hand.ranks, P)
    async with aclosing(servicer.Prefill(requests(), CONTEXT)) as responses:
        first = asyncio.ensure_future(anext(responses))
        request_id = await by_hand.submitted()
        lease = LeaseId(request_id)
        by_hand.rank.deliver(request_id, Output(request_id, (5,), num_chunks=1))
        by_hand.say(LeaseOpened(lease))
        by_hand.say(ChunkAnnounced(lease, 0, 0, 3, (BlockId(2),)))
        async with asyncio.timeout(LIMIT_S):
            said = [decode_to_decode(await response) for response in (first, anext(responses), anext(responses))]
    assert said[0] == Accepted(lease, num_ranks=1)
    assert {type(message) for message in said[1:]} == {ChunkReady, FirstToken}


def accepted(rank: Rank) -> Handoff:
    workload = Workload(P.num_blocks, FINGERPRINT.block_size)
    handoff = Handoff(LeaseId("a"), rank, workload, num_prompt_tokens=512, lease_s=30.0)
    workload.add(handoff.lease_id, 512)
    handoff.answer(FromPart(0, LeaseOpened(handoff.lease_id)))
    return handoff


async def test_a_prefill_node_tells_of_progress_for_as_long_as_its_loop_shows_life(
    by_hand: ByHand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round of its longest may pass without a word; three of them may not."""
    by_hand.loop.send(Pong(0, longest_round_s=20.0))
    await by_hand.until(lambda: by_hand.rank.longest_round_s == 20.0)
    handoff = accepted(by_hand.rank)
    handoff.answer(FromPart(0, ChunkAnnounced(handoff.lease_id, 0, 0, 64, ())))
    later_s = 0.0
    monkeypatch.setattr(member, "monotonic", lambda: time.monotonic() + later_s)
    for later_s, expected in ((0.0, (Computing(64),)), (50.0, (Computing(64),)), (70.0, ())):  # noqa: B007
        assert handoff.progress() == expected
    by_hand.loop.send(Pong(512))
    async with asyncio.timeout(LIMIT_S):
        while not (said := handoff.progress()):  # noqa: ASYNC110 - nothing would set an event for it
            await asyncio.sleep(0)
    assert said == (Computing(64, rank_tokens_computed=512),)


async def test_without_long_chunks_a_third_of_the_lease_is_how_long_a_loop_may_be_silent(
    by_hand: ByHand, monkeypatch: pytest.MonkeyPatch
) -> None:
    handoff = accepted(by_hand.rank)
    start_s = time.monotonic()
    monkeypatch.setattr(member, "monotonic", lambda: start_s + 9.9)
    assert handoff.progress()
    monkeypatch.setattr(member, "monotonic", lambda: start_s + 10.1)
    assert not handoff.progress()


async def test_what_decode_says_does_not_keep_a_prefill_node_from_telling_of_progress(
    by_hand: ByHand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Renewals of a short lease come more often than progress does."""
    monkeypatch.setattr(one_handoff, "PROGRESS_S", 0.05)
    servicer = HandoffServicer(by_hand.ranks, P)

    async def renewing() -> AsyncIterator[pb.PrefillRequest]:
        async for request in start_alone():
            yield request
        lease = LeaseId(await by_hand.submitted())
        by_hand.say(LeaseOpened(lease))
        while True:
            yield encode_to_prefill(Renew(lease))
            await asyncio.sleep(0)

    async with aclosing(servicer.Prefill(renewing(), CONTEXT)) as responses:
        async with asyncio.timeout(LIMIT_S):
            said = [decode_to_decode(await anext(responses)) for _ in range(4)]
    assert [type(message) for message in said] == [Accepted, Computing, Computing, Computing]


async def test_describe_tells_how_long_a_chunk_takes_now_and_not_what_the_warm_up_said(by_hand: ByHand) -> None:
    """A start on a busy machine is not held against the node for good."""
    servicer = HandoffServicer(by_hand.ranks, replace(P, longest_chunk_s=28.0))
    by_hand.rank.members[0].longest_round_s = 28.0
    assert decode_description(await servicer.Describe(encode_describe(), CONTEXT)).longest_chunk_s == 28.0
    by_hand.loop.send(Pong(512, longest_round_s=0.5))
    await by_hand.until(lambda: by_hand.rank.longest_round_s == 0.5)
    assert decode_description(await servicer.Describe(encode_describe(), CONTEXT)).longest_chunk_s == 0.5
    await by_hand.asked_for_life()


async def test_prompts_that_a_decode_node_leaves_behind_are_told_in_a_few_lines(
    by_hand: ByHand, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "prefill_node")
    servicer = HandoffServicer(by_hand.ranks, P)
    for _ in range(3):
        responses = servicer.Prefill(requests(), CONTEXT)
        first = asyncio.ensure_future(anext(responses))
        await by_hand.submitted()
        first.cancel()
        await asyncio.wait([first])
        await responses.aclose()
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "the decode node at ipv4:10.0.0.9:4711 left a prompt behind, 0 of its 3 tokens were computed")
    ]
    servicer._left._sum_up()
    assert caplog.records[-1].getMessage().startswith("2 more within 1 s (by ipv4:10.0.0.9:4711 2); the last: ")


async def test_a_prompt_that_ended_with_its_first_token_or_with_an_error_was_not_left_behind(
    by_hand: ByHand, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "prefill_node")
    servicer = HandoffServicer(by_hand.ranks, P)
    for output in (Output(RequestId(""), (5,), finish=FinishReason.STOP), Output(RequestId(""), error_name="NotReady")):
        async with aclosing(servicer.Prefill(requests(), CONTEXT)) as responses:
            first = asyncio.ensure_future(anext(responses))
            request_id = await by_hand.submitted()
            by_hand.say(LeaseOpened(LeaseId(request_id)))
            async with asyncio.timeout(LIMIT_S):
                await first
                by_hand.rank.deliver(request_id, output)
                with suppress(NotReady):
                    await anext(responses)
    assert caplog.records == []
