"""Nodes of a group find each other over real sockets, and miss each other when one is gone."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from pdserve import __version__
from pdserve.assembly import assembly as assembling
from pdserve.assembly import wire as wires
from pdserve.assembly.assembly import Assembly
from pdserve.assembly.guest import Guest, GuestProcess
from pdserve.assembly.messages import (
    Alive,
    FromHeadless,
    Hello,
    Looks,
    Orders,
    RankEnded,
    Refused,
    ToHeadless,
)
from pdserve.assembly.wire import Wire, WireLost, dial
from pdserve.config.ports import free_port
from pdserve.engine.process_look import ProcessLook
from pdserve.errors import StartupError
from tests.engine.specs import spec_of

HOST = "127.0.0.1"
LIMIT_S = 20.0

ToFirst = Wire[ToHeadless, FromHeadless]


@asynccontextmanager
async def listening(num_nodes: int = 2) -> AsyncIterator[tuple[Assembly, int]]:
    assembly, port = Assembly(num_nodes, "r0"), free_port()
    async with assembly.listening(HOST, port):
        yield assembly, port


async def come(port: int, hello: Hello | None = None) -> ToFirst:
    wire: ToFirst = await dial(HOST, port, ToHeadless, within_s=LIMIT_S)
    wire.send(hello or Hello(__version__, 1, 2, "r0"))
    return wire


async def hear(wire: ToFirst, kind: type[ToHeadless]) -> ToHeadless:
    while not isinstance(message := await wire.receive(LIMIT_S), kind):
        pass
    return message


async def gathered(assembly: Assembly) -> list[Guest]:
    return await assembly.gather(LIMIT_S, lambda _: None)


@asynccontextmanager
async def ordered() -> AsyncIterator[tuple[GuestProcess, ToFirst]]:
    """A headless node that was told to start one rank: that rank as the first node sees it, and the node's own end."""
    async with listening() as (assembly, port):
        wire = await come(port)
        (guest,) = await gathered(assembly)
        guest.order([spec_of(1)])
        yield await guest.process_of(spec_of(1)), wire
        await wire.close()


async def test_a_group_is_gathered_when_every_node_is_here_and_is_told_what_to_start() -> None:
    async with listening(num_nodes=3) as (assembly, port):
        counts: list[int] = []
        gathering = asyncio.create_task(assembly.gather(LIMIT_S, counts.append))
        second = await come(port, Hello(__version__, 2, 3, "r0"))
        await hear(second, Alive)
        assert not gathering.done()
        first = await come(port, Hello(__version__, 1, 3, "r0"))
        guests = await gathering
        assert [guest.node_rank for guest in guests] == [1, 2]
        assert counts == [0, 1]
        guests[1].order([spec_of(2)])
        assert await hear(second, Orders) == Orders((spec_of(2),))
        for wire in (first, second):
            await wire.close()


@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        (Hello("0.0.0-other", 1, 2, "r0"), "version is .* on the first node, 0.0.0-other there"),
        (Hello(__version__, 1, 3, "r0"), "--nnodes is 2 on the first node, 3 there"),
        (Hello(__version__, 0, 2, "r0"), "--node-rank is 0 there: the others are 1 to 1"),
        (Hello(__version__, 2, 2, "r0"), "--node-rank is 2 there: the others are 1 to 1"),
        (Hello(__version__, 1, 2, "r1"), "model_revision is r0 on the first node, r1 there"),
    ],
)
async def test_a_node_that_does_not_fit_is_told_why_and_the_others_are_not_disturbed(hello: Hello, reason: str) -> None:
    async with listening() as (assembly, port):
        wrong = await come(port, hello)
        refused = await hear(wrong, Refused)
        assert isinstance(refused, Refused)
        assert refused.is_final
        assert re.search(reason, refused.reason)
        right = await come(port)
        assert len(await gathered(assembly)) == 1
        for wire in (wrong, right):
            await wire.close()


async def test_a_second_node_of_the_same_rank_may_come_again_when_the_first_is_gone() -> None:
    async with listening() as (assembly, port):
        first = await come(port)
        await gathered(assembly)
        second = await come(port)
        refused = await hear(second, Refused)
        assert refused == Refused(
            "--node-rank 1 is a node at 127.0.0.1 already; if that one is gone it will be missed soon", is_final=False
        )
        (guest,) = await gathered(assembly)
        guest.dismiss()
        with pytest.raises(WireLost, match="the connection ended"):
            await hear(first, Orders)
        third = await come(port)
        await hear(third, Alive)
        assert (await gathered(assembly))[0] is not guest
        for wire in (first, second, third):
            await wire.close()


async def test_nodes_that_do_not_come_are_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "pdserve.assembly")
    monkeypatch.setattr(assembling, "TELL_S", 0.05)
    async with listening(num_nodes=4) as (assembly, port):
        wire = await come(port, Hello(__version__, 2, 4, "r0"))
        await hear(wire, Alive)
        with pytest.raises(StartupError, match="nodes 1, 3 did not come within 0 s: look at their logs, or raise"):
            await assembly.gather(0.2, lambda _: None)
        await wire.close()
    assert "waiting for nodes 1, 3 of the group" in caplog.text


async def test_what_becomes_of_a_rank_is_told_by_its_node() -> None:
    async with ordered() as (process, wire):
        assert process.look() is None
        wire.send(Looks({1: ProcessLook(is_stopped=True, cpu_s=0.5), 7: ProcessLook(is_stopped=False, cpu_s=0.0)}))
        wire.send(RankEnded(1, -9))
        async with asyncio.timeout(LIMIT_S):
            assert await process.wait() == "ended with status -9"
        assert process.look() == ProcessLook(is_stopped=True, cpu_s=0.5)


async def test_with_a_node_its_ranks_are_gone_at_once() -> None:
    async with ordered() as (process, wire):
        await wire.close()
        async with asyncio.timeout(LIMIT_S):
            assert await process.wait() == "is on node 1 at 127.0.0.1, which is gone"


async def test_a_node_that_says_nothing_for_too_long_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As behind a link that was cut: no end of the connection comes through."""
    monkeypatch.setattr(Wire.receive, "__defaults__", (0.2,))
    async with ordered() as (process, _):
        async with asyncio.timeout(LIMIT_S):
            assert "which is gone" in await process.wait()


async def test_ending_a_rank_that_does_not_leave_ends_its_node_s_life() -> None:
    async with ordered() as (process, wire):
        async with asyncio.timeout(LIMIT_S):
            await process.end(0.0)
        with pytest.raises(WireLost):
            await hear(wire, Refused)


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        ((wires.MAX_MESSAGE_BYTES + 1).to_bytes(4, "big"), "16777217 bytes at once, the limit is 16777216"),
        (b"\0\0\0\1\xc1", "it sent what is no message"),
        (b"\0\0", "the connection ended"),
    ],
)
async def test_what_is_no_message_ends_only_its_connection(
    frame: bytes, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with listening() as (assembly, port):
        reader, writer = await asyncio.open_connection(HOST, port)
        writer.write(frame)
        writer.write_eof()
        async with asyncio.timeout(LIMIT_S):
            assert await reader.read() == b""
        writer.close()
        assert reason in caplog.text
        wire = await come(port)
        assert len(await gathered(assembly)) == 1
        await wire.close()


async def test_a_port_that_is_taken_is_told_with_the_flag() -> None:
    async with listening() as (_, port):
        with pytest.raises(StartupError, match=f"cannot listen on 127.0.0.1:{port}: .*--dist-init-addr"):
            async with Assembly(2, "r0").listening(HOST, port):
                pass
