"""The ranks of a node as its front sees them: they wake together, and are lost together."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pdserve.engine import member as member_module
from pdserve.engine import ranks as ranks_module
from pdserve.engine.channel import FrontChannel, RankChannel
from pdserve.engine.front import Rank
from pdserve.engine.launch import RankProcess
from pdserve.engine.member import Member
from pdserve.engine.messages import (
    JOINING,
    WARMING_UP,
    AskForWake,
    FromRank,
    Loading,
    Ping,
    Pong,
    Ready,
    Submit,
    ToRank,
    Wake,
)
from pdserve.engine.process_look import ProcessLook, look_at
from pdserve.engine.ranks import Ranks
from pdserve.errors import InvalidRequest, NotReady, QueueFull, RequestIdInUse, StartupError
from pdserve.request import FUSED, RequestId, SamplingParams, TokenRequest
from tests.engine.specs import spec_of
from tests.roles.inside import fingerprint
from tests.roles.journal import LIMIT_S

READY = Ready(8, 1024, 512, 258, (256,), fingerprint("r0"), b"")
NUM_RANKS = 3


@dataclass
class ByHand:
    """The front's ranks, and the ends their processes would have."""

    ranks: Ranks
    ends: list[RankChannel[ToRank, FromRank]]

    def open(self, name: str, rank: int | None = None) -> Rank:
        request = TokenRequest(RequestId(name), (1, 2, 3), SamplingParams(4), data_parallel_rank=rank)
        chosen = self.ranks.choose(request)
        chosen.open(request, FUSED)
        return chosen

    async def heard(self, kind: type[ToRank], number: int = 1) -> list[list[ToRank]]:
        """Of each rank, once all have heard `number` messages of that kind."""
        heard: list[list[ToRank]] = [[] for _ in self.ends]
        async with asyncio.timeout(LIMIT_S):
            while any(len(messages) < number for messages in heard):
                for messages, end in zip(heard, self.ends, strict=True):
                    messages += [message for message in end.receive_all() if isinstance(message, kind)]
                await asyncio.sleep(0)
        return heard


@pytest.fixture
async def by_hand(sockets: Path) -> AsyncIterator[ByHand]:
    members, ends = [], []
    for number in range(NUM_RANKS):
        endpoint = f"ipc://{sockets}/loop{number}"
        channel: FrontChannel[FromRank, ToRank] = FrontChannel(endpoint, FromRank)
        members.append(Member(channel, name=f"rank {number}"))
        ends.append(RankChannel[ToRank, FromRank](endpoint, ToRank))
    hand = ByHand(
        Ranks([Rank([member], max_live=2, number=n) for n, member in enumerate(members)], are_in_step=True), ends
    )
    for end, member in zip(ends, members, strict=True):
        end.send(READY)
        await member.attach(timeout_s=LIMIT_S)
    yield hand
    for end in ends:
        end.close()
    await hand.ranks.stop()


class NeverEnds:
    """A process that does nothing until it is ended."""

    def __init__(self) -> None:
        self._ended = asyncio.Event()

    async def wait(self) -> str:
        await self._ended.wait()
        return "ended with status 0"

    async def end(self, timeout_s: float) -> None:
        self._ended.set()

    def look(self) -> None:
        return None


async def launch(spec: object) -> NeverEnds:
    return NeverEnds()


@pytest.mark.parametrize(
    ("stages", "told"),
    [
        ({0: JOINING, 2: WARMING_UP}, r"rank 1 was not ready \(starting\) after 1 s"),
        ({0: JOINING, 1: "reading weights", 2: JOINING}, r"rank 1 was not ready \(reading weights\) after 1 s"),
        (
            {0: JOINING, 1: JOINING, 2: JOINING},
            "rank 0 was not ready .*, rank 1 was not ready .*, rank 2 was not ready",
        ),
    ],
)
async def test_the_rank_that_the_others_wait_for_at_the_start_is_named(
    sockets: Path, stages: dict[int, str], told: str
) -> None:
    endpoints = [f"ipc://{sockets}/loop{number}" for number in range(NUM_RANKS)]
    members = [
        Member(FrontChannel[FromRank, ToRank](endpoint, FromRank), name=f"rank {number}", launch=launch)
        for number, endpoint in enumerate(endpoints)
    ]
    ranks = Ranks([Rank([member], max_live=2, number=number) for number, member in enumerate(members)])
    ends = [RankChannel[ToRank, FromRank](endpoint, ToRank) for endpoint in endpoints]
    for number, stage in stages.items():
        ends[number].send(Loading(stage, 0, 0))
    with pytest.raises(StartupError, match=told):
        await ranks.start([spec_of(number) for number in range(NUM_RANKS)], timeout_s=1.0, on_loading=lambda _: None)
    for end in ends:
        end.close()
    await ranks.stop()


