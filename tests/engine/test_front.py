"""The front's view of a rank, against a rank played by hand."""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from pdserve.engine import launch, member
from pdserve.engine.channel import FrontChannel, RankChannel
from pdserve.engine.front import Rank
from pdserve.engine.launch import RankProcess, TransportSpec, read_spec
from pdserve.engine.local_tokens import LocalTokens
from pdserve.engine.member import Member
from pdserve.engine.messages import (
    Abort,
    AskLoad,
    ExpectPeer,
    FromRank,
    FromTransport,
    LeaseOpened,
    Loading,
    LoadReport,
    Output,
    Outputs,
    Ping,
    Pong,
    Ready,
    StartFailed,
    Submit,
    ToRank,
    ToTransport,
)
from pdserve.engine.process_look import ProcessLook
from pdserve.engine.ranks import Ranks
from pdserve.errors import InternalError, InvalidRequest, NotReady, QueueFull, RequestIdInUse, StartupError
from pdserve.request import FUSED, FinishReason, LeaseId, RankLoad, RequestId, SamplingParams, TokenDelta, TokenRequest
from tests.engine.specs import SMALL
from tests.roles.inside import fingerprint
from tests.roles.journal import LIMIT_S

READY = Ready(8, 1024, 512, 258, (256,), fingerprint("r0"), b"metadata")
LOAD = RankLoad(0, 1, 2, 3, 4, 5, 6)


@dataclass
class ByHand:
    """The rank's ends, and the front's Rank."""

    rank: Rank
    loop: RankChannel[ToRank, FromRank]
    transport: RankChannel[ToTransport, FromTransport]
    heard: list[ToRank] = field(default_factory=list)

    async def hear(self, kind: type[ToRank]) -> ToRank:
        async with asyncio.timeout(LIMIT_S):
            while True:
                self.heard += self.loop.receive_all()
                for message in self.heard:
                    if isinstance(message, kind):
                        self.heard.remove(message)
                        return message
                await asyncio.sleep(0)

    async def ready(self) -> None:
        self.loop.send(READY)
        assert await self.rank.members[0].attach(timeout_s=LIMIT_S) == READY


@pytest.fixture
async def by_hand(sockets: Path) -> AsyncIterator[ByHand]:
    loop, transport = f"ipc://{sockets}/loop", f"ipc://{sockets}/transport"
    to_loop: FrontChannel[FromRank, ToRank] = FrontChannel(loop, FromRank)
    beside: FrontChannel[FromTransport, ToTransport] = FrontChannel(transport, FromTransport)
    hand = ByHand(
        Rank([Member(to_loop, beside)], max_live=2), RankChannel(loop, ToRank), RankChannel(transport, ToTransport)
    )
    yield hand
    hand.loop.close()
    hand.transport.close()
    await hand.rank.stop()


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not is_so():  # noqa: ASYNC110 - nothing would set an event for it
            await asyncio.sleep(0)


def request(name: str) -> TokenRequest:
    return TokenRequest(RequestId(name), (1, 2), SamplingParams(4))


# ---------------------------------------------------------------- start


async def test_loading_is_told_until_the_rank_is_ready(by_hand: ByHand) -> None:
    seen: list[Loading] = []
    by_hand.loop.send(Loading("weights", 1, 2))
    by_hand.loop.send(READY)
    assert await by_hand.rank.members[0].attach(timeout_s=LIMIT_S, on_loading=seen.append) == READY
    assert seen == [Loading("weights", 1, 2)]


async def test_a_rank_that_cannot_start_says_why(by_hand: ByHand) -> None:
    by_hand.loop.send(StartFailed("no memory: free some"))
    with pytest.raises(StartupError, match="no memory: free some"):
        await by_hand.rank.members[0].attach(timeout_s=LIMIT_S)


async def test_a_rank_that_is_never_ready_is_given_up_with_the_flag(by_hand: ByHand) -> None:
    with pytest.raises(StartupError, match="--startup-timeout-s"):
        await by_hand.rank.members[0].attach(timeout_s=0.01)


