"""Reads that fail, hang or write late, and prefill nodes that die: nothing unconfirmed is served, nothing is lost."""

from __future__ import annotations

import asyncio

from pdserve.config import Role
from pdserve.engine.messages import ChunkAnnounced, LeaseOpened, PullBroken, PullFinished
from pdserve.transfer.base import PeerLost, ReadFailed, ReadQuiet
from tests.roles.cluster import (
    Cluster,
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
from tests.roles.inside import BLOCK_SIZE, CHUNK, Held, Seen, Size

PROMPT = prompt_of(3 * CHUNK + 10)
NUM_BLOCKS = 7
FOREVER = 1 << 60


async def test_bytes_that_land_after_a_failure_find_blocks_that_nobody_uses(nodes: Cluster) -> None:
    pair = await nodes.pair(decode_size=Size(num_blocks=2 * NUM_BLOCKS + 2, num_slots=2))
    pair.network.fail_late(pair.prefill.name, num_polls=FOREVER)
    answer = await ask(pair.decode, PROMPT)
    assert answer.placement == "local;reason=transfer_failed"
    load = await until_load(pair.decode, lambda load: load.num_running == 0)
    assert load.num_quarantined_blocks == load.num_held_blocks == NUM_BLOCKS
    # Others fill every block that is left, with the quarantined ones still to be written into.
    pair.decode.runner.hold(lambda plan: bool(plan.decode))
    other_prompts = [prompt_of(3 * BLOCK_SIZE, 1), prompt_of(3 * BLOCK_SIZE, 2)]
    await pair.prefill.die()
    others = [asyncio.create_task(ask(pair.decode, prompt, 8)) for prompt in other_prompts]
    await pair.journal.first(Held, node=pair.decode.name)
    pair.decode.runner.release()
    answers = await asyncio.gather(*others)
    assert [answer.token_ids for answer in answers] == [answer_to(prompt, 8) for prompt in other_prompts]
    await settle(pair.decode)


async def test_late_bytes_end_the_quarantine_and_change_no_answer(pair: Pair) -> None:
    pair.network.fail_late(pair.prefill.name, num_polls=FOREVER)
    first = asyncio.create_task(ask(pair.decode, PROMPT, 40))
    await pair.journal.first(Told, node=pair.decode.name, kind=PullBroken)
    await until_load(pair.decode, lambda load: load.num_quarantined_blocks == NUM_BLOCKS)
    assert not pair.journal.of(Seen, kind=ReadQuiet)
    pair.network.heal(pair.prefill.name)
    await first
    await pair.settle()
    assert pair.journal.of(Seen, node=pair.decode.name, kind=ReadQuiet) or pair.journal.of(Seen, kind=ReadFailed)
    assert (await ask(pair.decode, PROMPT)).usage.num_cached_tokens == (NUM_BLOCKS - 1) * BLOCK_SIZE


async def test_a_peer_that_keeps_blocks_for_too_long_is_cut_off_and_comes_back(nodes: Cluster) -> None:
    size = Size(quarantine_s=0.2, connect_timeout_s=0.2)
    pair = await nodes.pair(size, transfer_timeout_s=0.5)
    pair.network.hang(pair.prefill.name)
    assert (await ask(pair.decode, PROMPT)).placement == "local;reason=transfer_failed"
    await pair.journal.first(Seen, node=pair.decode.name, kind=PeerLost)
    await pair.settle()
    assert (await ask(pair.decode, prompt_of(70))).placement == "local;reason=no_peer"
    pair.network.heal(pair.prefill.name)
    await until_ready(pair.decode)
    assert (await ask(pair.decode, prompt_of(71))).placement == f"remote;peer={pair.prefill.address}"
    await pair.settle()


async def test_a_prefill_node_that_dies_while_it_computes_is_replaced_by_the_decode_node(nodes: Cluster) -> None:
    pair = await nodes.pair()
    pair.prefill.runner.hold(lambda plan: any(row.start >= CHUNK for row in plan.prefill))
    asking = asyncio.create_task(ask(pair.decode, PROMPT, 8))
    await pair.journal.first(Held)
    await pair.prefill.die()
    answer = await asking
    assert (answer.token_ids, answer.placement) == (answer_to(PROMPT, 8), "local;reason=transfer_failed")
    await settle(pair.decode)


async def test_a_prefill_node_that_dies_in_mid_read_takes_no_block_along(nodes: Cluster) -> None:
    pair = await nodes.pair()
    pair.network.slow(pair.prefill.name, num_polls=FOREVER)
    async with pair.decode.client.stream(token_ids=PROMPT, max_new_tokens=8) as stream:
        first = await anext(stream)
        await pair.prefill.die()
        rest = [token async for piece in stream for token in piece.token_ids]
        assert first.token_ids + tuple(rest) == answer_to(PROMPT, 8)
        assert await stream.placements() == ("local;reason=transfer_failed",)
    await settle(pair.decode)


async def test_a_prefill_node_that_dies_idle_is_noticed_before_anybody_is_sent_there(nodes: Cluster) -> None:
    pair = await nodes.pair()
    await pair.prefill.die()
    await until_ready(pair.decode, num_peers=0)
    assert (await ask(pair.decode, PROMPT)).placement == "local;reason=no_peer"
    await settle(pair.decode)


async def test_a_restarted_prefill_node_is_connected_anew_and_its_former_life_dropped(nodes: Cluster) -> None:
    pair = await nodes.pair()
    await ask(pair.decode, PROMPT)
    await pair.prefill.die()
    again = await nodes.start_prefill(port=pair.prefill.args.port)
    await nodes.until_connected(pair.decode, again)
    await pair.journal.until(
        lambda: next((e for e in pair.journal.of(Seen, kind=PeerLost) if pair.prefill.name in e.event.peer), None)
    )
    prompt = prompt_of(CHUNK + 3, seed=5)
    assert (await ask(pair.decode, prompt)).placement == f"remote;peer={again.address}"
    await settle(pair.decode, again)


async def test_a_request_that_waited_while_its_peer_was_replaced_goes_to_the_new_life(nodes: Cluster) -> None:
    """It chose its peer when it came, and got its slot when that peer was gone."""
    pair = await nodes.pair(decode_size=Size(num_slots=1))
    pair.decode.runner.hold()
    other = asyncio.create_task(ask(pair.decode, prompt_of(70), 8))
    await pair.journal.first(Held, node=pair.decode.name)
    waiting = asyncio.create_task(ask(pair.decode, PROMPT, 8))
    await until(lambda: pair.decode.rank.num_live == 2)
    await pair.prefill.die()
    again = await nodes.start_prefill(port=pair.prefill.args.port)
    await nodes.until_told_connected(pair.decode, again)
    pair.decode.runner.release()
    await other
    assert (await waiting).placement == f"remote;peer={again.address}"
    await settle(pair.decode, again)


async def test_a_request_that_waited_while_its_only_peer_died_is_prefilled_here(nodes: Cluster) -> None:
    pair = await nodes.pair(decode_size=Size(num_slots=1))
    pair.decode.runner.hold()
    other = asyncio.create_task(ask(pair.decode, prompt_of(70), 8))
    await pair.journal.first(Held, node=pair.decode.name)
    waiting = asyncio.create_task(ask(pair.decode, PROMPT, 8))
    await until(lambda: pair.decode.rank.num_live == 2)
    await pair.prefill.die()
    pair.decode.runner.release()
    await other
    assert (await waiting).placement in ("local;reason=no_peer", "local;reason=transfer_failed")
    await settle(pair.decode)


async def test_a_decode_node_that_dies_leaves_nothing_at_its_peer_and_no_other_notices(nodes: Cluster) -> None:
    pair = await nodes.pair()
    other = await nodes.decode_of(pair.prefill.address)
    pair.prefill.runner.hold(lambda plan: any(row.start >= CHUNK for row in plan.prefill))
    doomed = asyncio.create_task(ask(pair.decode, PROMPT))
    await pair.journal.first(Told, kind=LeaseOpened)
    await pair.journal.first(Told, kind=ChunkAnnounced)
    unharmed = asyncio.create_task(ask(other, prompt_of(200, seed=4), 8))
    await pair.decode.die()
    pair.prefill.runner.release()
    assert (await unharmed).placement == f"remote;peer={pair.prefill.address}"
    await asyncio.wait([doomed])
    await settle(pair.prefill, other)


async def test_a_peer_gone_after_the_last_read_still_has_to_confirm(nodes: Cluster) -> None:
    """Every byte is here; without Released it is a failed transfer all the same."""
    pair = await nodes.pair()
    pair.prefill.runner.hold(lambda plan: any(row.samples for row in plan.prefill))
    asking = asyncio.create_task(ask(pair.decode, PROMPT, 8))
    await pair.journal.first(Held)
    await pair.prefill.die()
    assert (await asking).placement == "local;reason=transfer_failed"
    await settle(pair.decode)
    assert not pair.journal.of(Told, node=pair.decode.name, kind=PullFinished)


async def test_two_peers_share_the_work_and_one_goes_on_alone(nodes: Cluster) -> None:
    first, second = await nodes.start(Role.PREFILL), await nodes.start(Role.PREFILL)
    decode = await nodes.decode_of(first.address, second.address)
    first.runner.hold()
    second.runner.hold()
    asking = [asyncio.create_task(ask(decode, prompt_of(200, number))) for number in range(4)]
    for node in (first, second):
        await nodes.journal.first(Held, node=node.name)
    first.runner.release()
    second.runner.release()
    placements = [answer.placement for answer in await asyncio.gather(*asking)]
    assert sorted(placements) == sorted([f"remote;peer={node.address}" for node in (first, second)] * 2)
    await first.die()
    await until_ready(decode, num_peers=1)
    assert (await ask(decode, PROMPT)).placement == f"remote;peer={second.address}"
    await settle(decode, second)
