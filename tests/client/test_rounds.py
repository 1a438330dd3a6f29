"""Rounds through the SDK, blocking and not."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator

import pytest

from pdserve.client import AsyncClient, Client, RankRounds, Round
from pdserve.errors import DeadlineExceeded, InvalidRequest, QueueFull
from pdserve.rounds import NUM_KEPT
from pdserve.rpc import admin
from pdserve.rpc.fake import EchoGenerator, FakeRounds, fake_node

FIRST, SECOND = (Round(number, 1000 * number, 3, 900, 0, 0, 1) for number in (1, 2))


@pytest.fixture
def source() -> FakeRounds:
    rounds = FakeRounds()
    rounds.add(0, FIRST)
    return rounds


@pytest.fixture
async def address(source: FakeRounds) -> AsyncIterator[str]:
    async with fake_node(EchoGenerator(), rounds=source) as address:
        yield address


async def test_the_last_rounds_end_by_themselves(address: str) -> None:
    def read() -> list[RankRounds]:
        with Client(address) as client, client.rounds(last=5) as batches:
            return list(batches)

    wanted = [RankRounds(0, 1, (FIRST,), 0, 1_000_000)]
    assert await asyncio.to_thread(read) == wanted
    async with AsyncClient(address) as client:
        assert [batch async for batch in client.rounds(last=5)] == wanted


async def test_following_goes_on_until_it_is_closed(address: str, source: FakeRounds) -> None:
    def read() -> list[RankRounds]:
        with Client(address) as client, client.rounds(last=1, follow=True, timeout_s=60) as batches:
            first = next(batches)
            source.add(0, SECOND)
            second = next(batches)
            batches.close()
            return [first, second, *batches]

    assert [batch.rounds for batch in await asyncio.to_thread(read)] == [(FIRST,), (SECOND,)]


async def test_a_deadline_ends_it_with_its_error(address: str) -> None:
    async with AsyncClient(address) as client:
        batches = client.rounds(follow=True, timeout_s=0.3)
        assert (await anext(batches)).rounds == (FIRST,)
        with pytest.raises(DeadlineExceeded):
            await anext(batches)


async def test_one_caller_too_many_is_told_so(address: str) -> None:
    async with AsyncClient(address) as client:
        streams = [client.rounds(follow=True) for _ in range(admin.MAX_CALLERS)]
        for stream in streams:
            await anext(stream)
        with pytest.raises(QueueFull, match="8 callers"):
            await anext(client.rounds(last=1))
        for stream in streams:
            stream.close()


@pytest.mark.parametrize("last", [-1, NUM_KEPT + 1, True, 2.0])
async def test_what_is_no_count_of_rounds_is_refused_here(address: str, last: int) -> None:
    async with AsyncClient(address) as client:
        with pytest.raises(InvalidRequest, match=f"last is {last!r}, it must be from 0 to {NUM_KEPT}"):
            client.rounds(last=last)


def test_both_clients_take_the_same() -> None:
    ours, theirs = (inspect.signature(cls.rounds) for cls in (Client, AsyncClient))
    assert list(ours.parameters.values()) == list(theirs.parameters.values())
