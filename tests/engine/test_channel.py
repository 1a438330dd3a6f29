"""Sockets between a front and its rank: private, in order, and without a lost wake-up."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import zmq

from pdserve.engine import channel
from pdserve.engine.channel import FrontChannel, RankChannel, private_directory
from pdserve.engine.messages import Abort, AskLoad, FromRank, LoadReport, Stop, ToRank
from pdserve.errors import NotReady
from pdserve.request import RankLoad, RequestId
from tests.roles.journal import LIMIT_S

LOAD = RankLoad(0, 1, 2, 3, 4, 5, 6, counters={"rounds": 7})


@dataclass
class Ends:
    front: FrontChannel[FromRank, ToRank]
    rank: RankChannel[ToRank, FromRank]
    heard: asyncio.Queue[FromRank]

    async def at_rank(self, number: int) -> list[ToRank]:
        received: list[ToRank] = []
        async with asyncio.timeout(LIMIT_S):
            while len(received) < number:
                received += self.rank.receive_all()
                await asyncio.sleep(0)
        return received


def until_connected(front: FrontChannel[FromRank, ToRank]) -> None:
    """A front has nothing to say before it heard that its rank is ready; these tests do not wait for that."""
    assert front._socket.poll(LIMIT_S * 1000, zmq.POLLOUT)


@pytest.fixture
async def ends(sockets: Path) -> AsyncIterator[Ends]:
    endpoint = f"ipc://{sockets}/loop"
    front: FrontChannel[FromRank, ToRank] = FrontChannel(endpoint, FromRank)
    rank: RankChannel[ToRank, FromRank] = RankChannel(endpoint, ToRank)
    until_connected(front)
    heard: asyncio.Queue[FromRank] = asyncio.Queue()
    yield Ends(front, rank, heard)
    rank.close()
    front.close()


def test_nobody_else_may_enter_the_directory_and_it_is_gone_afterwards() -> None:
    with private_directory() as directory:
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert len(str(directory)) < 80
    assert not directory.exists()


async def test_messages_arrive_as_they_were_and_in_order(ends: Ends) -> None:
    ends.front.listen(ends.heard.put_nowait)
    sent: list[ToRank] = [Abort(RequestId("a")), AskLoad(3, True), Stop()]
    for message in sent:
        ends.front.send(message)
    assert await ends.at_rank(3) == sent
    for number in range(100):
        ends.rank.send(LoadReport(number, LOAD, "x"))
    assert [await ends.heard.get() for _ in range(100)] == [LoadReport(number, LOAD, "x") for number in range(100)]


async def test_what_came_before_anybody_listened_is_not_lost(ends: Ends) -> None:
    ends.rank.send(LoadReport(1, LOAD))
    await asyncio.sleep(0)
    ends.front.listen(ends.heard.put_nowait)
    async with asyncio.timeout(LIMIT_S):
        assert await ends.heard.get() == LoadReport(1, LOAD)


async def test_no_message_is_left_lying_when_both_ends_talk_at_once(ends: Ends) -> None:
    """A socket's descriptor tells of news once, and sending may swallow that."""
    ends.front.listen(ends.heard.put_nowait)

    async def talk() -> None:
        for number in range(500):
            ends.rank.send(LoadReport(number, LOAD))
            ends.front.send(AskLoad(number))
            if number % 7 == 0:
                await asyncio.sleep(0)

    async with asyncio.timeout(LIMIT_S):
        await asyncio.gather(talk(), ends.at_rank(500))
        assert [(await ends.heard.get()).number for _ in range(500)] == list(range(500))  # type: ignore[union-attr]


async def test_a_rank_that_takes_nothing_is_not_waited_for(sockets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "_HIGH_WATER", 3)
    front: FrontChannel[FromRank, ToRank] = FrontChannel(f"ipc://{sockets}/loop", FromRank)
    rank: RankChannel[ToRank, FromRank] = RankChannel(f"ipc://{sockets}/loop", ToRank)
    until_connected(front)

    def send_many() -> None:
        for _ in range(100_000):
            front.send(Stop())

    with pytest.raises(NotReady, match="leaves 3 messages unread"):
        send_many()
    rank.close()
    front.close()