async def test_a_rank_that_was_given_up_may_fail_later_without_a_word(by_hand: ByHand) -> None:
    """Whoever waited was told already."""
    complaints: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    one = by_hand.rank.members[0]
    with pytest.raises(StartupError):
        await one.attach(timeout_s=0.01)
    one.lose("the node is stopping")
    by_hand.loop.send(StartFailed("no memory: free some"))
    by_hand.loop.send(READY)
    by_hand.loop.send(Pong(1))
    await until(lambda: one.num_tokens_computed == 1)
    del one._ready
    gc.collect()
    await asyncio.sleep(0)
    assert complaints == []


# ---------------------------------------------------------------- requests


async def test_requests_past_the_limit_and_ids_in_use_are_refused(by_hand: ByHand) -> None:
    await by_hand.ready()
    by_hand.rank.open(request("a"), FUSED)
    with pytest.raises(RequestIdInUse, match="request_id 'a' is in use"):
        by_hand.rank.open(request("a"), FUSED)
    by_hand.rank.open(request("b"), FUSED)
    with pytest.raises(QueueFull, match="the limit is 2"):
        by_hand.rank.open(request("c"), FUSED)
    assert by_hand.rank.num_live == 2
    by_hand.rank.close(RequestId("b"), is_over=True)
    by_hand.rank.open(request("c"), FUSED)


async def test_what_is_still_said_of_a_closed_request_reaches_nobody(by_hand: ByHand) -> None:
    await by_hand.ready()
    first = by_hand.rank.open(request("a"), FUSED)
    by_hand.rank.close(RequestId("a"), is_over=False)
    second = by_hand.rank.open(request("a"), FUSED)
    assert await by_hand.hear(Abort) == Abort(first.rank_id)
    late = [Output(first.rank_id, (7,)), Output(first.rank_id, finish=FinishReason.ABORT)]
    by_hand.loop.send(Outputs([*late, Output(second.rank_id, (8,))]))
    async with asyncio.timeout(LIMIT_S):
        assert await second.get() == Output(second.rank_id, (8,))


async def test_a_request_that_is_over_is_not_aborted_and_an_unknown_one_is_not_found(by_hand: ByHand) -> None:
    await by_hand.ready()
    by_hand.rank.open(request("a"), FUSED)
    by_hand.rank.close(RequestId("a"), is_over=True)
    by_hand.rank.close(RequestId("a"), is_over=False)
    assert not by_hand.rank.abort(RequestId("a"))
    by_hand.rank.give_up_transfer(1, ())  # type: ignore[arg-type]
    submitted = await by_hand.hear(Submit)
    assert isinstance(submitted, Submit)
    assert submitted.request.prompt == (1, 2)
    assert not any(isinstance(message, Abort) for message in by_hand.heard)


async def test_a_local_answer_ends_with_the_error_that_the_rank_names(by_hand: ByHand) -> None:
    await by_hand.ready()
    answer = LocalTokens(Ranks([by_hand.rank]), "local;reason=x").stream(request("a"))
    step = asyncio.ensure_future(anext(answer))
    submitted = await by_hand.hear(Submit)
    assert isinstance(submitted, Submit)
    rank_id = submitted.request.request_id
    by_hand.loop.send(Outputs([Output(rank_id, (5,), num_cached_tokens=64)]))
    assert await step == TokenDelta((5,), num_cached_tokens=64, placement="local;reason=x")
    by_hand.loop.send(Outputs([Output(rank_id, error_name="InvalidRequest", error_message="too long")]))
    with pytest.raises(InvalidRequest, match="too long"):
        await anext(answer)
    assert by_hand.rank.num_live == 0


# ---------------------------------------------------------------- load


async def test_the_load_is_asked_for_and_broken_tables_are_an_error(by_hand: ByHand) -> None:
    await by_hand.ready()
    for integrity in ("", "a block is lost"):
        asking = asyncio.create_task(by_hand.rank.load(check_integrity=True))
        asked = await by_hand.hear(AskLoad)
        assert isinstance(asked, AskLoad)
        assert asked.check_integrity
        by_hand.loop.send(LoadReport(asked.number, LOAD, integrity))
        if integrity:
            with pytest.raises(InternalError, match=integrity):
                await asking
        else:
            assert await asking == LOAD


async def test_a_rank_that_does_not_report_is_not_waited_for(by_hand: ByHand) -> None:
    await by_hand.ready()
    with pytest.raises(NotReady, match="did not report its load"):
        await by_hand.rank.load(timeout_s=0.01)
    by_hand.loop.send(LoadReport(1, LOAD))  # too late, and nobody's any more
    asking = asyncio.create_task(by_hand.rank.load())
    await by_hand.hear(AskLoad)
    by_hand.loop.send(LoadReport(2, LOAD))
    assert await asking == LOAD


