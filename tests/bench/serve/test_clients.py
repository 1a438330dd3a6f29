"""Who calls when, and what becomes of requests that fail."""

from __future__ import annotations

import asyncio
import itertools
import time

import pytest

from pdserve.bench.listening import Call, Heard
from pdserve.bench.serve import clients
from pdserve.bench.serve.clients import ask, beside_long_prompt, closed_loop, open_loop, within
from tests.bench.serve.fakes import FakeServer, Together, refused

PATIENCE_S = 20.0


def calls(num_calls: int) -> list[Call]:
    return [Call(number, (number,), 2, at_s=0.03 * number) for number in range(num_calls)]


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "PAUSE_AFTER_FAILURE_S", 0.0)


@pytest.mark.parametrize("num_clients", [1, 3, 20])
async def test_a_closed_loop_keeps_all_clients_busy_and_never_asks_more_at_once(num_clients: int) -> None:
    server = FakeServer()
    driven = await closed_loop(server, iter(calls(20)), num_clients, PATIENCE_S)
    assert server.most_open == num_clients
    assert sorted(one.call.number for one in driven.asked) == list(range(20))
    assert all(one.heard is not None and one.heard.number == one.call.number for one in driven.asked)


async def test_a_closed_loop_is_full_until_a_client_finds_nothing_to_ask() -> None:
    class LastIsSlow(FakeServer):
        async def work(self, call: Call) -> None:
            await asyncio.sleep(0.2 if call.number == 3 else 0)

    driven = await closed_loop(LastIsSlow(), iter(calls(4)), 2, PATIENCE_S)
    assert driven.full_s < 0.2 <= max(one.ended_s for one in driven.asked) - driven.began_s


async def test_an_open_loop_s_requests_leave_at_their_times_whether_or_not_others_have_ended() -> None:
    server = Together(8)
    began_s = time.monotonic()
    driven = await open_loop(server, calls(8), PATIENCE_S)
    assert server.most_open == 8
    late_s = [called_s - began_s - call.at_s for called_s, call in zip(server.called_s, server.calls, strict=True)]
    assert min(late_s) >= -0.001
    assert [call.number for call in server.calls] == list(range(8))
    assert len(driven.asked) == 8
    assert driven.full_s >= 0.03 * 7


@pytest.mark.parametrize("is_open", [False, True])
async def test_a_request_that_fails_is_counted_and_the_others_go_on(is_open: bool) -> None:
    server = FakeServer(refused)
    loop = open_loop(server, calls(9), PATIENCE_S) if is_open else closed_loop(server, iter(calls(9)), 2, PATIENCE_S)
    driven = await loop
    failed = [one for one in driven.asked if one.heard is None]
    assert sorted(one.call.number for one in failed) == [2, 5, 8]
    assert {(one.reason, one.is_refused) for one in failed} == {("the queue is full", True)}
    assert len(driven.asked) == 9


async def test_a_server_that_fails_at_once_is_not_asked_as_fast_as_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "PAUSE_AFTER_FAILURE_S", 0.1)
    server = FakeServer(refused)
    await closed_loop(server, iter([Call(2, (), 1), Call(2, (), 1)]), 1, PATIENCE_S)
    assert server.called_s[1] - server.called_s[0] >= 0.1


async def test_an_answer_that_does_not_come_in_time_has_failed() -> None:
    found = await ask(Together(2), Call(0, (), 1), timeout_s=0.05)
    assert (found.heard, found.reason, found.is_refused) == (None, "no whole answer within 0.05 s", False)


async def test_an_answer_that_is_too_short_has_failed() -> None:
    class Short(FakeServer):
        async def hear(self, call: Call) -> Heard:
            return Heard(call.number, time.monotonic(), (1.0, 2.0))

    found = await ask(Short(), Call(0, (), 5), PATIENCE_S)
    assert (found.heard, found.reason) == (None, "the answer had 2 tokens of 5")


async def test_a_request_that_is_held_up_before_it_leaves_waits_all_the_same() -> None:
    class HeldUp(FakeServer):
        async def hear(self, call: Call) -> Heard:
            await asyncio.sleep(0.05)
            return await super().hear(call)

    found = await ask(HeldUp(), Call(0, (), 1), PATIENCE_S)
    assert found.heard is not None
    assert found.heard.ttft_s >= 0.05


async def test_a_long_prompt_arrives_once_the_streams_are_under_way_and_ends_them() -> None:
    class Watched(FakeServer):
        num_before = 0

        async def work(self, call: Call) -> None:
            if call.number == -1:
                self.num_before = len(self.calls) - 1
                self.num_meanwhile = -len(self.calls)
            for _ in range(30 if call.number == -1 else 3):
                await asyncio.sleep(0)
            if call.number == -1:
                self.num_meanwhile += len(self.calls)

    server = Watched()
    endless = (Call(number, (), 1) for number in itertools.count())
    driven = await beside_long_prompt(server, endless, 4, Call(-1, (), 3), PATIENCE_S)
    assert server.most_open == 5
    assert server.num_before >= 4
    assert server.num_meanwhile >= 4
    assert driven.long_prompt is not None
    assert driven.long_prompt.heard is not None
    assert len(driven.long_prompt.heard.arrivals_s) == 3
    # Once it is answered each stream ends with the request that is under way.
    num_after = len(driven.asked) - server.num_before - server.num_meanwhile
    assert 0 <= num_after <= 4


def test_nothing_is_asked_once_the_time_is_over() -> None:
    taken = within((Call(number, (), 1) for number in itertools.count()), 0.05)
    began_s = time.monotonic()
    numbers = [call.number for call in taken]
    assert time.monotonic() - began_s >= 0.05
    assert numbers == list(range(len(numbers)))
