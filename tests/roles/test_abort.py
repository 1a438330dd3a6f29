"""Whenever a request is aborted, and whoever does it: both nodes forget it, and others never notice."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import pytest

from pdserve.client.aio import AsyncStream
from pdserve.engine.messages import ChunkAnnounced, LeaseOpened
from pdserve.errors import RequestIdInUse
from pdserve.request import FinishReason
from pdserve.transfer.base import ReadDone
from tests.roles.cluster import Cluster, Node, Pair, Told, answer_to, ask, prompt_of, until_load
from tests.roles.inside import BLOCK_SIZE, CHUNK, Held, Seen, Size

VICTIM = "victim"
PROMPT = prompt_of(3 * CHUNK + 10)


@dataclass
class Scene:
    """A request in a certain phase. go_on: lets everything else run on. others: requests that must not notice."""

    pair: Pair
    victim: AsyncStream
    go_on: Callable[[], None]
    others: tuple[asyncio.Task[Any], ...] = ()


def stream(node: Node, max_new_tokens: int = 8) -> AsyncStream:
    return node.client.stream(token_ids=PROMPT, max_new_tokens=max_new_tokens, request_id=VICTIM)


def in_background(coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    return asyncio.create_task(coroutine)


async def waiting_for_a_slot(nodes: Cluster) -> Scene:
    pair = await nodes.pair(decode_size=Size(num_slots=1))
    pair.network.hang(pair.prefill.name)
    other = in_background(ask(pair.decode, prompt_of(70)))
    await until_load(pair.decode, lambda load: load.num_open_transfers == 1)
    victim = stream(pair.decode)
    await until_load(pair.decode, lambda load: load.num_waiting == 1)
    return Scene(pair, victim, lambda: pair.network.heal(pair.prefill.name), (other,))


async def queued_at_the_peer(nodes: Cluster) -> Scene:
    pair = await nodes.pair(Size(num_blocks=8), Size())
    pair.network.hang(pair.prefill.name)
    other = in_background(ask(pair.decode, prompt_of(6 * BLOCK_SIZE)))
    await until_load(pair.prefill, lambda load: load.num_held_blocks == 6)
    victim = stream(pair.decode)
    await until_load(pair.prefill, lambda load: load.num_waiting == 1)
    return Scene(pair, victim, lambda: pair.network.heal(pair.prefill.name), (other,))


async def before_its_first_chunk(nodes: Cluster) -> Scene:
    pair = await nodes.pair()
    pair.prefill.runner.hold()
    victim = stream(pair.decode)
    await pair.journal.first(Held)
    await pair.journal.first(Told, kind=LeaseOpened)
    return Scene(pair, victim, pair.prefill.runner.release)


async def between_chunks(nodes: Cluster) -> Scene:
    pair = await nodes.pair()
    pair.prefill.runner.hold(lambda plan: any(row.start >= CHUNK for row in plan.prefill))
    victim = stream(pair.decode)
    await pair.journal.first(Held)
    await pair.journal.first(Seen, node=pair.decode.name, kind=ReadDone)
    return Scene(pair, victim, pair.prefill.runner.release)


async def in_mid_read(nodes: Cluster) -> Scene:
    pair = await nodes.pair()
    pair.network.hang(pair.prefill.name)
    pair.prefill.runner.hold(lambda plan: any(row.start >= CHUNK for row in plan.prefill))
    victim = stream(pair.decode)
    await pair.journal.first(Told, kind=ChunkAnnounced)
    await until_load(pair.decode, lambda load: load.counters["open_reads"] == 1)

    def go_on() -> None:
        pair.prefill.runner.release()
        pair.network.heal(pair.prefill.name)

    return Scene(pair, victim, go_on)


async def after_its_first_token(nodes: Cluster) -> Scene:
    pair = await nodes.pair()
    pair.network.hang(pair.prefill.name)
    victim = stream(pair.decode)
    assert (await anext(victim)).token_ids == answer_to(PROMPT, 1)
    return Scene(pair, victim, lambda: pair.network.heal(pair.prefill.name))


async def while_decoding(nodes: Cluster) -> Scene:
    pair = await nodes.pair()
    pair.decode.runner.hold(lambda plan: bool(plan.decode) and plan.decode[0].end > len(PROMPT) + 3)
    victim = stream(pair.decode)
    await pair.journal.first(Held)
    return Scene(pair, victim, pair.decode.runner.release)


PHASES: list[Callable[[Cluster], Awaitable[Scene]]] = [
    waiting_for_a_slot,
    queued_at_the_peer,
    before_its_first_chunk,
    between_chunks,
    in_mid_read,
    after_its_first_token,
    while_decoding,
]


@pytest.mark.parametrize("phase", PHASES)
async def test_a_client_that_leaves_takes_everything_of_its_request_along(
    nodes: Cluster, phase: Callable[[Cluster], Awaitable[Scene]]
) -> None:
    scene = await phase(nodes)
    scene.victim.close()
    scene.go_on()
    await asyncio.gather(*scene.others)
    await scene.pair.settle()
    await ask(scene.pair.decode, PROMPT)


@pytest.mark.parametrize("phase", PHASES)
async def test_an_abort_by_somebody_else_ends_the_answer_with_abort(
    nodes: Cluster, phase: Callable[[Cluster], Awaitable[Scene]]
) -> None:
    scene = await phase(nodes)
    assert await scene.pair.decode.client.abort(VICTIM)
    scene.go_on()
    pieces = [piece async for piece in scene.victim]
    assert pieces[-1].finish is FinishReason.ABORT
    await asyncio.gather(*scene.others)
    await scene.pair.settle()
    await ask(scene.pair.decode, PROMPT)


async def test_an_aborted_answer_ends_at_once_and_its_blocks_wait_for_the_read(nodes: Cluster) -> None:
    scene = await in_mid_read(nodes)
    decode = scene.pair.decode
    await decode.client.abort(VICTIM)
    assert [piece.finish async for piece in scene.victim] == [FinishReason.ABORT]
    load = await until_load(decode, lambda load: load.num_running == 0)
    assert load.num_quarantined_blocks == load.num_held_blocks == -(-len(PROMPT) // BLOCK_SIZE)
    scene.go_on()
    await scene.pair.settle()


async def test_an_id_may_be_used_again_as_soon_as_its_caller_left(pair: Pair) -> None:
    for _ in range(20):
        victim = stream(pair.decode, max_new_tokens=50)
        await anext(victim)
        victim.close()
        answer = await ask_as(VICTIM, pair.decode)
        assert (answer.finish, answer.token_ids) == (FinishReason.LENGTH, answer_to(PROMPT, 6))
        assert answer.placement == f"remote;peer={pair.prefill.address}"
    await pair.settle()


async def ask_as(request_id: str, node: Node) -> Any:
    """As soon as the node has seen that the one before is gone."""
    while True:
        try:
            return await ask(node, PROMPT, request_id=request_id)
        except RequestIdInUse:
            pass


@pytest.mark.parametrize("how", ["one_token", "stop_token"])
@pytest.mark.parametrize("is_read_first", [True, False])
async def test_an_answer_that_its_first_token_ends_needs_no_kv(pair: Pair, how: str, is_read_first: bool) -> None:
    (first,) = answer_to(PROMPT, 1)
    if not is_read_first:
        pair.network.hang(pair.prefill.name)
    options = {"num_tokens": 1} if how == "one_token" else {"num_tokens": 9, "stop_token_ids": [first]}
    answer = await ask(pair.decode, PROMPT, **options)
    assert answer.token_ids == (first,)
    assert answer.finish is (FinishReason.LENGTH if how == "one_token" else FinishReason.STOP)
    assert answer.matched_stop == (None if how == "one_token" else first)
    pair.network.heal(pair.prefill.name)
    await pair.settle()


async def test_an_aborted_request_of_many_is_the_only_one_that_ends(pair: Pair) -> None:
    prompts = [prompt_of(100 + number, number) for number in range(6)]
    others = [in_background(ask(pair.decode, prompt, 12)) for prompt in prompts]
    victim = stream(pair.decode, max_new_tokens=200)
    await anext(victim)
    await pair.decode.client.abort(VICTIM)
    assert [piece async for piece in victim][-1].finish is FinishReason.ABORT
    for prompt, other in zip(prompts, others, strict=True):
        assert (await other).token_ids == answer_to(prompt, 12)
    await pair.settle()
