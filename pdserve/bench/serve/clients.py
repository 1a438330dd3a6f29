"""Clients that put a load to a server, and what each of their requests came to."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from pdserve.bench.listening import Call, Heard

# A server that fails at once is not asked as fast as it fails: a user would not either.
PAUSE_AFTER_FAILURE_S = 1.0


class RequestFailed(Exception):
    """What a request's caller was told. is_refused: the server did not take it at all."""

    def __init__(self, reason: str, is_refused: bool = False) -> None:
        super().__init__(reason)
        self.is_refused = is_refused


class Server(Protocol):
    """What answers. It belongs to one event loop, and any number of calls may be under way."""

    async def hear(self, call: Call) -> Heard:
        """Call now and listen to the end. Raises RequestFailed."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request. heard: None where it failed, with the reason. ended_s: on the clock of Heard."""

    call: Call
    ended_s: float
    heard: Heard | None = None
    reason: str = ""
    is_refused: bool = False


@dataclass(frozen=True, slots=True)
class Driven:
    """Requests in the order of their ends. full_s: from the first call until the load began to run out.

    long_prompt: what arrived beside the others.
    """

    asked: Sequence[Asked]
    began_s: float
    full_s: float
    long_prompt: Asked | None = None


async def ask(server: Server, call: Call, timeout_s: float) -> Asked:
    """One request, which ends within timeout_s in some way. Its call is when it should leave, whoever holds it up."""
    called_s = time.monotonic()

    def failed(reason: str, is_refused: bool = False) -> Asked:
        return Asked(call, time.monotonic(), None, reason, is_refused)

    try:
        async with asyncio.timeout(timeout_s):
            heard = await server.hear(call)
    except TimeoutError:
        return failed(f"no whole answer within {timeout_s:g} s")
    except RequestFailed as error:
        return failed(str(error), error.is_refused)
    if len(heard.arrivals_s) != call.num_output_tokens:
        return failed(f"the answer had {len(heard.arrivals_s)} tokens of {call.num_output_tokens}")
    return Asked(call, time.monotonic(), dataclasses.replace(heard, called_s=called_s))


def within(calls: Iterator[Call], seconds: float) -> Iterator[Call]:
    """Calls until so long after the first was taken."""
    until_s = time.monotonic() + seconds
    for call in calls:
        if time.monotonic() >= until_s:
            return
        yield call


def _silent(num_ended: int) -> None:
    pass


async def closed_loop(
    server: Server,
    calls: Iterator[Call],
    num_clients: int,
    timeout_s: float,
    on_end: Callable[[int], None] = _silent,
) -> Driven:
    """Clients who ask the next request when their last has ended; what is under way when there is no next is heard.

    It is full until a client first finds nothing to ask. on_end: told how many requests have ended.
    """
    asked: list[Asked] = []
    left_s: list[float] = []

    async def client() -> None:
        for call in calls:
            asked.append(await ask(server, call, timeout_s))
            on_end(len(asked))
            if asked[-1].heard is None:
                await asyncio.sleep(PAUSE_AFTER_FAILURE_S)
        left_s.append(time.monotonic())

    began_s = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for _ in range(num_clients):
            group.create_task(client())
    return Driven(asked, began_s, left_s[0] - began_s)


async def open_loop(server: Server, calls: Sequence[Call], timeout_s: float) -> Driven:
    """Each request leaves at its time, whether or not others have ended. It counts as full until the last has."""
    asked: list[Asked] = []

    async def later(call: Call) -> None:
        await asyncio.sleep(call.at_s - (time.monotonic() - began_s))
        asked.append(await ask(server, call, timeout_s))

    began_s = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for call in calls:
            group.create_task(later(call))
    return Driven(asked, began_s, time.monotonic() - began_s)


async def beside_long_prompt(
    server: Server, calls: Iterator[Call], num_clients: int, long_prompt: Call, timeout_s: float
) -> Driven:
    """A closed loop, and a long prompt once as many requests have ended as there are clients; over with its answer."""
    is_under_way = asyncio.Event()
    is_answered = False

    def until_answered() -> Iterator[Call]:
        for call in calls:
            if is_answered:
                return
            yield call

    def on_end(num_ended: int) -> None:
        if num_ended >= num_clients:
            is_under_way.set()

    async with asyncio.TaskGroup() as group:
        streams = group.create_task(closed_loop(server, until_answered(), num_clients, timeout_s, on_end))
        await is_under_way.wait()
        answered = await ask(server, long_prompt, timeout_s)
        is_answered = True
    return dataclasses.replace(streams.result(), long_prompt=answered)