# ---------------------------------------------------------------- the transport thread


async def test_the_transport_thread_has_a_way_of_its_own(by_hand: ByHand) -> None:
    await by_hand.ready()
    heard: asyncio.Queue[FromTransport] = asyncio.Queue()
    by_hand.rank.members[0].on_transport = heard.put_nowait
    by_hand.transport.send(LeaseOpened(LeaseId("x")))
    async with asyncio.timeout(LIMIT_S):
        assert await heard.get() == LeaseOpened(LeaseId("x"))
        by_hand.rank.tell_transport(ExpectPeer())
    assert by_hand.transport.socket.poll(LIMIT_S * 1000)
    assert by_hand.transport.receive_all() == [ExpectPeer()]


# ---------------------------------------------------------------- a rank that is lost


async def test_a_message_that_cannot_be_handled_loses_the_rank_and_fails_its_requests(by_hand: ByHand) -> None:
    await by_hand.ready()
    inbox = by_hand.rank.open(request("a"), FUSED)
    asking = asyncio.create_task(by_hand.rank.load())
    await by_hand.hear(AskLoad)

    def fail(message: FromTransport) -> None:
        raise ValueError("a fault of ours")

    by_hand.rank.members[0].on_transport = fail
    by_hand.transport.send(LeaseOpened(LeaseId("x")))
    async with asyncio.timeout(LIMIT_S):
        await by_hand.rank.lost.wait()
        assert isinstance(await inbox.get(), NotReady)
    with pytest.raises(NotReady):
        await asking
    with pytest.raises(NotReady, match="retry on another node"):
        by_hand.rank.open(request("b"), FUSED)
    with pytest.raises(NotReady):
        await by_hand.rank.load()
    by_hand.rank.close(RequestId("a"), is_over=False)
    by_hand.rank.tell_transport(ExpectPeer())
    assert by_hand.transport.receive_all() == []


# ---------------------------------------------------------------- life


async def test_a_loop_that_goes_round_answers_one_question_at_a_time(by_hand: ByHand) -> None:
    await by_hand.ready()
    for _ in range(3):
        by_hand.rank.ask_for_life()
    await by_hand.hear(Ping)
    by_hand.loop.send(Pong(num_tokens_computed=70))
    await until(lambda: by_hand.rank.num_tokens_computed == 70)
    assert not any(isinstance(message, Ping) for message in by_hand.heard + by_hand.loop.receive_all())
    by_hand.rank.ask_for_life()
    await by_hand.hear(Ping)


async def test_whatever_the_loop_says_is_a_sign_of_life_and_what_its_transport_says_is_none(
    by_hand: ByHand, monkeypatch: pytest.MonkeyPatch
) -> None:
    await by_hand.ready()
    later_s = 0.0
    monkeypatch.setattr(member, "monotonic", lambda: time.monotonic() + later_s)
    assert by_hand.rank.members[0].has_shown_life(within_s=100)
    later_s = 200.0
    heard: list[object] = []
    by_hand.rank.members[0].on_transport = heard.append
    by_hand.transport.send(LeaseOpened(LeaseId("a")))
    await until(lambda: bool(heard))
    assert not by_hand.rank.members[0].has_shown_life(within_s=100)
    by_hand.loop.send(Outputs([]))
    await until(lambda: by_hand.rank.members[0].has_shown_life(within_s=100))


@dataclass
class Seen:
    """A process as it looks from outside; nothing was started."""

    looks: ProcessLook | None

    def look(self) -> ProcessLook | None:
        return self.looks

    async def wait(self) -> str:
        return "ended"

    async def end(self, timeout_s: float) -> None:
        pass


@pytest.fixture
def seen(by_hand: ByHand) -> Seen:
    process = Seen(ProcessLook(is_stopped=False, cpu_s=1.0))
    by_hand.rank.members[0]._process = process
    return process


