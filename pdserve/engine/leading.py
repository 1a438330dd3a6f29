"""The process of a tensor-parallel rank that schedules, and how the others follow it.

Followers are told of every round before the leader computes it, as each waits for the others within the forward. What
their transports see comes back, and counts once all have seen it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pdserve.engine.channel import Pollable, RankChannel
from pdserve.engine.messages import (
    AbandonPull,
    FromLeader,
    IdleStep,
    LoopCommand,
    Relay,
    SawQuiet,
    SawReceived,
    SawReleased,
    SawRevoked,
    Step,
    ToLeader,
)
from pdserve.engine.quorum import Quorum
from pdserve.model.runner import ModelRunner, RoundResult
from pdserve.request import TokenRequest
from pdserve.scheduler.plan import (
    Event,
    KvQuiet,
    KvReceived,
    LeaseReleased,
    LeaseRevoked,
    RoundPlan,
    SlotStart,
)

Followers = Sequence[RankChannel[ToLeader, FromLeader]]


class LeadingRunner:
    """A ModelRunner whose every call the followers make too."""

    def __init__(self, runner: ModelRunner, followers: Followers) -> None:
        self._runner = runner
        self._followers = followers
        self._starts: list[tuple[SlotStart, TokenRequest]] = []
        self._drawn: tuple[int, ...] = ()

    def start(self, start: SlotStart, request: TokenRequest) -> None:
        self._starts.append((start, request))
        self._runner.start(start, request)

    def execute(self, plan: RoundPlan) -> RoundResult:
        self._tell(Step(plan.round_id, self._drawn, tuple(self._starts), plan.prefill, plan.decode))
        self._starts = []
        result = self._runner.execute(plan)
        self._drawn = tuple(result.tokens)
        return result

    def idle(self) -> None:
        self._tell(IdleStep())
        self._runner.idle()

    def _tell(self, message: FromLeader) -> None:
        for follower in self._followers:
            follower.send(message)


class Link(Protocol):
    """The loop's side of this process's own transport thread; see RankLoop."""

    def submit(self, command: LoopCommand) -> None: ...

    def events(self) -> list[Event]: ...

    @property
    def pollables(self) -> Sequence[Pollable]: ...

    def counters(self) -> dict[str, int]: ...


class LeadingLink:
    """The transports of all of a rank's processes as one."""

    def __init__(self, link: Link, followers: Followers) -> None:
        self._link = link
        self._followers = followers
        self._quorum = Quorum(1 + len(followers))

    def submit(self, command: LoopCommand) -> None:
        if isinstance(command, AbandonPull):
            self._quorum.abandon(command.transfer_id)
        for follower in self._followers:
            follower.send(Relay(command))
        self._link.submit(command)

    def events(self) -> list[Event]:
        """What every one of them has seen by now."""
        seen = [(0, event) for event in self._link.events()]
        for member, follower in enumerate(self._followers, 1):
            seen += [(member, message.event) for message in follower.receive_all()]
        return [counted for member, event in seen for counted in self._quorum.add(member, event)]

    @property
    def pollables(self) -> list[Pollable]:
        return [*self._link.pollables, *(follower.socket for follower in self._followers)]

    def counters(self) -> dict[str, int]:
        return self._link.counters()


def told(event: Event) -> ToLeader:
    """How a follower tells its leader of what its transport saw."""
    match event:
        case KvReceived():
            return SawReceived(event)
        case KvQuiet():
            return SawQuiet(event)
        case LeaseReleased():
            return SawReleased(event)
        case LeaseRevoked():
            return SawRevoked(event)
        case _:
            raise AssertionError(f"{event} is not seen by transports")
