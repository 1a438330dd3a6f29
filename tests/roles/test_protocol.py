"""A peer that does not keep to the protocol, on either side: the stream ends, nothing leaks, no token is wrong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import grpc
import pytest

from pdserve.engine.messages import PullCommitted
from pdserve.errors import TransferFailed
from pdserve.request import BlockId, LeaseId
from pdserve.rpc.handoff import (
    Accepted,
    ChunkReady,
    FirstToken,
    HandoffAbort,
    Release,
    Released,
    Renew,
    Start,
    ToDecode,
    ToPrefill,
)
from pdserve.rpc.handoff_codec import decode_to_decode, encode_to_prefill
from pdserve.v1 import handoff_pb2 as pb
from tests.roles.cluster import Cluster, Node, Told, answer_to, ask, prompt_of, settle, until_ready
from tests.roles.inside import BLOCK_SIZE, CHUNK, VOCAB_SIZE, Size
from tests.roles.journal import LIMIT_S, Journal
from tests.roles.relay import Asked, DecodeByHand, End, Passed, Relay, decode_by_hand, relay_to

PROMPT = prompt_of(3 * CHUNK + 10)

# ---------------------------------------------------------------- a prefill node that does wrong


@dataclass(frozen=True)
class Relayed:
    """prefill ◀─ relay ◀─ decode"""

    prefill: Node
    relay: Relay
    decode: Node
    journal: Journal


@pytest.fixture
async def relayed(nodes: Cluster) -> AsyncIterator[Relayed]:
    prefill = await nodes.start_prefill()
    async with relay_to(prefill, nodes.journal) as relay:
        decode = await nodes.decode_of(relay.address)
        yield Relayed(prefill, relay, decode, nodes.journal)
        # The relay is a peer's stand-in, and the decode node is done with it.
        await decode.stop()


Wrong = Callable[[ToDecode], Sequence[Passed]]


def on(kind: type[ToDecode], change: Callable[..., Sequence[Passed]]) -> Wrong:
    return lambda said: change(said) if isinstance(said, kind) else [said]


def on_chunk(seq: int, change: Callable[[ChunkReady], Sequence[Passed]]) -> Wrong:
    return lambda said: change(said) if isinstance(said, ChunkReady) and said.seq == seq else [said]


def without_first_chunk(said: ToDecode) -> Sequence[Passed]:
    if not isinstance(said, ChunkReady):
        return [said]
    return [] if said.seq == 0 else [replace(said, seq=said.seq - 1)]


WRONG: dict[str, Wrong] = {
    "accepted twice": on(Accepted, lambda said: [said, said]),
    "accepted by two ranks": on(Accepted, lambda said: [replace(said, num_ranks=2)]),
    "a chunk before accepted": on(Accepted, lambda said: []),
    "the first token before accepted": on(Accepted, lambda said: [FirstToken(5, 1), said]),
    "the first token twice": on(FirstToken, lambda said: [said, said]),
    "a first token outside the vocabulary": on(FirstToken, lambda said: [replace(said, token_id=VOCAB_SIZE)]),
    "fewer chunks than promised": on(FirstToken, lambda said: [replace(said, num_chunks=said.num_chunks + 1)]),
    "released before the release": on(Accepted, lambda said: [said, Released(True)]),
    "refused": on(Released, lambda said: [Released(False)]),
    "aborted": on_chunk(1, lambda said: [HandoffAbort("told to")]),
    "a chunk twice": on_chunk(1, lambda said: [said, said]),
    "a chunk that never comes": on_chunk(1, lambda said: []),
    "chunks in the wrong order": on_chunk(0, lambda said: [replace(said, seq=1), said]),
    "a gap": without_first_chunk,
    "an overlap": on_chunk(1, lambda said: [replace(said, first_token=said.first_token - BLOCK_SIZE)]),
    "an end inside a block": on_chunk(0, lambda said: [replace(said, end_token=said.end_token - 1)]),
    "an end past the prompt": on_chunk(3, lambda said: [replace(said, end_token=said.end_token + 1)]),
    "too few blocks": on_chunk(1, lambda said: [replace(said, blocks=said.blocks[:1])]),
    "a block that is not there": on_chunk(1, lambda said: [replace(said, blocks=(BlockId(1 << 20), said.blocks[1]))]),
    "a chunk of another rank": on_chunk(1, lambda said: [replace(said, rank=1)]),
    "a chunk too many": on(FirstToken, lambda said: [said, ChunkReady(0, said.num_chunks, 0, 64, (BlockId(0),))]),
    "a message of no known kind": on(FirstToken, lambda said: [pb.PrefillResponse()]),
    "a lease without a name": on(Accepted, lambda said: [pb.PrefillResponse(accepted=pb.Accepted(ranks=1))]),
    "end before accepted": on(Accepted, lambda said: [End()]),
    "end after a chunk": on_chunk(1, lambda said: [said, End()]),
    "end after the first token": on(FirstToken, lambda said: [said, End()]),
    "end right after the release": on(Released, lambda said: [End()]),
    "error before accepted": on(Accepted, lambda said: [TransferFailed("told to")]),
    "error after a chunk": on_chunk(1, lambda said: [said, TransferFailed("told to")]),
    "error after the first token": on(FirstToken, lambda said: [said, TransferFailed("told to")]),
    "error right after the release": on(Released, lambda said: [TransferFailed("told to")]),
}


@pytest.mark.parametrize("name", WRONG)
async def test_whatever_a_prefill_node_says_wrong_the_answer_is_right_and_says_where_it_was_prefilled(
    relayed: Relayed, name: str
) -> None:
    relayed.relay.change = WRONG[name]
    answer = await ask(relayed.decode, PROMPT, 8)
    assert answer.token_ids == answer_to(PROMPT, 8)
    assert answer.placement == "local;reason=transfer_failed"
    assert (await relayed.decode.counters())["decode_fallback_total:transfer_failed"] == 1
    assert not relayed.journal.of(Told, kind=PullCommitted)
    await settle(relayed.prefill, relayed.decode)


async def test_one_handoff_that_goes_wrong_leaves_the_others_alone(relayed: Relayed) -> None:
    """Every other lease is spoilt; the peer is set aside after each, so prompts are prefilled here and there."""
    spoilt: set[LeaseId] = set()

    def change(said: ToDecode) -> Sequence[Passed]:
        if isinstance(said, Accepted) and len(said.lease_id) % 2:
            spoilt.add(said.lease_id)
            return [said, said]
        return [said]

    relayed.relay.change = change
    prompts = [prompt_of(200 + number, number) for number in range(12)]
    names = [f"{number}" * (number % 2 + 1) for number in range(12)]
    answers = await asyncio.gather(
        *(ask(relayed.decode, prompt, 8, request_id=name) for prompt, name in zip(prompts, names, strict=True))
    )
    assert [answer.token_ids for answer in answers] == [answer_to(prompt, 8) for prompt in prompts]
    assert 0 < len(spoilt) < 12
    placements = [answer.placement for answer in answers]
    assert placements.count("local;reason=transfer_failed") == len(spoilt)
    await settle(relayed.prefill, relayed.decode)


@pytest.mark.parametrize("end", [End(), TransferFailed("told to")], ids=["end", "error"])
async def test_a_stream_that_ends_after_the_confirmation_takes_nothing_back(relayed: Relayed, end: Passed) -> None:
    relayed.relay.change = on(Released, lambda said: [said, end])
    answer = await ask(relayed.decode, PROMPT, 8)
    assert answer.token_ids == answer_to(PROMPT, 8)
    assert answer.placement == f"remote;peer={relayed.relay.address}"
    assert (await relayed.decode.counters())["prompt_tokens_computed"] == 0
    await settle(relayed.prefill, relayed.decode)


async def test_after_a_fault_the_peer_is_asked_again_and_used_again(relayed: Relayed) -> None:
    relayed.relay.change = WRONG["refused"]
    await ask(relayed.decode, prompt_of(70))
    relayed.relay.change = lambda said: [said]
    await until_ready(relayed.decode)
    assert (await ask(relayed.decode, prompt_of(71))).placement == f"remote;peer={relayed.relay.address}"
    await settle(relayed.prefill, relayed.decode)


async def test_a_peer_that_says_nothing_new_for_too_long_is_given_up(nodes: Cluster) -> None:
    pair = await nodes.pair(transfer_timeout_s=0.3)
    pair.prefill.runner.hold(lambda plan: any(row.start >= CHUNK for row in plan.prefill))
    answer = await ask(pair.decode, PROMPT)
    assert answer.placement == "local;reason=transfer_failed"
    pair.prefill.runner.release()
    await pair.settle()


# ---------------------------------------------------------------- a decode node that does wrong


@pytest.fixture
async def prefill(nodes: Cluster) -> Node:
    return await nodes.start_prefill()


@pytest.fixture
async def by_hand(prefill: Node) -> AsyncIterator[DecodeByHand]:
    async with decode_by_hand(prefill) as decode:
        yield decode


async def test_a_handoff_by_hand_is_confirmed(prefill: Node, by_hand: DecodeByHand) -> None:
    stream = await by_hand.begin(PROMPT)
    accepted = await stream.hear(Accepted)
    first = await stream.hear_the_prompt_out()
    assert (first.token_id,) == answer_to(PROMPT, 1)
    await stream.say(Renew(accepted.lease_id))
    await stream.say(Release(accepted.lease_id))
    assert (await stream.hear(Released)).is_valid
    assert (await stream.fate())[0] is grpc.StatusCode.OK
    await settle(prefill)


STARTS: dict[str, tuple[Callable[[Start], Start], grpc.StatusCode, str]] = {
    "another life": (
        lambda start: replace(start, incarnation="life-before"),
        grpc.StatusCode.FAILED_PRECONDITION,
        "incarnation: 'life-of-prefill0' here, 'life-before' there",
    ),
    "another model": (
        lambda start: replace(start, fingerprint=replace(start.fingerprint, model_revision="r9", num_layers=3)),
        grpc.StatusCode.FAILED_PRECONDITION,
        "model_revision: 'r0' here, 'r9' there; num_layers: 2 here, 3 there",
    ),
    "other weights": (
        lambda start: replace(start, weights_version=4),
        grpc.StatusCode.FAILED_PRECONDITION,
        "weights_version: 0 here, 4 there",
    ),
    "too long": (
        lambda start: replace(start, prompt=(1,) * 2049),
        grpc.StatusCode.INVALID_ARGUMENT,
        "prompt has 2049 tokens, the limit is 2048",
    ),
    "a token outside the vocabulary": (
        lambda start: replace(start, prompt=(1, VOCAB_SIZE)),
        grpc.StatusCode.UNAVAILABLE,
        "258",
    ),
    "half a block cached": (
        lambda start: replace(start, num_cached_tokens=BLOCK_SIZE // 2),
        grpc.StatusCode.UNAVAILABLE,
        "num_cached_tokens is 32",
    ),
    "everything cached": (
        lambda start: replace(start, prompt=start.prompt[:BLOCK_SIZE], num_cached_tokens=BLOCK_SIZE),
        grpc.StatusCode.UNAVAILABLE,
        "num_cached_tokens is 64 for a prompt of 64 tokens",
    ),
    "no time left": (
        lambda start: replace(start, time_left_s=0.0),
        grpc.StatusCode.DEADLINE_EXCEEDED,
        "deadline",
    ),
}


@pytest.mark.parametrize("name", STARTS)
async def test_a_start_that_does_not_fit_is_refused_with_field_and_values(
    prefill: Node, by_hand: DecodeByHand, name: str
) -> None:
    change, status, message = STARTS[name]
    stream = by_hand.open()
    await stream.say(change(await by_hand.start_of(PROMPT)))
    code, details = await stream.fate()
    assert code is status
    assert message in details
    await settle(prefill)


async def test_a_live_request_key_is_refused_and_free_again_afterwards(prefill: Node, by_hand: DecodeByHand) -> None:
    first = await by_hand.begin(PROMPT)
    await first.hear(FirstToken)
    second = await by_hand.begin(PROMPT)
    assert (await second.fate())[0] is grpc.StatusCode.ALREADY_EXISTS
    await first.hang_up()
    await settle(prefill)
    third = await by_hand.begin(PROMPT)
    await third.hear(FirstToken)


@pytest.mark.parametrize("first", [Release(LeaseId("x")), pb.PrefillRequest()], ids=["release", "nothing known"])
async def test_whoever_does_not_begin_with_start_is_refused(
    prefill: Node, by_hand: DecodeByHand, first: ToPrefill | pb.PrefillRequest
) -> None:
    stream = by_hand.open()
    await stream.say(first)
    assert (await stream.fate())[0] is grpc.StatusCode.UNAVAILABLE


async def test_a_stream_that_ends_before_its_start_is_over(by_hand: DecodeByHand) -> None:
    stream = by_hand.open()
    await stream.call.done_writing()
    assert await stream.fate() == (grpc.StatusCode.UNAVAILABLE, "the stream ended before its Start")


WRONG_TO_PREFILL: dict[str, Callable[[Start, Accepted], list[ToPrefill | pb.PrefillRequest]]] = {
    "a second start": lambda start, accepted: [start],
    "a renewal of another lease": lambda start, accepted: [Renew(LeaseId("another"))],
    "a release of another lease": lambda start, accepted: [Release(LeaseId("another"))],
    "a release before the last chunk": lambda start, accepted: [Release(accepted.lease_id)],
    "a message of no known kind": lambda start, accepted: [pb.PrefillRequest()],
    "a lease without a name": lambda start, accepted: [pb.PrefillRequest(renew=pb.Renew())],
}


@pytest.mark.parametrize("name", WRONG_TO_PREFILL)
async def test_whatever_a_decode_node_says_wrong_ends_its_stream_and_frees_its_blocks(
    prefill: Node, by_hand: DecodeByHand, name: str
) -> None:
    prefill.runner.hold(lambda plan: any(row.start >= CHUNK for row in plan.prefill))
    stream = await by_hand.begin(PROMPT)
    accepted = await stream.hear(Accepted)
    await stream.hear(ChunkReady)
    for message in WRONG_TO_PREFILL[name](await by_hand.start_of(PROMPT), accepted):
        await stream.say(message)
    assert (await stream.fate())[0] is grpc.StatusCode.UNAVAILABLE
    prefill.runner.release()
    await settle(prefill)
    assert (await (await by_hand.begin(PROMPT)).hear(FirstToken)).token_id == answer_to(PROMPT, 1)[0]


async def test_a_second_release_is_never_answered_true(prefill: Node, by_hand: DecodeByHand) -> None:
    stream = await by_hand.begin(PROMPT)
    accepted = await stream.hear(Accepted)
    await stream.hear_the_prompt_out()
    await stream.say(Release(accepted.lease_id))
    await stream.say(Release(accepted.lease_id))
    answers: list[ToDecode] = []
    async with asyncio.timeout(LIMIT_S):
        with suppress(grpc.aio.AioRpcError):
            answers += [decode_to_decode(message) async for message in stream.call]
    assert answers.count(Released(True)) <= 1
    await settle(prefill)


async def test_bytes_that_are_no_message_end_the_stream(prefill: Node, by_hand: DecodeByHand) -> None:
    prefill.runner.hold()
    raw = by_hand.channel.stream_stream(
        "/pdserve.v1.Handoff/Prefill", request_serializer=bytes, response_deserializer=bytes
    )()
    await raw.write(encode_to_prefill(await by_hand.start_of(PROMPT)).SerializeToString())
    await raw.read()
    await raw.write(b"\xff\xff\xff")
    async with asyncio.timeout(LIMIT_S):
        assert await raw.code() is grpc.StatusCode.INVALID_ARGUMENT
    prefill.runner.release()
    await settle(prefill)


@pytest.mark.parametrize("how", ["abort", "half close", "cancel"])
@pytest.mark.parametrize("when", [Accepted, ChunkReady, FirstToken])
async def test_a_decode_node_that_gives_up_frees_the_blocks_at_once(
    prefill: Node, by_hand: DecodeByHand, when: type[ToDecode], how: str
) -> None:
    stream = await by_hand.begin(PROMPT)
    await stream.hear(when)
    match how:
        case "abort":
            await stream.say(HandoffAbort("told to"))
        case "half close":
            await stream.call.done_writing()
        case "cancel":
            await stream.hang_up()
    await settle(prefill)


async def test_a_lease_that_nobody_renews_expires_and_is_never_confirmed(nodes: Cluster) -> None:
    prefill = await nodes.start_prefill(Size(lease_s=0.5))
    async with decode_by_hand(prefill) as decode:
        stream = await decode.begin(PROMPT)
        await stream.hear(FirstToken)
        assert (await stream.hear(HandoffAbort)).reason == "the lease was revoked: expired"
        await settle(prefill)
        assert (await prefill.counters())["lease:revoked:expired"] == 1


async def test_a_lease_that_is_renewed_outlives_its_time(nodes: Cluster) -> None:
    prefill = await nodes.start_prefill(Size(lease_s=0.6))
    async with relay_to(prefill, nodes.journal) as relay:
        decode = await nodes.decode_of(relay.address)
        nodes.network.hang(prefill.name)
        asking = asyncio.create_task(ask(decode, PROMPT))
        # Each a sixth of the lease after the one before.
        await nodes.journal.count(Asked, 8, kind=Renew)
        nodes.network.heal(prefill.name)
        assert (await asking).placement == f"remote;peer={relay.address}"
        await settle(prefill, decode)
        await decode.stop()


async def test_a_release_that_the_prefill_node_never_hears_is_no_confirmation(nodes: Cluster) -> None:
    prefill = await nodes.start_prefill(Size(lease_s=0.3))
    async with relay_to(prefill, nodes.journal) as relay:
        relay.is_deaf_to = Release
        decode = await nodes.decode_of(relay.address)
        answer = await ask(decode, PROMPT)
        assert answer.placement == "local;reason=transfer_failed"
        await settle(prefill, decode)
        await decode.stop()
