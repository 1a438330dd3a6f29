"""Many prefill nodes: how they come and go, which one is chosen, and where a prompt goes that one of them failed."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from pathlib import Path

import pytest

from decode_node import peer, peer_sources, peers
from decode_node.words import QUIET
from pdserve.client.types import Answer
from pdserve.config import DecodeFallback, Role
from pdserve.engine.messages import LeaseOpened, PeerConnected
from pdserve.errors import PeerBusy, PeerError, PeerReplaced, QueueFull, TransferFailed
from pdserve.rpc.handoff import Accepted, FirstToken, Released, ToDecode
from pdserve.scheduler.config import CadenceLimits
from pdserve.transfer.base import PeerLost
from tests.roles.cluster import (
    Cluster,
    Node,
    Pair,
    Told,
    answer_to,
    ask,
    prompt_of,
    settle,
    until,
    until_load,
    until_ready,
)
from tests.roles.inside import BLOCK_SIZE, CHUNK, Computed, Held, Seen, Size, Started
from tests.roles.journal import LIMIT_S
from tests.roles.relay import Passed, Relay, relay_to

PROMPT = prompt_of(2 * CHUNK + 10)


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_sources, "LOOK_S", 0.02)


def remote(node: Node | Relay) -> str:
    return f"remote;peer={node.address}"


def write_peers(path: Path, *nodes: Node) -> None:
    new = path.with_suffix(".new")
    new.write_text(f"peers: [{', '.join(node.address for node in nodes)}]\n")
    os.replace(new, path)


# ---------------------------------------------------------------- they come and go


async def test_a_list_that_fills_later_is_used_without_a_restart(nodes: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "peers.yaml"
    decode = await nodes.start(Role.DECODE, prefill_peers=(f"file://{path}",))
    assert (await ask(decode, PROMPT)).placement == "local;reason=no_peer"
    prefill = await nodes.start_prefill()
    write_peers(path, prefill)
    await until_ready(decode)
    assert (await ask(decode, prompt_of(200))).placement == remote(prefill)
    await settle(decode, prefill)


async def test_a_peer_that_left_the_list_finishes_what_it_has_and_gets_nothing_new(
    nodes: Cluster, tmp_path: Path
) -> None:
    path = tmp_path / "peers.yaml"
    old, new = await nodes.start_prefill(), await nodes.start_prefill()
    write_peers(path, old)
    decode = await nodes.start(Role.DECODE, prefill_peers=(f"file://{path}",))
    await until_ready(decode)
    old.runner.hold()
    leaving = asyncio.create_task(ask(decode, PROMPT))
    await nodes.journal.first(Held, node=old.name)
    write_peers(path, new)
    await nodes.until_connected(decode, new)
    assert (await ask(decode, prompt_of(200))).placement == remote(new)
    assert not nodes.journal.of(Seen, node=decode.name, kind=PeerLost)
    old.runner.release()
    assert (await leaving).placement == remote(old)
    lost = await nodes.journal.first(Seen, node=decode.name, kind=PeerLost)
    assert isinstance(lost.event, PeerLost)
    assert old.name in lost.event.peer
    assert (await decode.counters())["num_peers"] == 1
    await settle(decode, old, new)


async def test_a_peer_named_again_while_it_leaves_stays_connected(nodes: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "peers.yaml"
    prefill, other = await nodes.start_prefill(), await nodes.start_prefill()
    write_peers(path, prefill)
    decode = await nodes.start(Role.DECODE, prefill_peers=(f"file://{path}",))
    await until_ready(decode)
    prefill.runner.hold()
    asking = asyncio.create_task(ask(decode, PROMPT))
    await nodes.journal.first(Held, node=prefill.name)
    write_peers(path, other)
    await nodes.until_connected(decode, other)
    write_peers(path, prefill, other)
    await until_ready(decode, num_peers=2)
    prefill.runner.release()
    assert (await asking).placement == remote(prefill)
    assert not nodes.journal.of(Seen, node=decode.name, kind=PeerLost)
    assert len(nodes.journal.of(Told, node=decode.name, kind=PeerConnected)) == 2
    await settle(decode, prefill, other)


async def test_one_node_under_two_names_is_one_peer(nodes: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "decode_node")
    prefill = await nodes.start_prefill()
    names = (prefill.address, f"localhost:{prefill.args.port}")
    decode = await nodes.start(Role.DECODE, prefill_peers=names)
    await until(lambda: any("it is the node that is used as" in record.getMessage() for record in caplog.records))
    await until_ready(decode)
    assert (await ask(decode, PROMPT)).placement.startswith("remote;peer=")
    await settle(decode, prefill)


async def test_a_prefill_node_that_drains_finishes_its_prompts_and_is_passed_over_at_once(nodes: Cluster) -> None:
    draining, other = await nodes.start_prefill(), await nodes.start_prefill()
    decode = await nodes.decode_of(draining.address, other.address)
    draining.runner.hold()
    asking = asyncio.create_task(ask(decode, PROMPT))
    await nodes.journal.first(Held, node=draining.name)
    stopping = asyncio.create_task(draining.server.stop(LIMIT_S))
    await until_ready(decode, num_peers=1)
    assert {(await ask(decode, prompt_of(200 + number))).placement for number in range(3)} == {remote(other)}
    draining.runner.release()
    assert (await asking).placement == remote(draining)
    await stopping
    await settle(decode, other)


async def test_a_prefill_node_that_lost_its_rank_is_passed_over_until_it_serves_again(nodes: Cluster) -> None:
    prefill = await nodes.start_prefill()
    decode = await nodes.decode_of(prefill.address)
    await prefill.server.set_serving(False)
    await until_ready(decode, num_peers=0)
    assert (await ask(decode, PROMPT)).placement == "local;reason=no_peer"
    await prefill.server.set_serving(True)
    await until_ready(decode)
    assert (await ask(decode, prompt_of(200))).placement == remote(prefill)
    assert (await decode.counters())["decode_fallback_total"] == 1
    await settle(decode, prefill)


# ---------------------------------------------------------------- what the log says of them


def told_of(caplog: pytest.LogCaptureFixture, target: str) -> list[tuple[str, str]]:
    """(level, what) of each line of the table of peers."""
    start = f"prefill node {target} is "
    records = [record for record in caplog.records if record.name == "decode_node.peers"]
    lines = [(record.levelname, record.getMessage()) for record in records]
    return [(level, line.removeprefix(start)) for level, line in lines if line.startswith(start)]


async def test_a_peer_that_goes_quiet_is_told_in_plain_words_and_so_is_its_return(
    nodes: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "decode_node")
    monkeypatch.setattr(peers, "CHECK_S", 0.02)
    monkeypatch.setattr(peer, "DESCRIBE_TIMEOUT_S", 0.1)
    prefill = await nodes.start_prefill()
    async with relay_to(prefill, nodes.journal) as relay:
        decode = await nodes.decode_of(relay.address)
        relay.is_quiet = True
        await until_ready(decode, num_peers=0)
        relay.is_quiet = False
        monkeypatch.setattr(peer, "DESCRIBE_TIMEOUT_S", LIMIT_S)
        await until_ready(decode)
        life = f"(incarnation life-of-{prefill.name})"
        assert told_of(caplog, relay.address) == [
            ("INFO", f"ready {life}"),
            ("WARNING", f"not usable: {QUIET}"),
            ("INFO", f"usable again {life}"),
        ]
        await settle(decode, prefill)
        await decode.stop()


async def test_a_peer_that_does_not_match_is_a_warning_when_they_meet_and_no_news_for_each_request(
    nodes: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "decode_node")
    prefill = await nodes.start_prefill(Size(model_revision="r1"))
    decode = await nodes.start(Role.DECODE, prefill_peers=(prefill.address,))
    await until(lambda: bool(told_of(caplog, prefill.address)))
    for number in range(3):
        assert (await ask(decode, prompt_of(40 + number))).placement == "local;reason=peer_mismatch"
    ((level, line),) = told_of(caplog, prefill.address)
    assert (level, "model_revision: 'r0' here, 'r1' there" in line) == ("WARNING", True)
    assert (await decode.counters())["decode_fallback_total:peer_mismatch"] == 3
    await settle(decode, prefill)


@pytest.mark.parametrize("role", [Role.DECODE, Role.FUSED])
async def test_a_peer_that_is_no_prefill_node_is_called_what_it_is(
    nodes: Cluster, caplog: pytest.LogCaptureFixture, role: Role
) -> None:
    other = await nodes.start(role)
    await nodes.start(Role.DECODE, prefill_peers=(other.address,))
    await until(lambda: bool(told_of(caplog, other.address)))
    told = f"not usable: it is a {role} node: name prefill nodes in --prefill-peers"
    assert told_of(caplog, other.address) == [("WARNING", told)]


async def test_a_decode_node_that_is_its_own_peer_is_told_so(
    nodes: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "peers.yaml"
    decode = await nodes.start(Role.DECODE, prefill_peers=(f"file://{path}",))
    write_peers(path, decode)
    await until(lambda: bool(told_of(caplog, decode.address)))
    told = "not usable: it is this node itself, a decode node: name prefill nodes in --prefill-peers"
    assert told_of(caplog, decode.address) == [("WARNING", told)]


# ---------------------------------------------------------------- which one


async def test_a_prompt_goes_where_its_beginning_was_computed(nodes: Cluster) -> None:
    first, second = await nodes.start_prefill(), await nodes.start_prefill()
    decode = await nodes.decode_of(first.address, second.address)
    first.runner.hold()
    busy = asyncio.create_task(ask(decode, prompt_of(300, seed=1)))
    await nodes.journal.first(Held, node=first.name)
    beginning = prompt_of(4 * BLOCK_SIZE, seed=2)
    assert (await ask(decode, beginning)).placement == remote(second)
    first.runner.release()
    await busy
    # Both are idle; the first is taken where nothing speaks for the other.
    assert (await ask(decode, prompt_of(5 * BLOCK_SIZE, seed=3))).placement == remote(first)
    assert (await ask(decode, [*beginning, *prompt_of(50, seed=4)])).placement == remote(second)
    await settle(decode, first, second)


async def test_what_other_decode_nodes_gave_a_peer_counts_too(nodes: Cluster) -> None:
    first, second = await nodes.start_prefill(), await nodes.start_prefill()
    first.runner.hold()
    elsewhere = await nodes.decode_of(first.address)
    theirs = asyncio.create_task(ask(elsewhere, PROMPT))
    await nodes.journal.first(Held, node=first.name)
    decode = await nodes.decode_of(first.address, second.address)
    assert (await ask(decode, prompt_of(200))).placement == remote(second)
    first.runner.release()
    await theirs
    await settle(decode, elsewhere, first, second)


async def test_tokens_cached_here_do_not_make_a_prompt_long(nodes: Cluster) -> None:
    pair = await nodes.pair(remote_prefill_min_tokens=100)
    prompt = prompt_of(5 * BLOCK_SIZE)
    assert (await ask(pair.decode, prompt)).placement == remote(pair.prefill)
    assert (await ask(pair.decode, [*prompt, *prompt_of(99, seed=1)])).placement == "local;reason=short_prompt"
    assert (await ask(pair.decode, [*prompt, *prompt_of(100, seed=2)])).placement == remote(pair.prefill)
    counters = await pair.decode.counters()
    assert (counters["local_prefills_total"], counters["remote_prefills_total"]) == (1, 2)
    assert counters["decode_fallback_total"] == 0
    assert len(pair.journal.of(Started, node=pair.prefill.name)) == 2
    await pair.settle()


# ---------------------------------------------------------------- where a prompt goes next


def breaks_before_the_first_token(said: ToDecode) -> list[Passed]:
    return [TransferFailed("broken by the test")] if isinstance(said, FirstToken) else [said]


async def test_a_prompt_that_failed_before_its_first_token_is_tried_at_another_peer_and_that_is_told(
    nodes: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    broken, sound = await nodes.start_prefill(), await nodes.start_prefill()
    async with relay_to(broken, nodes.journal) as relay:
        relay.change = breaks_before_the_first_token
        decode = await nodes.decode_of(relay.address, sound.address)
        assert (await ask(decode, PROMPT)).placement == f"{remote(sound)};attempt=2"
        told = [record.getMessage() for record in caplog.records if record.name == "decode_node.fallbacks"]
        assert len(told) == 1
        assert f" at {sound.address} after {relay.address} failed with it: " in told[0]
        counters = await decode.counters()
        assert (counters["remote_prefill_retries_total"], counters["decode_fallback_total"]) == (1, 0)
        assert counters["prompt_tokens_computed"] == 0
        await settle(decode, broken, sound)
        await decode.stop()


async def test_a_prompt_that_two_peers_failed_is_prefilled_here(nodes: Cluster) -> None:
    prefills = [await nodes.start_prefill() for _ in range(3)]
    async with (
        relay_to(prefills[0], nodes.journal) as one,
        relay_to(prefills[1], nodes.journal) as other,
        relay_to(prefills[2], nodes.journal) as third,
    ):
        for relay in (one, other, third):
            relay.change = breaks_before_the_first_token
        decode = await nodes.decode_of(one.address, other.address, third.address)
        assert (await ask(decode, PROMPT)).placement == "local;reason=transfer_failed"
        assert len(nodes.journal.of(Told, kind=LeaseOpened)) == 2
        assert (await decode.counters())["decode_fallback_total:transfer_failed"] == 1
        await settle(decode, *prefills)
        await decode.stop()


def full(said: ToDecode) -> list[Passed]:
    return [QueueFull("full, says the test")]


async def test_a_peer_without_room_sends_the_prompt_to_another_and_stays_in_use(nodes: Cluster) -> None:
    busy, other = await nodes.start_prefill(), await nodes.start_prefill()
    async with relay_to(busy, nodes.journal) as relay:
        relay.change = full
        decode = await nodes.decode_of(relay.address, other.address)
        assert (await ask(decode, PROMPT)).placement == f"{remote(other)};attempt=2"
        assert (await decode.counters())["num_ready_peers"] == 2
        await settle(decode, busy, other)
        await decode.stop()


async def test_a_prompt_for_which_nobody_has_room_is_prefilled_here_or_refused_with_the_reason(nodes: Cluster) -> None:
    busy = await nodes.start_prefill()
    async with relay_to(busy, nodes.journal) as relay:
        relay.change = full
        decode = await nodes.decode_of(relay.address)
        assert (await ask(decode, PROMPT)).placement == "local;reason=peer_busy"
        assert (await decode.counters())["decode_fallback_total:peer_busy"] == 1
        strict = await nodes.decode_of(relay.address, decode_fallback=DecodeFallback.FAIL)
        with pytest.raises(PeerBusy, match=r"full, says the test \(reason=peer_busy\)") as caught:
            await ask(strict, PROMPT)
        assert caught.value.status == "UNAVAILABLE"
        assert (await strict.counters())["decode_fallback_refused_total:peer_busy"] == 1
        await settle(decode, strict, busy)
        await decode.stop()
        await strict.stop()


async def test_a_start_to_a_former_life_is_tried_again_at_the_present_one(nodes: Cluster) -> None:
    prefill = await nodes.start_prefill()
    async with relay_to(prefill, nodes.journal) as relay:
        refusals = iter([[PeerReplaced("another incarnation")]])
        relay.change = lambda said: next(refusals, [said]) if isinstance(said, Accepted) else [said]
        decode = await nodes.decode_of(relay.address)
        assert (await ask(decode, PROMPT)).placement == f"{remote(relay)};attempt=2"
        counters = await decode.counters()
        assert (counters["remote_prefill_retries_total"], counters["decode_fallback_total"]) == (1, 0)
        await settle(decode, prefill)
        await decode.stop()


async def test_where_a_prompt_was_prefilled_is_told_of_an_answer_that_broke_off(nodes: Cluster) -> None:
    prefill = await nodes.start_prefill()
    async with relay_to(prefill, nodes.journal) as relay:
        relay.change = lambda said: [Released(False)] if isinstance(said, Released) else [said]
        decode = await nodes.decode_of(relay.address, decode_fallback=DecodeFallback.FAIL)
        async with decode.client.stream(token_ids=PROMPT, max_new_tokens=8) as stream:
            with pytest.raises(PeerError, match="reason=transfer_failed"):
                async for _ in stream:
                    pass
            assert await stream.placements() == (remote(relay),)
        await settle(decode, prefill)
        await decode.stop()


# ---------------------------------------------------------------- a storm

NUM_PROMPTS = 16
STORM = Size(num_blocks=256, num_slots=NUM_PROMPTS + 1, answer_headroom=0, cadence=CadenceLimits(1, 4))


async def receiving(pair: Pair, prompts: list[list[int]]) -> list[asyncio.Task[Answer]]:
    """Answers whose KV is on its way here, and does not arrive."""
    pair.network.slow(pair.prefill.name, num_polls=1 << 60)
    num_leases = len(pair.journal.of(Told, node=pair.prefill.name, kind=LeaseOpened)) + len(prompts)
    asking = [asyncio.create_task(ask(pair.decode, prompt, 3)) for prompt in prompts]
    await pair.journal.count(Told, num_leases, node=pair.prefill.name, kind=LeaseOpened)
    return asking


async def test_sixteen_prompts_that_fall_back_at_once_leave_running_streams_their_rounds(nodes: Cluster) -> None:
    """Between two decode rounds of the stream lies at most one prefill round; after it come four of decode."""
    pair = await nodes.pair(Size(num_blocks=256, num_slots=NUM_PROMPTS), STORM)
    stream_prompt = prompt_of(CHUNK, seed=99)
    stream = asyncio.create_task(ask(pair.decode, stream_prompt, 1500))
    await pair.journal.first(Computed, node=pair.decode.name)
    prompts = [prompt_of(2 * CHUNK, seed=number) for number in range(NUM_PROMPTS)]
    asking = await receiving(pair, prompts)
    pair.decode.runner.hold()
    await pair.prefill.die()
    pair.decode.runner.release()
    answers = await asyncio.gather(*asking)
    assert {answer.placement for answer in answers} == {"local;reason=transfer_failed"}
    assert [answer.token_ids for answer in answers] == [answer_to(prompt, 3) for prompt in prompts]
    assert not stream.done(), "the stream has to last as long as the storm"
    rounds = [bool(done.plan.prefill) for done in pair.journal.of(Computed, node=pair.decode.name)]
    storm = rounds[rounds.index(True) : len(rounds) - rounds[::-1].index(True)]
    runs = [(is_prefill, len(list(run))) for is_prefill, run in itertools.groupby(storm)]
    assert sum(number for is_prefill, number in runs if is_prefill) >= 2 * NUM_PROMPTS
    assert max(number for is_prefill, number in runs if is_prefill) == 1
    assert min(number for is_prefill, number in runs if not is_prefill) >= 4
    assert (await stream).token_ids == answer_to(stream_prompt, 1500)
    await settle(pair.decode)


async def test_the_fallbacks_of_a_dead_peer_are_counted_each_and_logged_once(
    nodes: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    pair = await nodes.pair(Size(num_blocks=256, num_slots=NUM_PROMPTS), STORM)
    asking = await receiving(pair, [prompt_of(CHUNK, seed) for seed in range(NUM_PROMPTS)])
    await pair.prefill.die()
    await asyncio.gather(*asking)
    load = await until_load(pair.decode, lambda load: load.num_running == 0)
    assert load.counters["decode_fallback_total:transfer_failed"] == NUM_PROMPTS
    told = [record.getMessage() for record in caplog.records if record.name == "decode_node.fallbacks"]
    assert len([line for line in told if line.startswith("prefilling ")]) <= 2
