"""Ranks of several processes: a handoff is that of all of them, however late or wrong one of them is."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from tests.roles.cluster import Cluster, Node, answer_to, ask, prompt_of
from tests.roles.inside import BLOCK_SIZE, CHUNK, Size

PROMPT = prompt_of(3 * CHUNK + 10)
NUM_BLOCKS = 7
SPLITS = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 2), (2, 4)]


@pytest.mark.parametrize(("prefill_parts", "decode_parts"), SPLITS)
async def test_answers_are_those_of_single_processes_however_both_nodes_are_split(
    nodes: Cluster, prefill_parts: int, decode_parts: int
) -> None:
    pair = await nodes.pair(Size(num_parts=prefill_parts), Size(num_parts=decode_parts))
    prompts = [PROMPT, *(prompt_of(length, length) for length in (1, 63, 64, 200))]
    answers = await asyncio.gather(*(ask(pair.decode, prompt, 12) for prompt in prompts))
    assert {answer.placement for answer in answers} == {f"remote;peer={pair.prefill.address}"}
    again = await ask(pair.decode, PROMPT)
    assert again.usage.num_cached_tokens == (NUM_BLOCKS - 1) * BLOCK_SIZE
    await pair.settle()


async def test_each_data_parallel_rank_hands_off_to_each_other_one_part_by_part(nodes: Cluster) -> None:
    size = Size(num_ranks=2, num_parts=2)
    pair = await nodes.pair(size, size)
    asking = [ask(pair.decode, prompt_of(200, number), data_parallel_rank=number % 2) for number in range(16)]
    answers = await asyncio.gather(*asking)
    assert {answer.placement for answer in answers} == {f"remote;peer={pair.prefill.address}"}
    assert [load.counters["output_tokens"] > 0 for load in await pair.decode.loads()] == [True, True]
    assert [load.counters["prompt_tokens_computed"] > 0 for load in await pair.prefill.loads()] == [True, True]
    await pair.settle()


# ---------------------------------------------------------------- late


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("late_prefill", "late_decode"), [(True, False), (False, True), (True, True)])
async def test_a_part_that_runs_late_delays_and_changes_nothing(
    nodes: Cluster, late_prefill: bool, late_decode: bool, seed: int
) -> None:
    pair = await nodes.pair(
        Size(num_parts=2, lag_seed=seed if late_prefill else None),
        Size(num_parts=2, lag_seed=seed if late_decode else None),
    )
    chance = Random(seed)
    asking = [ask(pair.decode, prompt_of(chance.randrange(1, 300), n), chance.randrange(1, 20)) for n in range(12)]
    answers = await asyncio.gather(*asking)
    assert {answer.placement for answer in answers} == {f"remote;peer={pair.prefill.address}"}
    await pair.settle()


@pytest.mark.parametrize("seed", range(3))
async def test_parts_that_run_late_under_faults_and_clients_that_leave_keep_nothing(nodes: Cluster, seed: int) -> None:
    size = Size(num_blocks=24, num_slots=4, quarantine_s=0.2, connect_timeout_s=0.2, num_parts=2, lag_seed=seed)
    pair = await nodes.pair(size, transfer_timeout_s=0.2)
    chance = Random(seed)
    names = [part.name for part in pair.prefill.insides[0].parts]
    faults = [
        lambda name: pair.network.fail_late(name, num_polls=chance.randrange(1, 30)),
        lambda name: pair.network.slow(name, num_polls=chance.randrange(30)),
        pair.network.hang,
        pair.network.heal,
    ]
    gate = asyncio.Semaphore(6)

    async def one(number: int) -> None:
        async with gate:
            chance.choice(faults)(chance.choice(names))
            await leave_after(
                pair.decode, chance.choice([None, None, 0, 1, 5]), prompt_of(chance.randrange(300), number)
            )

    await asyncio.gather(*(one(number) for number in range(24)))
    for name in names:
        pair.network.heal(name)
    await pair.settle()


async def leave_after(node: Node, num_pieces: int | None, prompt: list[int]) -> None:
    """Ask for 12 tokens; None: and stay for all of them."""
    prompt = prompt or [0]
    tokens: tuple[int, ...] = ()
    async with node.client.stream(token_ids=prompt, max_new_tokens=12) as stream:
        while num_pieces is None or num_pieces > 0:
            piece = await anext(stream, None)
            if piece is None:
                break
            tokens += piece.token_ids
            num_pieces = num_pieces if num_pieces is None else num_pieces - 1
    assert tokens == answer_to(prompt, len(tokens))
    assert num_pieces is not None or len(tokens) == 12
