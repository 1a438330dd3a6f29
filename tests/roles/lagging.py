"""What is between a follower's loop and its transport thread, when the follower runs late or the test holds it up."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from pdserve.engine.channel import Pollable
from pdserve.engine.leading import Link
from pdserve.engine.messages import LoopCommand
from pdserve.scheduler.plan import Event
from tests.roles.journal import Journal

T = TypeVar("T", LoopCommand, Event)
Holds = Callable[[object], bool]


@dataclass(frozen=True, slots=True)
class Withheld:
    """A command or an event waits for the test, and what comes after it too."""

    node: str
    item: object
    kind: type[object]


@dataclass(slots=True)
class _Late(Generic[T]):
    """num_polls: of the follower's loop, until it goes on."""

    item: T
    num_polls: int
    is_noted: bool = False


class LaggingLink:
    """A Link that keeps commands in their order, and events in theirs. lag: polls that the next of either waits.

    change: what becomes of each command on its way. `hold` and `release` may be called from any thread.
    """

    def __init__(self, name: str, link: Link, journal: Journal, lag: Callable[[], int]) -> None:
        self._name = name
        self._link = link
        self._journal = journal
        self._lag = lag
        self._commands: deque[_Late[LoopCommand]] = deque()
        self._events: deque[_Late[Event]] = deque()
        self._holds: Holds = lambda _: False
        self._fd = os.eventfd(0, os.EFD_NONBLOCK)
        self.change: Callable[[LoopCommand], LoopCommand] = lambda command: command

    def hold(self, holds: Holds) -> None:
        """From now on, what `holds` says yes to waits for `release`, and all after it."""
        self._holds = holds

    def release(self) -> None:
        self.hold(lambda _: False)
        os.eventfd_write(self._fd, 1)

    def submit(self, command: LoopCommand) -> None:
        """Goes on in the next call of `events`, or later."""
        self._commands.append(_Late(self.change(command), self._lag()))

    def events(self) -> list[Event]:
        self._clear()
        for command in self._due(self._commands):
            self._link.submit(command)
        self._events += [_Late(event, self._lag()) for event in self._link.events()]
        due = list(self._due(self._events))
        if any(late and not self._holds(late[0].item) for late in (self._commands, self._events)):
            os.eventfd_write(self._fd, 1)
        return due

    @property
    def pollables(self) -> list[Pollable]:
        return [*self._link.pollables, self._fd]

    def counters(self) -> dict[str, int]:
        return self._link.counters()

    @property
    def num_waiting(self) -> int:
        return len(self._commands) + len(self._events)

    def close(self) -> None:
        os.close(self._fd)

    def _clear(self) -> None:
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:
            return

    def _due(self, late: deque[_Late[T]]) -> Iterator[T]:
        while late:
            first = late[0]
            if self._holds(first.item):
                self._note(first)
                return
            if first.num_polls:
                first.num_polls -= 1
                return
            yield late.popleft().item

    def _note(self, held: _Late[T]) -> None:
        if not held.is_noted:
            held.is_noted = True
            self._journal.note(Withheld(self._name, held.item, type(held.item)))
