"""A follower makes every call that its leader makes, in the same order, and tells what its transport sees."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pdserve.engine.channel import Pollable, RankChannel
from pdserve.engine.following import FollowerLoop, Generations
from pdserve.engine.leading import LeadingLink, LeadingRunner
from pdserve.engine.messages import (
    AbandonPull,
    AnnounceChunk,
    FromLeader,
    FromRank,
    LoopCommand,
    OpenLease,
    Ping,
    Pong,
    Stop,
    ToLeader,
    ToRank,
)
from pdserve.model.runner import RoundResult
from pdserve.request import BlockId, LeaseId, RequestId, SamplingParams, TokenRequest, TransferId
from pdserve.scheduler.config import SchedulerConfig
from pdserve.scheduler.plan import Event, KvQuiet, KvReceived, RoundPlan, SlotStart, StepDone, Submission
from pdserve.scheduler.scheduler import Scheduler
from tests.engine.other_end import LIMIT_S, OtherEnd, other_end, wait_for

Call = tuple[object, ...]


@dataclass
class Leader:
    """A runner that notes what a follower must do, and draws the round's number."""

    calls: list[Call] = field(default_factory=list)

    def start(self, start: SlotStart, request: TokenRequest) -> None:
        self.calls.append(("start", start, request))

    def execute(self, plan: RoundPlan) -> RoundResult:
        self.calls.append(("compute", plan.round_id, plan.prefill, plan.decode))
        tokens = [plan.round_id] * len(plan.sampled_rows)
        if tokens:
            self.calls.append(("append", tokens))
        return RoundResult(tokens)

    def idle(self) -> None:
        self.calls.append(("idle",))


@dataclass
class Notes:
    """A follower that notes what it was told."""

    calls: list[Call] = field(default_factory=list)

    def start(self, start: SlotStart, request: TokenRequest) -> None:
        self.calls.append(("start", start, request))

    def compute(self, plan: RoundPlan) -> None:
        self.calls.append(("compute", plan.round_id, plan.prefill, plan.decode))

    def append(self, tokens: Sequence[int]) -> None:
        self.calls.append(("append", list(tokens)))

    def idle(self) -> None:
        self.calls.append(("idle",))


class Link:
    """A transport's link: commands are noted, events are made by the test."""

    def __init__(self) -> None:
        self.commands: list[LoopCommand] = []
        self._events: list[Event] = []
        self._fd = os.eventfd(0, os.EFD_NONBLOCK)

    def submit(self, command: LoopCommand) -> None:
        self.commands.append(command)

    def see(self, event: Event) -> None:
        self._events.append(event)
        os.eventfd_write(self._fd, 1)

    def events(self) -> list[Event]:
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:
            return []
        events, self._events = self._events, []
        return events

    @property
    def pollables(self) -> list[Pollable]:
        return [self._fd]

    def counters(self) -> dict[str, int]:
        return {}


@dataclass
class Pair:
    channel: RankChannel[ToLeader, FromLeader]
    front: OtherEnd
    notes: Notes
    link: Link
    generations: Generations


@pytest.fixture
def pair(sockets: Path) -> Iterator[Pair]:
    """A leader's channel, and a follower's loop in its thread."""
    steps, front_endpoint = f"ipc://{sockets}/steps", f"ipc://{sockets}/loop"
    channel: RankChannel[ToLeader, FromLeader] = RankChannel(steps, ToLeader, binds=True)
    with other_end(front_endpoint, FromRank) as front:
        pair = Pair(channel, front, Notes(), Link(), Generations())

        def follow() -> None:
            leader: RankChannel[FromLeader, ToLeader] = RankChannel(steps, FromLeader)
            to_front: RankChannel[ToRank, FromRank] = RankChannel(front_endpoint, ToRank)
            FollowerLoop(pair.notes, leader, to_front, pair.link, pair.generations).run()
            leader.close()
            to_front.close()

        thread = threading.Thread(target=follow, daemon=True)
        thread.start()
        yield pair
        front.send(Stop())
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    channel.close()


def test_a_follower_makes_the_leaders_calls_in_the_same_order(pair: Pair) -> None:
    leader = Leader()
    runner = LeadingRunner(leader, [pair.channel])
    scheduler = Scheduler(SchedulerConfig(16, 16, 2, 32, 256))
    requests = {}
    for number, length in enumerate((40, 3, 20)):  # a prompt of two chunks, and more requests than slots
        request = TokenRequest(RequestId(f"r{number}"), tuple(range(length)), SamplingParams(4, logit_bias=((1, 0.5),)))
        requests[request.request_id] = request
        scheduler.submit(Submission(request.request_id, request.prompt, 4))
    while scheduler.has_work:
        plan = scheduler.plan()
        for start in plan.starts:
            runner.start(start, requests[start.request_id])
        scheduler.advance([StepDone(plan.round_id, runner.execute(plan).tokens)])
        if plan.round_id % 3 == 0:
            runner.idle()
    runner.execute(RoundPlan(99))  # brings what the last round drew
    wait_for(lambda: pair.notes.calls if len(pair.notes.calls) >= len(leader.calls) else None)
    assert sorted(map(repr, pair.notes.calls)) == sorted(map(repr, leader.calls))
    # What a round drew is the input of the next one, whatever is between; all else keeps the leader's order.
    assert _without_idle_and_append(pair.notes.calls) == _without_idle_and_append(leader.calls)
    assert _rounds_and_tokens(pair.notes.calls) == _rounds_and_tokens(leader.calls)


def _without_idle_and_append(calls: Sequence[Call]) -> list[Call]:
    return [call for call in calls if call[0] not in ("idle", "append")]


def _rounds_and_tokens(calls: Sequence[Call]) -> list[Call]:
    return [call for call in calls if call[0] in ("compute", "append")]


def test_commands_reach_every_transport_and_what_all_of_them_saw_comes_back_once(pair: Pair) -> None:
    own = Link()
    link = LeadingLink(own, [pair.channel])
    commands = [OpenLease(LeaseId("a")), AbandonPull(TransferId(3))]
    for command in commands:
        link.submit(command)
    wait_for(lambda: pair.link.commands if len(pair.link.commands) == 2 else None)
    assert own.commands == pair.link.commands == commands
    received, quiet = KvReceived(TransferId(1), 5), KvQuiet(TransferId(3))
    own.see(received)
    assert link.events() == []
    pair.link.see(quiet)
    pair.link.see(received)
    assert wait_for(lambda: link.events() or None) == [received]
    own.see(quiet)
    assert link.events() == [quiet]


def test_a_follower_vouches_for_the_generations_it_was_told(pair: Pair) -> None:
    link = LeadingLink(Link(), [pair.channel])
    link.submit(AnnounceChunk(LeaseId("a"), 0, 32, (BlockId(4), BlockId(9)), (2, 7)))
    wait_for(lambda: pair.link.commands or None)
    assert [pair.generations(BlockId(block)) for block in (4, 9, 1)] == [2, 7, 0]


def test_a_follower_shows_life(pair: Pair) -> None:
    pair.front.send(Ping())
    assert pair.front.hear(Pong)
