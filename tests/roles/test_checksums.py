"""Checksums between two nodes: bytes that changed on the way are not decoded from; without hashes nobody is paired."""

from __future__ import annotations

import asyncio

import pytest

from pdserve.config import DecodeFallback, Role
from pdserve.engine.messages import ChunkAnnounced, PullCommitted
from pdserve.errors import PdserveError
from tests.roles.cluster import Cluster, Told, answer_to, ask, prompt_of, settle, until_ready
from tests.roles.inside import CHUNK, Size

PROMPT = prompt_of(3 * CHUNK + 10)
HASHED = Size(has_checksums=True)


async def test_with_checksums_on_both_sides_prompts_are_prefilled_by_the_peer(nodes: Cluster) -> None:
    pair = await nodes.pair(HASHED)
    lengths = (1, 64, 65, 5 * CHUNK + 3)
    answers = await asyncio.gather(*(ask(pair.decode, prompt_of(length), 8) for length in lengths))
    assert {answer.placement for answer in answers} == {f"remote;peer={pair.prefill.address}"}
    assert (await pair.decode.counters())["kv_checksum_failures_total"] == 0
    await pair.settle()


async def test_bytes_that_changed_after_they_were_announced_are_found_and_never_decoded_from(
    nodes: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    pair = await nodes.pair(HASHED)
    pair.network.hang(pair.prefill.name)
    asking = asyncio.create_task(ask(pair.decode, PROMPT, 8))
    announced = (await pair.journal.count(Told, 4, kind=ChunkAnnounced))[2].message
    assert isinstance(announced, ChunkAnnounced)
    pair.prefill.inside.storage.slab[announced.blocks[1], 17] ^= 0x40
    pair.network.heal(pair.prefill.name)
    answer = await asking
    assert answer.token_ids == answer_to(PROMPT, 8)
    assert answer.placement == "local;reason=transfer_failed"
    assert not pair.journal.of(Told, kind=PullCommitted)
    assert (await pair.decode.counters())["kv_checksum_failures_total"] == 1
    assert f"block {announced.blocks[1]} of life-of-{pair.prefill.name}/0" in caplog.text
    await pair.settle()


async def test_a_decode_node_that_compares_refuses_a_peer_that_does_not_hash(nodes: Cluster) -> None:
    prefill = await nodes.start_prefill()
    decode = await nodes.start(
        Role.DECODE, HASHED, prefill_peers=(prefill.address,), decode_fallback=DecodeFallback.FAIL
    )
    message = ""
    async with asyncio.timeout(20):
        while "kv_checksum" not in message:
            with pytest.raises(PdserveError) as caught:
                await ask(decode, PROMPT)
            message = caught.value.message
    assert "kv_checksum: True here, False there" in message
    await settle(prefill, decode)


async def test_a_decode_node_that_does_not_compare_uses_a_peer_that_hashes(nodes: Cluster) -> None:
    pair = await nodes.pair(HASHED, Size())
    await until_ready(pair.decode)
    assert (await ask(pair.decode, PROMPT, 8)).placement == f"remote;peer={pair.prefill.address}"
    await pair.settle()
