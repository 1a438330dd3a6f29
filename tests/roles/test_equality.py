"""Fused, and prefill with decode, give the same tokens; and the facts that say a prompt was prefilled by the peer."""

from __future__ import annotations

import asyncio

import pytest

from pdserve.config import Role
from pdserve.engine.messages import ChunkAnnounced, PullCommitted
from pdserve.request import FinishReason
from pdserve.transfer.base import ReadDone
from tests.roles.cluster import Cluster, Pair, Told, answer_to, ask, prompt_of, settle
from tests.roles.inside import BLOCK_SIZE, CHUNK, LAYOUT, Held, Seen, Started

LENGTHS = (1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, CHUNK, CHUNK + 1, 5 * CHUNK + 3)
SAMPLED = {"greedy": {"temperature": 0.0}, "seeded": {"temperature": 0.9, "seed": 7}}


@pytest.mark.parametrize("options", SAMPLED.values(), ids=SAMPLED)
async def test_fused_and_a_pair_give_the_tokens_that_the_prompt_alone_decides(
    nodes: Cluster, pair: Pair, options: dict[str, float]
) -> None:
    fused = await nodes.start(Role.FUSED)
    for length in LENGTHS:
        prompt = prompt_of(length)
        answers = [await ask(node, prompt, 8, **options) for node in (fused, pair.decode)]
        assert [answer.token_ids for answer in answers] == [answer_to(prompt, 8)] * 2
        assert [answer.finish for answer in answers] == [FinishReason.LENGTH] * 2
        placements = [answer.placement for answer in answers]
        assert placements == ["local;reason=fused", f"remote;peer={pair.prefill.address}"]
    await settle(fused, pair.prefill, pair.decode)


async def test_many_prompts_at_once_are_all_prefilled_by_the_peer_and_every_block_crosses_once(pair: Pair) -> None:
    lengths = [1 + 37 * number for number in range(16)]
    prompts = [prompt_of(length, seed) for seed, length in enumerate(lengths)]
    await asyncio.gather(*(ask(pair.decode, prompt, 5) for prompt in prompts))
    await pair.settle()
    counters = await pair.decode.counters()
    num_blocks = sum(LAYOUT.num_blocks_for(length) for length in lengths)
    assert counters["remote_prefills_total"] == len(prompts)
    assert counters["decode_fallback_total"] == 0
    assert counters["prompt_tokens_computed"] == 0
    assert counters["kv_transfers_total"] == len(prompts)
    assert counters["kv_descriptors_total"] == num_blocks
    assert counters["kv_bytes_total"] == num_blocks * LAYOUT.block_bytes
    assert (await pair.prefill.counters())["prompt_tokens_computed"] == sum(lengths)


async def test_the_peer_draws_the_first_token_with_the_parameters_the_rest_is_drawn_with(pair: Pair) -> None:
    await ask(pair.decode, prompt_of(70), 3, temperature=0.8, seed=11, top_k=5, logit_bias={3: -1.0}, ignore_eos=True)
    (at_peer,) = pair.journal.of(Started, node=pair.prefill.name)
    (here,) = pair.journal.of(Started, node=pair.decode.name)
    assert at_peer.request.sampling == here.request.sampling
    assert here.request.sampling.seed == 11
    assert here.start.forced_output == answer_to(prompt_of(70), 1), "the rest is drawn from position 1 on"


async def test_the_first_token_is_streamed_before_the_kv_arrives(pair: Pair) -> None:
    pair.network.hang(pair.prefill.name)
    prompt = prompt_of(200)
    async with pair.decode.client.stream(token_ids=prompt, max_new_tokens=4) as stream:
        first = await anext(stream)
        assert first.token_ids == answer_to(prompt, 1)
        assert not pair.journal.of(Told, kind=PullCommitted)
        pair.network.heal(pair.prefill.name)
        rest = [token async for piece in stream for token in piece.token_ids]
    assert first.token_ids + tuple(rest) == answer_to(prompt, 4)
    await pair.settle()


async def test_a_chunk_is_read_while_the_next_ones_are_computed(pair: Pair) -> None:
    pair.prefill.runner.hold(lambda plan: any(row.start >= 2 * CHUNK for row in plan.prefill))
    asking = asyncio.create_task(ask(pair.decode, prompt_of(3 * CHUNK)))
    await pair.journal.first(Held)
    await pair.journal.first(Seen, node=pair.decode.name, kind=ReadDone)
    pair.prefill.runner.release()
    await asking
    told = [e.kind for e in pair.journal.events if isinstance(e, Told | Seen) and e.kind in (ChunkAnnounced, ReadDone)]
    last_chunk = len(told) - 1 - told[::-1].index(ChunkAnnounced)
    assert told.count(ChunkAnnounced) == 3
    assert told.index(ReadDone) < last_chunk


async def test_a_shared_prefix_is_neither_computed_nor_moved_again(pair: Pair) -> None:
    shared = prompt_of(2 * CHUNK)
    await ask(pair.decode, [*shared, *prompt_of(20, seed=1)])
    before = await pair.decode.counters(), await pair.prefill.counters()
    answer = await ask(pair.decode, [*shared, *prompt_of(50, seed=2)])
    after = await pair.decode.counters(), await pair.prefill.counters()
    assert answer.usage.num_cached_tokens == len(shared)
    assert after[0]["kv_descriptors_total"] - before[0]["kv_descriptors_total"] == 1
    assert after[1]["prompt_tokens_computed"] - before[1]["prompt_tokens_computed"] == 50
    assert after[0]["prompt_tokens_computed"] == 0
    await pair.settle()


async def test_a_prefix_that_only_the_decode_node_has_is_computed_by_the_peer_and_not_moved(nodes: Cluster) -> None:
    first = await nodes.pair()
    shared = prompt_of(CHUNK)
    await ask(first.decode, [*shared, 1])
    await first.prefill.die()
    again = await nodes.start(Role.PREFILL, port=first.prefill.args.port)
    await nodes.until_connected(first.decode, again)
    before = await first.decode.counters()
    answer = await ask(first.decode, [*shared, *prompt_of(30, seed=3)])
    after = await first.decode.counters()
    assert answer.placement == f"remote;peer={again.address}"
    assert after["kv_descriptors_total"] - before["kv_descriptors_total"] == 1
    assert (await again.counters())["prompt_tokens_computed"] == CHUNK + 30
    await settle(first.decode, again)


async def test_a_prefix_that_only_the_peer_has_is_moved_and_not_computed(nodes: Cluster) -> None:
    pair = await nodes.pair()
    other = await nodes.decode_of(pair.prefill.address)
    shared = prompt_of(CHUNK)
    await ask(pair.decode, [*shared, 1])
    await ask(other, [*shared, *prompt_of(30, seed=3)])
    assert (await pair.prefill.counters())["prompt_tokens_computed"] == CHUNK + 1 + 30
    assert (await other.counters())["kv_descriptors_total"] == LAYOUT.num_blocks_for(CHUNK + 30)
    await settle(pair.prefill, pair.decode, other)


async def test_prompt_log_probabilities_are_the_same_from_every_kind_of_node(nodes: Cluster, pair: Pair) -> None:
    fused = await nodes.start(Role.FUSED)
    prompt = prompt_of(2 * CHUNK + 5)
    answers = [
        await ask(node, prompt, 4, prompt_logprobs=1, logprobs=True, top_logprobs=2) for node in (fused, pair.decode)
    ]
    assert answers[0].logprobs == answers[1].logprobs
    assert answers[0].prompt_logprobs == answers[1].prompt_logprobs
    assert len(answers[0].prompt_logprobs or ()) == len(prompt) - 1
