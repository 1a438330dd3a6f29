"""A process of a tensor-parallel rank that schedules nothing: it computes what its leader planned."""

from __future__ import annotations

import zmq

from pdserve.engine.channel import RankChannel
from pdserve.engine.leading import Link, told
from pdserve.engine.messages import (
    AnnounceChunk,
    FromLeader,
    FromRank,
    IdleStep,
    LoopCommand,
    Ping,
    Pong,
    Relay,
    Step,
    Stop,
    ToLeader,
    ToRank,
)
from pdserve.model.runner import Follower
from pdserve.request import BlockId
from pdserve.scheduler.plan import RoundPlan


class Generations:
    """Of blocks, as the leader said with the last chunk in each: a follower has no pool of its own to ask.

    So a follower vouches for what it was told, the leader for what is; a lease is valid where all of them say so.
    """

    def __init__(self) -> None:
        self._of_block: dict[BlockId, int] = {}

    def note(self, command: LoopCommand) -> None:
        if isinstance(command, AnnounceChunk):
            self._of_block.update(zip(command.blocks, command.generations, strict=True))

    def __call__(self, block: BlockId) -> int:
        return self._of_block.get(block, 0)


class FollowerLoop:
    """`run` returns after Stop. Built and run in one thread."""

    def __init__(
        self,
        follower: Follower,
        leader: RankChannel[FromLeader, ToLeader],
        front: RankChannel[ToRank, FromRank],
        transport: Link | None = None,
        generations: Generations | None = None,
    ) -> None:
        self._follower = follower
        self._leader = leader
        self._front = front
        self._transport = transport
        self._generations = generations or Generations()
        self._has_samples = False  # the last round drew tokens, which the next Step brings
        self._is_stopping = False
        self._poller = zmq.Poller()
        for pollable in (leader.socket, front.socket, *(transport.pollables if transport is not None else ())):
            self._poller.register(pollable, zmq.POLLIN)

    def run(self) -> None:
        """Round after round, as the leader says."""
        while not self._is_stopping:
            self._poller.poll()
            for message in self._front.receive_all():
                self._on_front(message)
            for step in self._leader.receive_all():
                self._on_leader(step)
            for event in self._transport.events() if self._transport is not None else ():
                self._leader.send(told(event))

    def _on_front(self, message: ToRank) -> None:
        match message:
            case Ping():
                self._front.send(Pong(0))
            case Stop():
                self._is_stopping = True
            case _:
                raise AssertionError(f"{type(message).__name__} for a rank that schedules nothing")

    def _on_leader(self, message: FromLeader) -> None:
        match message:
            case Step():
                self._on_step(message)
            case IdleStep():
                self._follower.idle()
            case Relay(command):
                assert self._transport is not None, f"{type(command).__name__} for a rank without a transport"
                self._generations.note(command)
                self._transport.submit(command)

    def _on_step(self, step: Step) -> None:
        if self._has_samples:
            self._follower.append(step.drawn)
        for start, request in step.starts:
            self._follower.start(start, request)
        plan = RoundPlan(step.round_id, tuple(start for start, _ in step.starts), step.prefill, step.decode)
        self._follower.compute(plan)
        self._has_samples = bool(plan.sampled_rows)
