"""One process of a rank fails, or stays behind, while the others go on: what becomes of the handoff of them all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from pdserve.config import Role
from pdserve.engine.messages import (
    AnnounceChunk,
    ChunkAnnounced,
    ConfirmPull,
    LeaseAnswer,
    LoopCommand,
    OpenLease,
    OpenPull,
    PullCommitted,
    PullFinished,
    RevokeLease,
    ToTransport,
)
from pdserve.rpc.handoff import (
    Accepted,
    ChunkReady,
    FirstToken,
    HandoffAbort,
    Progress,
    Release,
    Released,
    Renew,
    ToDecode,
)
from pdserve.scheduler.plan import KvReceived, LeaseReleased
from tests.roles.cluster import Cluster, Node, Pair, Told, answer_to, ask, prompt_of, settle, until, until_load
from tests.roles.inside import BLOCK_SIZE, CHUNK, Held, Size
from tests.roles.lagging import LaggingLink, Withheld
from tests.roles.relay import Asked, decode_by_hand, relay_to

PROMPT = prompt_of(3 * CHUNK + 10)
NUM_BLOCKS, NUM_CHUNKS = 7, 4
FOREVER = 1 << 60
TWO = Size(num_parts=2)


def link_of(node: Node) -> LaggingLink:
    """Of the process that follows."""
    (follower,) = node.followers
    assert follower.link is not None
    return follower.link


def is_last_chunk(item: object) -> bool:
    return isinstance(item, AnnounceChunk) and item.end_token == len(PROMPT)


def withholds(kind: type[object]) -> Callable[[object], bool]:
    return lambda item: isinstance(item, kind)


@pytest.fixture
async def twos(nodes: Cluster) -> Pair:
    """Both nodes are of two processes each, which hold the same heads: part 1 reads from part 1."""
    return await nodes.pair(TWO)


# ---------------------------------------------------------------- a part of the prefill node


@pytest.mark.parametrize("holds", [withholds(OpenLease), is_last_chunk], ids=["its lease", "its last chunk"])
async def test_what_one_part_of_the_prefill_node_never_says_fails_the_whole_transfer(
    nodes: Cluster, holds: Callable[[object], bool]
) -> None:
    pair = await nodes.pair(TWO, transfer_timeout_s=0.3)
    link_of(pair.prefill).hold(holds)
    answer = await ask(pair.decode, PROMPT, 8)
    assert (answer.token_ids, answer.placement) == (answer_to(PROMPT, 8), "local;reason=transfer_failed")
    await settle(pair.decode)
    link_of(pair.prefill).release()
    await pair.settle()
    assert not pair.journal.of(Told, kind=PullCommitted)


async def test_a_prompt_that_one_part_never_lent_is_computed_by_another_peer(nodes: Cluster) -> None:
    peers = {node.name: node for node in (await nodes.start(Role.PREFILL, TWO), await nodes.start(Role.PREFILL, TWO))}
    decode = await nodes.decode_of(*(peer.address for peer in peers.values()), size=TWO, transfer_timeout_s=0.3)
    for peer in peers.values():
        link_of(peer).hold(withholds(OpenLease))
    asking = asyncio.create_task(ask(decode, PROMPT, 8))
    withheld = await nodes.journal.first(Withheld)
    (other,) = (peer for peer in peers.values() if peer.followers[0].name != withheld.node)
    link_of(other).release()
    assert (await asking).placement == f"remote;peer={other.address};attempt=2"
    for peer in peers.values():
        link_of(peer).release()
    await settle(decode, *peers.values())


async def test_blocks_that_one_part_does_not_vouch_for_are_never_decoded_from(twos: Pair) -> None:
    link_of(twos.prefill).change = as_if_given_out_before
    answer = await ask(twos.decode, PROMPT, 8)
    assert (answer.token_ids, answer.placement) == (answer_to(PROMPT, 8), "local;reason=transfer_failed")
    (lease_id,) = {told.message.lease_id for told in twos.journal.of(Told) if isinstance(told.message, LeaseAnswer)}
    for part, valid in enumerate((True, False)):
        assert twos.journal.of(Told, message=LeaseAnswer(lease_id, valid), part=part)
    assert not twos.journal.of(Told, kind=PullCommitted)
    await twos.settle()


def as_if_given_out_before(command: LoopCommand) -> LoopCommand:
    """The blocks of a chunk are not what they were when it was announced."""
    if not isinstance(command, AnnounceChunk):
        return command
    before = tuple(generation - 1 for generation in command.generations)
    return AnnounceChunk(command.lease_id, command.first_token, command.end_token, command.blocks, before)


async def test_a_lease_that_one_part_revoked_is_told_to_the_decode_node_at_once(nodes: Cluster) -> None:
    prefill = await nodes.start_prefill(TWO)
    prefill.runner.hold(lambda plan: any(row.start >= CHUNK for row in plan.prefill))
    async with decode_by_hand(prefill) as decode:
        stream = await decode.begin(PROMPT)
        accepted = await stream.hear(Accepted)
        prefill.rank.members[1].tell_transport(RevokeLease(accepted.lease_id, "told to"))
        assert "the lease was revoked" in (await stream.hear(HandoffAbort)).reason
    prefill.runner.release()
    await settle(prefill)


async def test_lent_blocks_stay_until_every_part_has_let_go_of_them(twos: Pair) -> None:
    link_of(twos.prefill).hold(withholds(LeaseReleased))
    assert (await ask(twos.decode, PROMPT)).placement == f"remote;peer={twos.prefill.address}"
    await twos.journal.first(Withheld, kind=LeaseReleased)
    await settle(twos.decode)
    load = await twos.prefill.load()
    assert (load.num_live_leases, load.num_held_blocks) == (0, NUM_BLOCKS)
    link_of(twos.prefill).release()
    await twos.settle()


async def test_whatever_order_parts_speak_in_the_decode_node_hears_of_the_lease_first_and_of_chunks_in_order(
    nodes: Cluster,
) -> None:
    prefill = await nodes.start_prefill(TWO)
    heard: list[ToDecode] = []

    def note(said: ToDecode) -> list[ToDecode]:
        if not isinstance(said, Progress):
            heard.append(said)
        return [said]

    async with relay_to(prefill, nodes.journal) as relay:
        relay.change = note
        decode = await nodes.decode_of(relay.address, size=TWO)
        link_of(prefill).hold(withholds(OpenLease))
        asking = asyncio.create_task(ask(decode, PROMPT))
        await nodes.journal.count(Told, NUM_CHUNKS, node=prefill.name, kind=ChunkAnnounced, part=0)
        await until_load(prefill, lambda load: load.counters["output_tokens"] == 1)  # the first token is out
        assert heard == []
        link_of(prefill).release()
        assert (await asking).placement == f"remote;peer={relay.address}"
        await settle(prefill, decode)
        await decode.stop()
    assert (type(heard[0]), type(heard[-1])) == (Accepted, Released)
    assert sum(isinstance(said, FirstToken) for said in heard) == 1
    chunks = [(said.rank, said.seq) for said in heard if isinstance(said, ChunkReady)]
    assert chunks == [(rank, seq) for rank in (0, 1) for seq in range(NUM_CHUNKS)]


# ---------------------------------------------------------------- a part of the decode node


async def test_a_transfer_that_one_part_failed_with_keeps_its_blocks_until_every_part_is_quiet(nodes: Cluster) -> None:
    decode_size = replace(TWO, num_blocks=2 * NUM_BLOCKS + 2, num_slots=2)
    pair = await nodes.pair(TWO, decode_size, remote_prefill_min_tokens=300)
    failing, follower = pair.prefill.followers[0].name, pair.decode.followers[0]
    pair.network.fail_late(failing, num_polls=FOREVER)
    assert (await ask(pair.decode, PROMPT)).placement == "local;reason=transfer_failed"
    load = await until_load(pair.decode, lambda load: load.num_running == 0)
    assert load.num_quarantined_blocks == load.num_held_blocks == NUM_BLOCKS
    # Its other part is quiet: only this one can still write.
    await until(lambda: pair.decode.insides[0].count("open_pulls") == 1)
    assert follower.transport is not None
    counters = follower.transport.counters
    assert counters()["open_pulls"] == 1
    # Others fill every block that is left, and then the bytes land.
    pair.decode.runner.hold(lambda plan: bool(plan.decode))
    other_prompts = [prompt_of(3 * BLOCK_SIZE, 1), prompt_of(3 * BLOCK_SIZE, 2)]
    others = [asyncio.create_task(ask(pair.decode, prompt, 8)) for prompt in other_prompts]
    await pair.journal.first(Held, node=pair.decode.name)
    pair.network.heal(failing)
    await until(lambda: counters()["open_pulls"] == 0)
    pair.decode.runner.release()
    answers = await asyncio.gather(*others)
    assert [answer.token_ids for answer in answers] == [answer_to(prompt, 8) for prompt in other_prompts]
    await pair.settle()


async def test_nothing_is_released_before_every_part_has_read_everything(nodes: Cluster) -> None:
    prefill = await nodes.start_prefill(replace(TWO, lease_s=0.6))
    async with relay_to(prefill, nodes.journal) as relay:
        decode = await nodes.decode_of(relay.address, size=TWO)
        nodes.network.hang(prefill.followers[0].name)
        async with decode.client.stream(token_ids=PROMPT, max_new_tokens=8) as stream:
            tokens = (await anext(stream)).token_ids
            await nodes.journal.first(Told, node=decode.name, kind=PullFinished, part=0)
            # A decode node renews until it asks for the release: it still does, a while after its first part was done.
            await nodes.journal.count(Asked, len(nodes.journal.of(Asked, kind=Renew)) + 3, kind=Renew)
            assert not nodes.journal.of(Asked, kind=Release)
            nodes.network.heal(prefill.followers[0].name)
            tokens += tuple([token async for piece in stream for token in piece.token_ids])
            assert tokens == answer_to(PROMPT, 8)
            assert await stream.placements() == (f"remote;peer={relay.address}",)
        await settle(prefill, decode)
        await decode.stop()


async def test_nothing_is_decoded_before_every_part_has_committed(twos: Pair) -> None:
    link_of(twos.decode).hold(withholds(KvReceived))
    asking = asyncio.create_task(ask(twos.decode, PROMPT, 8))
    await twos.journal.first(Withheld, kind=KvReceived)
    await settle(twos.prefill)
    load = await twos.decode.load()
    assert (load.num_open_transfers, load.counters["output_tokens"]) == (1, 0)
    link_of(twos.decode).release()
    assert (await asking).placement == f"remote;peer={twos.prefill.address}"
    await twos.settle()


async def test_a_transfer_that_one_part_did_not_commit_is_given_up_by_all(twos: Pair) -> None:
    member = twos.decode.rank.members[1]
    tell = member.tell_transport

    def refuse(message: ToTransport) -> None:
        if isinstance(message, ConfirmPull):
            message = ConfirmPull(message.transfer_id, False, message.first_token)
        tell(message)

    member.tell_transport = refuse
    answer = await ask(twos.decode, PROMPT, 8)
    assert answer.token_ids == answer_to(PROMPT, 8)
    assert [told.part for told in twos.journal.of(Told, kind=PullCommitted)] == [0]
    assert (await twos.decode.counters())["decode_fallback_total:transfer_failed"] == 1
    await twos.settle()


async def test_bytes_that_changed_in_one_part_fail_the_whole_transfer(nodes: Cluster) -> None:
    size = replace(TWO, has_checksums=True)
    pair = await nodes.pair(size, size)
    source = pair.prefill.followers[0]
    nodes.network.hang(source.name)
    asking = asyncio.create_task(ask(pair.decode, PROMPT, 8))
    announced = (await pair.journal.count(Told, NUM_CHUNKS, kind=ChunkAnnounced, part=1))[2].message
    assert isinstance(announced, ChunkAnnounced)
    source.storage.slab[announced.blocks[1], 17] ^= 0x40
    nodes.network.heal(source.name)
    answer = await asking
    assert (answer.token_ids, answer.placement) == (answer_to(PROMPT, 8), "local;reason=transfer_failed")
    assert not pair.journal.of(Told, kind=PullCommitted)
    assert pair.decode.insides[0].count("kv_checksum_failures_total") == 1
    await pair.settle()
    # Blocks that did not change are told to be the same in every part.
    assert (await ask(pair.decode, prompt_of(200))).placement == f"remote;peer={pair.prefill.address}"
    await pair.settle()


async def test_a_part_that_hears_of_a_transfer_after_its_chunks_reads_them_all_the_same(twos: Pair) -> None:
    link_of(twos.decode).hold(withholds(OpenPull))
    asking = asyncio.create_task(ask(twos.decode, PROMPT, 8))
    await twos.journal.first(Told, node=twos.decode.name, kind=PullFinished, part=0)
    link_of(twos.decode).release()
    assert (await asking).placement == f"remote;peer={twos.prefill.address}"
    await twos.settle()


# ---------------------------------------------------------------- a client that leaves


@dataclass(frozen=True, slots=True)
class Standstill:
    """of: the node whose follower holds something up. holds: what. kind: of it."""

    of: Callable[[Pair], Node]
    holds: Callable[[object], bool]


STANDSTILLS = {
    "a lease is not open": Standstill(lambda pair: pair.prefill, withholds(OpenLease)),
    "a chunk is not announced": Standstill(lambda pair: pair.prefill, is_last_chunk),
    "a lease has not ended": Standstill(lambda pair: pair.prefill, withholds(LeaseReleased)),
    "a pull is not open": Standstill(lambda pair: pair.decode, withholds(OpenPull)),
    "a commit is not heard of": Standstill(lambda pair: pair.decode, withholds(KvReceived)),
}


@pytest.mark.parametrize("name", STANDSTILLS)
async def test_a_client_that_leaves_while_one_part_is_behind_gets_everything_back_in_every_part(
    twos: Pair, name: str
) -> None:
    standstill = STANDSTILLS[name]
    link = link_of(standstill.of(twos))
    link.hold(standstill.holds)
    asking = asyncio.create_task(ask(twos.decode, PROMPT, 1000))
    await twos.journal.first(Withheld)
    await leave(twos, asking)
    link.release()
    await twos.settle()
    assert (await ask(twos.decode, prompt_of(200))).placement == f"remote;peer={twos.prefill.address}"
    await twos.settle()


@pytest.mark.parametrize("fault", ["hang", "fail late"])
async def test_a_client_that_leaves_while_one_part_reads_gets_everything_back_in_every_part(
    twos: Pair, fault: str
) -> None:
    source, reader = twos.prefill.followers[0].name, twos.decode.followers[0]
    if fault == "hang":
        twos.network.hang(source)
    else:
        twos.network.fail_late(source, num_polls=FOREVER)
    asking = asyncio.create_task(ask(twos.decode, PROMPT, 1000))
    assert reader.transport is not None
    counters = reader.transport.counters
    await until(lambda: counters()["open_reads"] > 0)
    await leave(twos, asking)
    await settle(twos.prefill)
    load = await until_load(twos.decode, lambda load: load.num_quarantined_blocks == NUM_BLOCKS)
    assert load.num_open_transfers == 1
    twos.network.heal(source)
    await twos.settle()


async def leave(pair: Pair, asking: asyncio.Task[object]) -> None:
    """Until no front knows the request any more."""
    asking.cancel()
    await asyncio.wait([asking])
    await until(lambda: pair.decode.rank.num_live == pair.prefill.rank.num_live == 0)