async def test_one_submit_wakes_every_rank_and_several_at_once_wake_them_once(by_hand: ByHand) -> None:
    for name in ("a", "b", "c"):
        by_hand.open(name)
    assert await by_hand.heard(Wake) == [[Wake(1)]] * NUM_RANKS
    by_hand.open("d")
    assert await by_hand.heard(Wake) == [[Wake(2)]] * NUM_RANKS


async def test_a_rank_hears_of_the_work_before_the_wake_that_comes_with_it(by_hand: ByHand) -> None:
    """Otherwise all might sleep again before it has seen what it was woken for."""
    by_hand.open("a", rank=1)
    messages: list[ToRank] = []
    async with asyncio.timeout(LIMIT_S):
        while len(messages) < 2:
            messages += by_hand.ends[1].receive_all()
            await asyncio.sleep(0)
    assert [type(message) for message in messages] == [Submit, Wake]


async def test_a_sleeper_with_news_has_all_of_them_woken(by_hand: ByHand) -> None:
    by_hand.ends[2].send(AskForWake())
    assert await by_hand.heard(Wake) == [[Wake(1)]] * NUM_RANKS


async def test_requests_go_to_the_shortest_queue_or_where_they_say(by_hand: ByHand) -> None:
    assert [by_hand.open(name).number for name in "abcd"] == [0, 1, 2, 0]
    assert by_hand.open("e", rank=2).number == 2
    assert by_hand.open("f").number == 1
    for number, rank in ((-1, "-1"), (3, "3")):
        with pytest.raises(InvalidRequest, match=f"data_parallel_rank is {rank}, this node has ranks 0 to 2"):
            by_hand.open("g", rank=number)
    with pytest.raises(QueueFull):  # each of them has its two
        by_hand.open("g")


async def test_an_id_that_is_live_on_any_rank_is_in_use_and_can_be_aborted_wherever_it_is(by_hand: ByHand) -> None:
    by_hand.open("a", rank=2)
    with pytest.raises(RequestIdInUse):
        by_hand.open("a", rank=0)
    assert by_hand.ranks.abort(RequestId("a"))
    assert not by_hand.ranks.abort(RequestId("b"))


async def test_what_a_rank_holds_is_counted_up_and_down(by_hand: ByHand) -> None:
    rank = by_hand.open("a", rank=1)
    assert [one.num_held_tokens for one in by_hand.ranks] == [0, 3, 0]
    rank.close(RequestId("a"), is_over=True)
    assert [one.num_held_tokens for one in by_hand.ranks] == [0, 0, 0]


async def test_with_one_rank_all_are_lost_for_the_first_ones_reason(by_hand: ByHand) -> None:
    rank = by_hand.open("a", rank=0)
    by_hand.ranks[2].members[0].lose("rank 2 is gone")
    by_hand.ranks[1].members[0].lose("rank 1 is gone too")
    assert by_hand.ranks.lost.is_set()
    assert by_hand.ranks.lost_reason == "rank 2 is gone"
    with pytest.raises(NotReady, match="rank 2 is gone"):
        rank.open(TokenRequest(RequestId("b"), (1,), SamplingParams(1)), FUSED)
    with pytest.raises(NotReady, match="rank 2 is gone"):
        await by_hand.ranks.loads()


async def stopped_process() -> RankProcess:
    process = await asyncio.create_subprocess_exec("sleep", "60")
    os.kill(process.pid, signal.SIGSTOP)
    return RankProcess(process)


