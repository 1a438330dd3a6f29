"""Random faults under load: whatever is answered is right, whoever stays is answered, and nothing is left behind."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from pdserve.client.aio import AsyncStream
from pdserve.transfer.loopback import LoopbackNetwork
from tests.roles.cluster import Cluster, Node, answer_to, prompt_of, settle
from tests.roles.inside import Size
from tests.roles.journal import LIMIT_S

NUM_REQUESTS = 40
AT_ONCE = 8


def disturb(chance: Random, network: LoopbackNetwork, name: str) -> None:
    match chance.randrange(4):
        case 0:
            network.fail_late(name, num_polls=chance.randrange(1, 30))
        case 1:
            network.slow(name, num_polls=chance.randrange(30))
        case 2:
            network.hang(name)
        case _:
            network.heal(name)


async def one(node: Node, chance: Random, shared: list[int], number: int) -> None:
    """Asks, and leaves after a few tokens where chance says so."""
    prompt = shared[: chance.choice([0, 64, 128])] + prompt_of(chance.randrange(1, 300), number)
    leaves_after = chance.choice([None, None, None, 0, 1, 5])
    num_tokens = chance.randrange(1, 30)
    stream = node.client.stream(token_ids=prompt, max_new_tokens=num_tokens, timeout_s=LIMIT_S)
    tokens = await told(stream, leaves_after)
    assert tokens == answer_to(prompt, len(tokens))
    assert leaves_after is not None or len(tokens) == num_tokens


async def told(stream: AsyncStream, leaves_after: int | None) -> tuple[int, ...]:
    tokens: tuple[int, ...] = ()
    async with stream:
        if leaves_after == 0:
            return tokens
        async for piece in stream:
            tokens += piece.token_ids
            if leaves_after is not None and len(tokens) >= leaves_after:
                return tokens
    return tokens


@pytest.mark.parametrize("seed", range(4))
async def test_under_random_faults_every_answer_is_right_and_every_block_comes_back(nodes: Cluster, seed: int) -> None:
    chance = Random(seed)
    size = Size(num_blocks=24, num_slots=4, quarantine_s=0.2, connect_timeout_s=0.2)
    pair = await nodes.pair(size, transfer_timeout_s=0.2)
    prefill = pair.prefill
    shared = prompt_of(128, seed)
    gate = asyncio.Semaphore(AT_ONCE)

    async def in_turn(number: int) -> None:
        nonlocal prefill
        async with gate:
            disturb(chance, pair.network, prefill.name)
            if number == NUM_REQUESTS // 2:
                dead, prefill = prefill, await restarted(nodes, prefill)
                assert dead.is_stopped
            await one(pair.decode, chance, shared, number)

    await asyncio.gather(*(in_turn(number) for number in range(NUM_REQUESTS)))
    pair.network.heal(prefill.name)
    await settle(prefill, pair.decode)


async def restarted(nodes: Cluster, prefill: Node) -> Node:
    await prefill.die()
    return await nodes.start_prefill(prefill.inside.size, port=prefill.args.port)
