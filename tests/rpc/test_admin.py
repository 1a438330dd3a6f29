"""Rounds over gRPC: what there was, what comes, what a slow reader lost, and who is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import grpc
import grpc.aio
import pytest

from pdserve.errors import NotReady
from pdserve.rounds import NUM_KEPT, RankRounds, Round
from pdserve.rpc import admin
from pdserve.rpc.admin import AdminServicer
from pdserve.rpc.fake import EchoGenerator, FakeRounds, fake_node
from pdserve.rpc.rounds_codec import MOST_A_RESPONSE, decode_rounds
from pdserve.v1 import admin_pb2 as pb
from pdserve.v1.admin_pb2_grpc import AdminStub
from tests.roles.journal import LIMIT_S


def plain(number: int) -> Round:
    return Round(number, 1000 * number, 3, 900, 0, 0, 1)


def rounds_of(*numbers: int) -> list[Round]:
    return [plain(number) for number in numbers]


@pytest.fixture
def source() -> FakeRounds:
    return FakeRounds(num_ranks=2)


@pytest.fixture
async def channel(generator: EchoGenerator, source: FakeRounds) -> AsyncIterator[grpc.aio.Channel]:
    async with fake_node(generator, rounds=source) as address, grpc.aio.insecure_channel(address) as channel:
        yield channel


def stream(channel: grpc.aio.Channel, **fields: object) -> grpc.aio.UnaryStreamCall:
    call: grpc.aio.UnaryStreamCall = AdminStub(channel).StreamRounds(
        pb.StreamRoundsRequest(**fields),  # type: ignore[arg-type]
        timeout=LIMIT_S,
    )
    return call


async def all_of(call: grpc.aio.UnaryStreamCall) -> dict[int, list[RankRounds]]:
    """By rank, in the order in which they came."""
    heard: dict[int, list[RankRounds]] = {}
    async for response in call:
        batch = decode_rounds(response)
        heard.setdefault(batch.rank, []).append(batch)
    return heard


async def next_of(call: grpc.aio.UnaryStreamCall) -> RankRounds:
    return decode_rounds(await call.read())


async def code_of(call: grpc.aio.UnaryStreamCall) -> tuple[grpc.StatusCode, str]:
    """Of a call that fails."""
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await call.read()
    return failure.value.code(), failure.value.details() or ""


async def test_the_last_rounds_of_every_rank_come_and_the_stream_ends(
    channel: grpc.aio.Channel, source: FakeRounds
) -> None:
    source.add(0, *rounds_of(1, 2, 3))
    heard = await all_of(stream(channel, last=2))
    assert heard == {
        0: [RankRounds(0, 3, tuple(rounds_of(2, 3)), 0, 1_000_000)],
        1: [RankRounds(1, 0, (), 0, 1_000_000)],  # none so far, and said so
    }


async def test_many_rounds_come_in_several_responses_that_are_in_order(
    channel: grpc.aio.Channel, source: FakeRounds
) -> None:
    source.add(1, *map(plain, range(1, NUM_KEPT + 1)))
    batches = (await all_of(stream(channel, last=NUM_KEPT)))[1]
    assert max(len(batch.rounds) for batch in batches) == MOST_A_RESPONSE
    assert [one.number for batch in batches for one in batch.rounds] == list(range(1, NUM_KEPT + 1))


async def test_who_follows_hears_of_rounds_as_they_come(channel: grpc.aio.Channel, source: FakeRounds) -> None:
    source.add(0, *rounds_of(1, 2))
    call = stream(channel, last=0, follow=True)
    assert [(await next_of(call)).rounds for _ in range(2)] == [(), ()]
    source.add(0, *rounds_of(3))
    assert await next_of(call) == RankRounds(0, 3, tuple(rounds_of(3)), 0, 1_000_000)
    source.add(1, *rounds_of(1))
    assert await next_of(call) == RankRounds(1, 1, tuple(rounds_of(1)), 0, 1_000_000)
    call.cancel()


class Reader:
    """Stands where the caller's context would: takes one response each time it is let."""

    def __init__(self) -> None:
        self.may_read = asyncio.Semaphore(0)
        self.heard: asyncio.Queue[RankRounds] = asyncio.Queue()

    async def write(self, response: pb.StreamRoundsResponse) -> None:
        await self.may_read.acquire()
        self.heard.put_nowait(decode_rounds(response))

    async def read(self) -> RankRounds:
        self.may_read.release()
        async with asyncio.timeout(LIMIT_S):
            return await self.heard.get()


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "PAUSE_S", 0.0)


@asynccontextmanager
async def followed(source: FakeRounds) -> AsyncIterator[Reader]:
    reader = Reader()
    request = pb.StreamRoundsRequest(last=0, follow=True)
    task = asyncio.create_task(AdminServicer(source).StreamRounds(request, cast(Any, reader)))
    try:
        yield reader
    finally:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def turns() -> None:
    """Everything else gets its chance, many times."""
    for _ in range(100):
        await asyncio.sleep(0)


@pytest.mark.usefixtures("no_pause")
async def test_with_nobody_left_no_rank_is_asked() -> None:
    source = FakeRounds(num_ranks=2)
    async with followed(source) as reader:
        for _ in range(2):
            await reader.read()
        await turns()
        assert source.num_questions > 10
    asked = source.num_questions
    await turns()
    assert source.num_questions == asked


@pytest.mark.usefixtures("no_pause")
async def test_a_reader_that_is_too_slow_is_told_what_it_lost_and_nothing_piles_up_meanwhile() -> None:
    """The rank remembers 16 rounds here."""
    source = FakeRounds(size=16)
    async with followed(source) as reader:
        await reader.read()
        source.add(0, *rounds_of(1, 2))
        await turns()  # these two wait for the reader now
        asked = source.num_questions
        source.add(0, *map(plain, range(3, 101)))
        await turns()
        assert source.num_questions == asked
        first, second = await reader.read(), await reader.read()
        assert (first.num_lost, [one.number for one in first.rounds]) == (0, [1, 2])
        assert (second.num_lost, [one.number for one in second.rounds]) == (82, list(range(85, 101)))


async def test_a_ninth_caller_is_refused_until_another_leaves(channel: grpc.aio.Channel) -> None:
    calls = [stream(channel, follow=True) for _ in range(admin.MAX_CALLERS)]
    for call in calls:
        await call.read()
    code, said = await code_of(stream(channel))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert f"{admin.MAX_CALLERS} callers stream rounds of this node, the limit" in said
    calls[0].cancel()
    async with asyncio.timeout(LIMIT_S):
        while True:
            try:
                await all_of(stream(channel))
                break
            except grpc.aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED  # noqa: PT017
    for call in calls:
        call.cancel()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"last": NUM_KEPT + 1}, f"last is {NUM_KEPT + 1}, a rank keeps {NUM_KEPT} rounds"),
        ({"last": 0}, "last is 0 and follow is not set"),
    ],
)
async def test_what_asks_for_too_much_or_nothing_is_refused_and_says_so(
    channel: grpc.aio.Channel, fields: dict[str, object], said: str
) -> None:
    code, details = await code_of(stream(channel, **fields))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert said in details


async def test_a_lost_rank_ends_the_stream_with_its_reason(channel: grpc.aio.Channel, source: FakeRounds) -> None:
    call = stream(channel, follow=True)
    for _ in range(2):
        await call.read()
    source.failure = NotReady("rank 1 is gone")
    assert await code_of(call) == (grpc.StatusCode.UNAVAILABLE, "rank 1 is gone")