async def test_a_group_in_which_one_stands_still_is_lost_and_the_stopped_one_is_named(
    by_hand: ByHand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks_module, "LIFE_S", 0.01)
    watching = asyncio.create_task(by_hand.ranks._watch_life(stall_s=0.5))
    # Two of three answer, until they wait for the third.
    for _ in range(2):
        await by_hand.heard(Ping)
        for end in by_hand.ends:
            end.send(Pong(0))
    await by_hand.heard(Ping)

    by_hand.ranks[1].members[0]._process = await stopped_process()
    async with asyncio.timeout(LIMIT_S):
        await by_hand.ranks.lost.wait()
        await watching
    assert by_hand.ranks.lost_reason == "rank 1: no round was finished for 0 s"


async def test_ranks_that_share_nothing_are_not_woken(sockets: Path) -> None:
    endpoint = f"ipc://{sockets}/loop"
    channel: FrontChannel[FromRank, ToRank] = FrontChannel(endpoint, FromRank)
    end: RankChannel[ToRank, FromRank] = RankChannel(endpoint, ToRank)
    member = Member(channel)
    ranks = Ranks([Rank([member], max_live=2)])
    end.send(READY)
    await member.attach(timeout_s=LIMIT_S)
    ranks.choose(TokenRequest(RequestId("a"), (1,), SamplingParams(1))).open(
        TokenRequest(RequestId("a"), (1,), SamplingParams(1)), FUSED
    )
    member.ask_for_life()
    messages: list[ToRank] = []
    async with asyncio.timeout(LIMIT_S):
        while not any(isinstance(message, Ping) for message in messages):
            messages += end.receive_all()
            await asyncio.sleep(0)
    assert not any(isinstance(message, Wake) for message in messages)
    end.close()
    await ranks.stop()


async def test_a_group_that_waits_for_one_that_computes_is_waited_for(
    by_hand: ByHand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks_module, "LIFE_S", 0.01)
    computing = await asyncio.create_subprocess_exec(sys.executable, "-c", "while True: pass")
    by_hand.ranks[1].members[0]._process = RankProcess(computing)
    watching = asyncio.create_task(by_hand.ranks._watch_life(stall_s=1.0))
    async with asyncio.timeout(LIMIT_S):
        while look_at(computing.pid).cpu_s < 2.0:  # type: ignore[union-attr]
            assert not by_hand.ranks.lost.is_set()
            await asyncio.sleep(0.01)
        os.kill(computing.pid, signal.SIGSTOP)
        await by_hand.ranks.lost.wait()
        await watching
    assert by_hand.ranks.lost_reason == "rank 1: no round was finished for 1 s"


class LookedAt:
    """A process whose first thread worked until some time ago, and which is stopped or waits since."""

    def __init__(self, *, is_stopped: bool) -> None:
        self._look = ProcessLook(is_stopped=is_stopped, cpu_s=100.0)

    def look(self) -> ProcessLook:
        return self._look

    async def end(self, timeout_s: float) -> None:
        pass


async def test_work_of_before_the_silence_does_not_count_as_life(
    by_hand: ByHand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group asleep that is woken while one of its ranks stands still."""
    now = [1000.0]
    monkeypatch.setattr(member_module, "monotonic", lambda: now[0])
    waiting, stopped = (rank.members[0] for rank in by_hand.ranks._ranks[:2])
    waiting._process, stopped._process = LookedAt(is_stopped=False), LookedAt(is_stopped=True)  # type: ignore[assignment]
    for member in (waiting, stopped):
        member._last_life_s = 1000.0
        member.look_for_work()
    now[0] = 1029.0
    assert waiting.is_alive(30.0)
    now[0] = 1031.0
    assert not waiting.is_alive(30.0)
    assert not stopped.is_alive(30.0)


async def test_a_process_that_leaves_as_it_is_ended_is_no_error() -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "")

    def kill() -> None:
        raise ProcessLookupError

    process.kill = kill  # type: ignore[method-assign]
    await RankProcess(process).end(0.0)
    assert process.returncode == 0