async def test_a_rank_that_is_seen_to_compute_is_alive_however_long_it_says_nothing(
    by_hand: ByHand, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first round on a machine that is busy all of a sudden: nobody has seen one as long."""
    await by_hand.ready()
    later_s = 0.0
    monkeypatch.setattr(member, "monotonic", lambda: time.monotonic() + later_s)
    for later_s in (0.0, 90.0, 180.0, 270.0):
        seen.looks = ProcessLook(is_stopped=False, cpu_s=1.0 + later_s / 1000)
        assert by_hand.rank.is_alive(within_s=100)
    later_s = 371.0
    assert not by_hand.rank.is_alive(within_s=100), "it neither says nor computes anything"
    assert not by_hand.rank.members[0].has_shown_life(within_s=300), "that is about what it says alone"


async def test_a_stopped_rank_is_not_alive_from_that_moment_on(by_hand: ByHand, seen: Seen) -> None:
    await by_hand.ready()
    assert by_hand.rank.is_alive(within_s=100)
    seen.looks = ProcessLook(is_stopped=True, cpu_s=2.0)
    assert not by_hand.rank.is_alive(within_s=100)
    seen.looks = ProcessLook(is_stopped=False, cpu_s=2.0)
    assert by_hand.rank.is_alive(within_s=100)


async def test_what_is_told_to_a_process_that_has_ended_is_no_fault_of_the_teller(by_hand: ByHand, seen: Seen) -> None:
    await by_hand.ready()
    by_hand.loop.close()

    def is_refused() -> bool:
        try:
            by_hand.rank.members[0].tell(Ping())
        except NotReady:
            return True
        return False

    await until(is_refused)  # by one that lives, and takes nothing
    for seen.looks in (ProcessLook(is_stopped=False, cpu_s=1.0, has_ended=True), None):
        assert not is_refused()


async def test_how_long_its_rounds_take_is_what_the_warm_up_said_and_then_what_the_loop_says(by_hand: ByHand) -> None:
    by_hand.loop.send(msgspec.structs.replace(READY, longest_chunk_s=28.0))
    await by_hand.rank.members[0].attach(timeout_s=LIMIT_S)
    assert by_hand.rank.longest_round_s == 28.0
    by_hand.loop.send(Pong(70, longest_round_s=0.5))
    await until(lambda: by_hand.rank.longest_round_s == 0.5)


async def test_a_lost_rank_is_asked_nothing(by_hand: ByHand) -> None:
    await by_hand.ready()
    by_hand.rank.lose("it ended")
    by_hand.rank.ask_for_life()
    by_hand.rank.close(RequestId("nobody"), is_over=True)
    assert by_hand.loop.receive_all() == []


# ---------------------------------------------------------------- processes


SPEC = msgspec.structs.replace(SMALL, transport=TransportSpec("name", "ipc:///nowhere", 30.0, 120.0))

Script = Callable[[str], None]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Script:
    """What a rank process is from now on: these lines of Python."""

    def become(lines: str) -> None:
        program = tmp_path / "rank"
        program.write_text(f"#!{sys.executable}\nimport os, sys, time\n{lines}\n")
        program.chmod(0o700)
        monkeypatch.setattr(launch.sys, "executable", str(program))

    return become


async def test_a_process_is_told_its_spec_and_its_threads(script: Script, tmp_path: Path) -> None:
    script(
        "open(sys.argv[0] + '.spec', 'wb').write(sys.stdin.buffer.read()); "
        "open(sys.argv[0] + '.threads', 'w').write(os.environ['OMP_NUM_THREADS'])"
    )
    process = await RankProcess.start(SPEC)
    assert await process.wait() == "ended with status 0"
    assert read_spec((tmp_path / "rank.spec").read_bytes()) == SPEC
    assert (tmp_path / "rank.threads").read_text() == "1"


async def test_a_process_that_ends_before_it_is_ready_is_a_startup_error(by_hand: ByHand, script: Script) -> None:
    script("sys.exit(3)")
    with pytest.raises(StartupError, match="ended with status 3 before it was ready"):
        await by_hand.rank.members[0].start(SPEC, on_loading=lambda _: None)


async def test_a_process_that_does_not_leave_is_killed(script: Script) -> None:
    script("time.sleep(60)")
    process = await RankProcess.start(SPEC)
    await process.end(timeout_s=0.05)
    assert await process.wait() == "ended with status -9"


def test_a_rank_started_by_hand_says_who_starts_it() -> None:
    with pytest.raises(StartupError, match="use `pdserve serve`"):
        read_spec(b"hello")
