"""Queues, slots, pools and deadlines: everybody is answered, or told at once why not."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import grpc
import pytest
from google.rpc.error_details_pb2 import RetryInfo  # type: ignore[import-untyped]
from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]

from pdserve.config import DecodeFallback, Role
from pdserve.errors import DeadlineExceeded, NotReady, PeerError, QueueFull, WrongRole
from pdserve.request import FinishReason
from pdserve.rpc.handoff import Accepted, ChunkReady, Computing, FirstToken, Queued, Start
from pdserve.v1 import inference_pb2, inference_pb2_grpc
from prefill_node import handoff
from tests.roles.cluster import Cluster, Node, Pair, answer_to, ask, prompt_of, settle, until, until_load
from tests.roles.inside import BLOCK_SIZE, CHUNK, Held, Size
from tests.roles.relay import Asked, decode_by_hand, relay_to

PROMPT = prompt_of(2 * CHUNK + 10)


async def test_more_requests_than_slots_and_blocks_queue_and_are_all_answered(nodes: Cluster) -> None:
    pair = await nodes.pair(Size(num_blocks=8, num_slots=2), Size(num_blocks=12, num_slots=2))
    prompts = [prompt_of(1 + 31 * (number % 13), number) for number in range(24)]
    answers = await asyncio.gather(*(ask(pair.decode, prompt, 9) for prompt in prompts))
    assert [answer.token_ids for answer in answers] == [answer_to(prompt, 9) for prompt in prompts]
    assert {answer.placement for answer in answers} == {f"remote;peer={pair.prefill.address}"}
    await pair.settle()


@pytest.mark.parametrize("role", [Role.FUSED, Role.DECODE])
async def test_past_the_queue_a_request_is_refused_at_once_and_the_others_are_answered(
    nodes: Cluster, role: Role
) -> None:
    node = await nodes.start(role, Size(num_slots=2), max_queued_requests=1)
    node.runner.hold()
    live = [asyncio.create_task(ask(node, PROMPT)) for _ in range(3)]
    await until(lambda: node.rank.num_live == 3)
    with pytest.raises(QueueFull, match="3 requests are running or queued, the limit is 3") as caught:
        await ask(node, PROMPT)
    assert caught.value.retry_after_s == 1.0
    node.runner.release()
    await asyncio.gather(*live)
    await ask(node, PROMPT)
    await settle(node)


async def test_a_refused_request_does_not_count_as_its_peers_load(nodes: Cluster) -> None:
    pair = await nodes.pair(decode_size=Size(num_slots=1), max_queued_requests=0)
    pair.prefill.runner.hold()
    live = asyncio.create_task(ask(pair.decode, PROMPT))
    await pair.journal.first(Held)
    with pytest.raises(QueueFull):
        await ask(pair.decode, PROMPT)
    load = await pair.decode.load()
    assert load.counters["outstanding_prefill_tokens"] == len(PROMPT)
    pair.prefill.runner.release()
    await live
    await pair.settle()


async def test_a_prefill_node_without_room_leaves_the_prompt_to_the_decode_node(nodes: Cluster) -> None:
    prefill = await nodes.start_prefill(Size(num_slots=1), max_queued_requests=0)
    decode = await nodes.decode_of(prefill.address)
    prefill.runner.hold()
    first = asyncio.create_task(ask(decode, PROMPT))
    await nodes.journal.first(Held)
    assert (await ask(decode, prompt_of(70))).placement == "local;reason=peer_busy"
    prefill.runner.release()
    assert (await first).placement == f"remote;peer={prefill.address}"
    await settle(prefill, decode)


async def test_a_full_queue_says_at_once_when_to_come_again(nodes: Cluster) -> None:
    """On both kinds of node, in the details that gRPC clients of every language can read."""
    size = Size(num_slots=1)
    prefill = await nodes.start_prefill(size, max_queued_requests=0)
    decode = await nodes.decode_of(prefill.address, size=size, max_queued_requests=0)
    prefill.runner.hold()
    asking = asyncio.create_task(ask(decode, PROMPT))
    await nodes.journal.first(Held)
    async with decode_by_hand(prefill) as by_hand, grpc.aio.insecure_channel(decode.address) as channel:
        stream = await by_hand.begin(PROMPT)
        assert await stream.fate() == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "1 requests are running or queued, the limit is 1",
        )
        stub = cast("inference_pb2_grpc.InferenceAsyncStub", inference_pb2_grpc.InferenceStub(cast(Any, channel)))
        request = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=PROMPT))
        answer = stub.Generate(request)
        assert await answer.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for call in (stream.call, answer):
            assert retry_delay_s(await call.trailing_metadata()) == 1.0
    prefill.runner.release()
    await asking
    await settle(prefill, decode)


def retry_delay_s(metadata: Any) -> float:
    """Out of google.rpc.Status."""
    status = Status.FromString(dict(metadata)["grpc-status-details-bin"])
    (packed,) = [detail for detail in status.details if detail.Is(RetryInfo.DESCRIPTOR)]
    retry = RetryInfo()
    packed.Unpack(retry)
    return float(retry.retry_delay.ToTimedelta().total_seconds())


async def test_whoever_waits_at_the_prefill_node_hears_of_it(nodes: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handoff, "PROGRESS_S", 0.02)
    prefill = await nodes.start_prefill(Size(num_blocks=8))
    async with decode_by_hand(prefill) as decode:
        first = await decode.begin(prompt_of(6 * BLOCK_SIZE), "first")
        await first.hear(FirstToken)
        while (computing := await first.hear(Computing)).rank_tokens_computed == 0:
            pass  # said before the loop was asked
        assert computing == Computing(6 * BLOCK_SIZE, rank_tokens_computed=6 * BLOCK_SIZE)
        second = await decode.begin(prompt_of(6 * BLOCK_SIZE, 1), "second")
        assert (await second.hear(Queued)).num_ahead == 0
        third = await decode.begin(prompt_of(6 * BLOCK_SIZE, 2), "third")
        assert (await third.hear(Queued)).num_ahead == 1
        await first.hang_up()
        await second.hear(Accepted)
        await second.hang_up()
        await third.hear(FirstToken)
        await third.hang_up()
    await settle(prefill)


async def test_a_reservation_that_no_peer_accepted_gives_way_to_an_answer_and_has_its_turn_later(
    nodes: Cluster,
) -> None:
    prefill = await nodes.start_prefill(Size(num_blocks=1))
    decode = await nodes.decode_of(prefill.address, size=Size(num_blocks=4, answer_headroom=BLOCK_SIZE))
    long, short = prompt_of(BLOCK_SIZE), prompt_of(BLOCK_SIZE - 1)
    decode.runner.hold(lambda plan: bool(plan.decode))
    answer = asyncio.create_task(ask(decode, long, 3 * BLOCK_SIZE))
    await nodes.journal.first(Held)
    async with decode_by_hand(prefill) as by_hand:
        occupant = await by_hand.begin(prompt_of(BLOCK_SIZE, 1))
        await occupant.hear(FirstToken)
        waiting = asyncio.create_task(ask(decode, short, 1))
        await until(lambda: decode.rank.num_live == 2)
        decode.runner.release()
        assert (await answer).placement == f"remote;peer={prefill.address}"
        assert (await decode.counters())["reservations_taken_back"] == 1
        await occupant.hang_up()
        assert (await waiting).placement == f"remote;peer={prefill.address}"
    await settle(prefill, decode)


# ---------------------------------------------------------------- deadlines


async def test_a_deadline_ends_the_request_on_both_nodes(nodes: Cluster) -> None:
    prefill = await nodes.start_prefill()
    async with relay_to(prefill, nodes.journal) as relay:
        decode = await nodes.decode_of(relay.address)
        prefill.runner.hold(lambda plan: any(row.start >= CHUNK for row in plan.prefill))
        with pytest.raises(DeadlineExceeded):
            await decode.client.generate(token_ids=PROMPT, max_new_tokens=4, timeout_s=1.0)
        start = await nodes.journal.first(Asked, kind=Start)
        assert isinstance(start.message, Start)
        assert start.message.time_left_s is not None
        assert 0 < start.message.time_left_s <= 1.2  # gRPC rounds deadlines up
        prefill.runner.release()
        await settle(prefill, decode)
        await decode.stop()


async def test_a_prefill_node_keeps_to_the_deadline_of_a_decode_node_that_is_silent(
    nodes: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handoff, "PROGRESS_S", 0.02)
    prefill = await nodes.start_prefill()
    async with decode_by_hand(prefill) as decode:
        stream = await decode.begin(PROMPT, time_left_s=1.0)
        await stream.hear(ChunkReady)
        code, details = await stream.fate()
        assert (code.name, details) == (
            "DEADLINE_EXCEEDED",
            "the caller's deadline passed before the handoff was complete",
        )
        await settle(prefill)


async def test_a_deadline_while_decoding_ends_the_request(pair: Pair) -> None:
    pair.decode.runner.hold(lambda plan: bool(plan.decode) and plan.decode[0].end > len(PROMPT) + 3)
    with pytest.raises(DeadlineExceeded):
        await pair.decode.client.generate(token_ids=PROMPT, max_new_tokens=100, timeout_s=1.0)
    assert pair.journal.of(Held, node=pair.decode.name)
    pair.decode.runner.release()
    await pair.settle()


# ---------------------------------------------------------------- who answers what


async def test_a_prefill_node_refuses_to_answer_and_tells_its_load(nodes: Cluster) -> None:
    prefill = await nodes.start_prefill()
    with pytest.raises(WrongRole, match="send the request to a decode node"):
        await ask(prefill, PROMPT)
    assert not await prefill.client.abort("nobody")
    assert (await prefill.load()).num_blocks == 64


async def test_every_role_says_what_it_serves(nodes: Cluster, pair: Pair) -> None:
    fused = await nodes.start(Role.FUSED)
    for node in (fused, pair.prefill, pair.decode):
        info = await node.client.server_info()
        assert info.settings == {"role": str(node.args.role), "incarnation": f"life-of-{node.name}"}
        assert (await node.client.model_info()).max_model_len == 2048


async def test_somebody_elses_abort_ends_an_answer_of_a_fused_node(nodes: Cluster) -> None:
    fused = await nodes.start(Role.FUSED)
    fused.runner.hold(lambda plan: bool(plan.decode))
    stream = fused.client.stream(token_ids=PROMPT, max_new_tokens=50, request_id="a")
    await nodes.journal.first(Held)
    assert await fused.client.abort("a")
    fused.runner.release()
    assert [piece async for piece in stream][-1].finish is FinishReason.ABORT
    await settle(fused)


@pytest.mark.parametrize("role", [Role.FUSED, Role.DECODE])
async def test_a_node_that_stops_tells_its_callers(nodes: Cluster, role: Role) -> None:
    node = await nodes.start(role)
    node.runner.hold(lambda plan: bool(plan.decode))
    stream = node.client.stream(token_ids=PROMPT, max_new_tokens=50)
    await anext(stream)
    stopping = asyncio.create_task(stop_held(node))
    with pytest.raises(NotReady):
        await until_error(stream)
    await stopping


async def stop_held(node: Node) -> None:
    await node.server.stop(grace_s=0)
    await node.stop()


async def until_error(stream: object) -> None:
    async for _ in stream:  # type: ignore[attr-defined]
        pass


async def test_a_lost_rank_fails_its_requests_and_takes_no_more(nodes: Cluster, pair: Pair) -> None:
    pair.prefill.runner.hold()
    asking = asyncio.create_task(pair.decode.client.generate(token_ids=PROMPT, max_new_tokens=8))
    await pair.journal.first(Held)
    pair.decode.lose_rank()
    with pytest.raises(NotReady, match="ended with status -9"):
        await asking
    with pytest.raises(NotReady):
        await pair.decode.client.generate(token_ids=PROMPT, max_new_tokens=8)
    with pytest.raises(NotReady):
        await pair.decode.client.loads()
    pair.prefill.runner.release()
    await settle(pair.prefill)


async def test_a_prefill_node_whose_rank_is_lost_ends_its_streams(nodes: Cluster, pair: Pair) -> None:
    pair.prefill.runner.hold(lambda plan: any(row.start >= CHUNK for row in plan.prefill))
    asking = asyncio.create_task(ask(pair.decode, PROMPT))
    await pair.journal.first(Held)
    pair.prefill.runner.release()
    pair.prefill.lose_rank()
    assert (await asking).token_ids == answer_to(PROMPT, 6)
    await until_load(pair.decode, lambda load: load.num_held_blocks == 0)


async def test_a_peer_that_takes_no_message_is_given_up_too(nodes: Cluster) -> None:
    """A prompt beyond what the connection buffers, and nobody who reads it."""
    prefill = await nodes.start_prefill()
    async with relay_to(prefill, nodes.journal) as relay:
        relay.is_deaf, relay.max_prompt_tokens = True, 200_000
        size = Size(num_blocks=3200, max_model_len=200_000)
        decode = await nodes.decode_of(
            relay.address, size=size, transfer_timeout_s=0.5, decode_fallback=DecodeFallback.FAIL
        )
        with pytest.raises(PeerError, match=r"for 0.5 s"):
            await ask(decode, prompt_of(199_000))
        await settle(decode)
        await decode.stop()
