"""Policies and tiers behind real fronts: what callers get, where decode nodes compute prompts, and what loads tell."""

from __future__ import annotations

import asyncio

from pdserve.config import CadenceSettings, Role, ServerArgs
from pdserve.scheduler.config import CadenceLimits
from tests.roles.cluster import Cluster, Node, answer_to, ask, prompt_of, settle, until
from tests.roles.inside import BLOCK_SIZE, CHUNK, Computed, Held, Size

A, N = 4, 16
# Six answers of up to five blocks each do not fit.
SHORT_OF_BLOCKS = Size(num_blocks=12, num_slots=6, num_host_blocks=64, answer_headroom=0)


def default_cadence(role: Role) -> CadenceLimits:
    """What a node of this kind runs with when nobody says anything."""
    settings = ServerArgs(model="fake", role=role).cadence
    assert settings == CadenceSettings(prefill_rounds=1, decode_rounds=4, hold_budget=None)
    return CadenceLimits(settings.prefill_rounds, settings.decode_rounds, settings.hold_budget)


async def ask_all(node: Node, num_answers: int, num_tokens: int) -> None:
    prompts = [prompt_of(80 + 25 * number, number) for number in range(num_answers)]
    answers = await asyncio.gather(*(ask(node, prompt, num_tokens) for prompt in prompts))
    assert [answer.token_ids for answer in answers] == [answer_to(prompt, num_tokens) for prompt in prompts]


def shape(nodes: Cluster, node: Node) -> str:
    """One letter a forward: P with prefill, d without."""
    return "".join("P" if done.plan.prefill else "d" for done in nodes.journal.of(Computed, node=node.name))


async def test_prompts_computed_in_a_peers_place_leave_four_decode_rounds_to_streams(nodes: Cluster) -> None:
    decode = await nodes.start(Role.DECODE, Size(cadence=default_cadence(Role.DECODE)))
    decode.runner.hold(lambda plan: bool(plan.decode))
    stream = asyncio.create_task(ask(decode, [1, 2, 3], 60))
    await nodes.journal.first(Held, node=decode.name)
    prompt = asyncio.create_task(ask(decode, prompt_of(5 * CHUNK)))
    await until(lambda: decode.rank.num_live == 2)
    decode.runner.release()
    answers = await asyncio.gather(stream, prompt)
    assert {answer.placement for answer in answers} == {"local;reason=no_peer"}
    assert "PddddPddddPddddPddddP" in shape(nodes, decode)
    await settle(decode)


async def test_a_gated_node_answers_the_same_and_its_windows_are_in_its_load(nodes: Cluster) -> None:
    fused = await nodes.start(Role.FUSED, Size(gate=(A, N, None)))
    await ask_all(fused, num_answers=8, num_tokens=40)
    counters = await fused.counters()
    assert counters["gate_windows_idle"] > 0
    assert 1 <= counters["gate_worst_wait_rounds"] <= N + 1
    await settle(fused)


async def test_a_fused_node_short_of_blocks_answers_the_same_and_counts_what_it_moved(nodes: Cluster) -> None:
    fused = await nodes.start(Role.FUSED, SHORT_OF_BLOCKS)
    await ask_all(fused, num_answers=6, num_tokens=150)
    await settle(fused)
    counters = await fused.counters()
    assert counters["retractions"] == counters["restores"] > 0
    assert counters["host:image_blocks"] > 0
    assert counters["host:loaded_blocks"] > 0
    assert counters["prompt_tokens_computed"] == sum(80 + 25 * number for number in range(6))


async def test_a_decode_node_short_of_blocks_moves_answers_whose_prompts_its_peer_computed(nodes: Cluster) -> None:
    pair = await nodes.pair(Size(), decode_size=SHORT_OF_BLOCKS)
    await ask_all(pair.decode, num_answers=6, num_tokens=150)
    await pair.settle()
    counters = await pair.decode.counters()
    assert counters["retractions"] == counters["restores"] > 0
    assert (counters["prompt_tokens_computed"], counters["decode_fallback_total"]) == (0, 0)


async def test_prefixes_in_host_memory_are_not_moved_again_by_either_node(nodes: Cluster) -> None:
    """The prefill node finds its own, the decode node asks only for what it lacks."""
    small = Size(num_blocks=8, num_host_blocks=32, answer_headroom=0)
    pair = await nodes.pair(small)
    first = prompt_of(5 * BLOCK_SIZE + 1)
    await ask(pair.decode, first)
    await pair.settle()
    for number in range(3):  # drives it out of both devices
        await ask(pair.decode, prompt_of(6 * BLOCK_SIZE, number + 1))
        await pair.settle()
    before = [await node.counters() for node in (pair.prefill, pair.decode)]
    answer = await ask(pair.decode, first)
    assert answer.usage.num_cached_tokens == 5 * BLOCK_SIZE
    await pair.settle()
    after = [await node.counters() for node in (pair.prefill, pair.decode)]
    hits = [now["host_hit_tokens"] - then["host_hit_tokens"] for now, then in zip(after, before, strict=True)]
    assert hits == [5 * BLOCK_SIZE, 5 * BLOCK_SIZE]
    assert after[0]["prompt_tokens_computed"] - before[0]["prompt_tokens_computed"] == 1
