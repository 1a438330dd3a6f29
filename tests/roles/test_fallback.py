"""No peer, a peer that does not match, a transfer that fails after the first token: where answers go on, and how."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, replace

import pytest

from pdserve.client.types import Answer
from pdserve.config import DecodeFallback, Role
from pdserve.errors import PdserveError, PeerError, PeerMismatch
from pdserve.request import FinishReason
from pdserve.rpc.handoff import FirstToken, Released, ToDecode
from tests.roles.cluster import Cluster, Node, answer_to, ask, prompt_of, settle, until_ready
from tests.roles.inside import CHUNK, Size, Started
from tests.roles.journal import LIMIT_S
from tests.roles.relay import Passed, ToDecodeChange, relay_to

PROMPT = prompt_of(2 * CHUNK + 10)
NOBODY = "127.0.0.1:9"


async def test_without_peers_the_decode_node_prefills_and_says_so(nodes: Cluster) -> None:
    decode = await nodes.start(Role.DECODE)
    answer = await ask(decode, PROMPT)
    assert answer.placement == "local;reason=no_peer"
    counters = await decode.counters()
    assert counters["decode_fallback_total"] == counters["decode_fallback_total:no_peer"] == 1
    assert counters["prompt_tokens_computed"] == len(PROMPT)
    await settle(decode)


@pytest.mark.parametrize(
    ("peers", "message"),
    [((), "no prefill node is configured: set --prefill-peers"), ((NOBODY,), f"can be reached: {NOBODY}: ")],
)
async def test_under_policy_fail_nothing_is_prefilled_here(
    nodes: Cluster, peers: tuple[str, ...], message: str
) -> None:
    decode = await nodes.start(Role.DECODE, prefill_peers=peers, decode_fallback=DecodeFallback.FAIL)
    error = await error_of(decode)
    assert (type(error), error.status) == (PeerError, "UNAVAILABLE")
    assert message in error.message
    assert (await decode.counters())["prompt_tokens_computed"] == 0
    await settle(decode)


async def test_short_prompts_stay_here_on_purpose(nodes: Cluster) -> None:
    pair = await nodes.pair(remote_prefill_min_tokens=100)
    assert (await ask(pair.decode, prompt_of(99))).placement == "local;reason=short_prompt"
    assert (await ask(pair.decode, prompt_of(100))).placement == f"remote;peer={pair.prefill.address}"
    counters = await pair.decode.counters()
    assert (counters["local_prefills_total"], counters["decode_fallback_total"]) == (1, 0)
    await pair.settle()


async def test_a_peer_with_another_model_is_never_asked(nodes: Cluster) -> None:
    prefill = await nodes.start_prefill(Size(model_revision="r1"))
    decode = await nodes.start(Role.DECODE, prefill_peers=(prefill.address,))
    async with asyncio.timeout(LIMIT_S):
        while (await ask(decode, PROMPT)).placement == "local;reason=no_peer":
            pass  # it has not looked yet
    assert (await ask(decode, PROMPT)).placement == "local;reason=peer_mismatch"
    assert (await decode.counters())["decode_fallback_total:peer_mismatch"] == 2
    assert (await prefill.counters())["prompt_tokens_computed"] == 0


async def test_a_mismatch_under_policy_fail_names_the_field_and_both_values(nodes: Cluster) -> None:
    prefill = await nodes.start_prefill(Size(model_revision="r1"))
    policy = DecodeFallback.FAIL
    decode = await nodes.start(Role.DECODE, prefill_peers=(prefill.address,), decode_fallback=policy)
    async with asyncio.timeout(LIMIT_S):
        while "not connected yet" in (error := await error_of(decode)).message:
            pass
    assert isinstance(error, PeerMismatch)
    assert f"{prefill.address}: model_revision: 'r0' here, 'r1' there" in error.message


async def test_a_prompt_too_long_for_every_peer_is_prefilled_here(nodes: Cluster) -> None:
    pair = await nodes.pair(Size(max_model_len=256), Size(), decode_fallback=DecodeFallback.FUSED)
    assert (await ask(pair.decode, prompt_of(300))).placement == "local;reason=no_peer"
    assert (await ask(pair.decode, prompt_of(200))).placement == f"remote;peer={pair.prefill.address}"
    await pair.settle()


async def test_under_policy_fail_a_prompt_too_long_for_every_peer_is_told_the_limit(nodes: Cluster) -> None:
    pair = await nodes.pair(Size(max_model_len=256), Size(), decode_fallback=DecodeFallback.FAIL)
    error = await error_of(pair.decode, prompt_of(300))
    assert f"{pair.prefill.address}: prompt has 300 tokens, its limit is 256" in error.message


# ---------------------------------------------------------------- after the first token

STOP = "".join(map(chr, answer_to(PROMPT, 8)[3:5]))
ACROSS = "".join(map(chr, answer_to(PROMPT, 2)))
OPTIONS: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.8, "seed": 5},
    "no seed": {"temperature": 0.8},
    "penalties": {"temperature": 0.0, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    "logprobs": {"temperature": 0.0, "logprobs": True, "top_logprobs": 2, "prompt_logprobs": 1},
    "a stop string": {"temperature": 0.0, "stop": [STOP]},
    "a stop string across the first two tokens": {"temperature": 0.0, "stop": [ACROSS]},
    "a stop token": {"temperature": 0.0, "stop_token_ids": [answer_to(PROMPT, 3)[2]]},
    "a stop token that the minimum forbids": {
        "temperature": 0.0,
        "stop_token_ids": answer_to(PROMPT, 1),
        "min_new_tokens": 3,
    },
    "three samples": {"temperature": 0.8, "seed": 5},
}


def refuse(said: ToDecode) -> list[Passed]:
    return [Released(False)] if isinstance(said, Released) else [said]


async def samples(node: Node, num_samples: int, options: dict[str, object]) -> list[dict[str, object]]:
    """The samples without what differs by node: their id, and where the prompt was prefilled."""
    answers = await node.client.generate_samples(
        token_ids=PROMPT, max_new_tokens=8, num_samples=num_samples, timeout_s=LIMIT_S, **options
    )
    return [told(answer) for answer in sorted(answers, key=lambda answer: answer.index)]


def told(answer: Answer) -> dict[str, object]:
    return {name: value for name, value in asdict(answer).items() if name not in ("request_id", "placement", "usage")}


@pytest.mark.parametrize("name", OPTIONS)
async def test_a_transfer_that_fails_after_the_first_token_changes_nothing_that_is_said(
    nodes: Cluster, name: str
) -> None:
    num_samples = 3 if name == "three samples" else 1
    fused = await nodes.start(Role.FUSED)
    prefill = await nodes.start_prefill()
    async with relay_to(prefill, nodes.journal) as relay:
        relay.change = refuse
        decode = await nodes.decode_of(relay.address)
        undisturbed = await samples(fused, num_samples, OPTIONS[name])
        assert await samples(decode, num_samples, OPTIONS[name]) == undisturbed
        counters = await decode.counters()
        assert counters["decode_fallback_total:transfer_failed"] >= 1
        await settle(fused, prefill, decode)
        await decode.stop()


async def test_the_token_that_was_streamed_is_forced_and_the_rest_drawn_with_the_same_seed(nodes: Cluster) -> None:
    prefill = await nodes.start_prefill()
    async with relay_to(prefill, nodes.journal) as relay:
        relay.change = refuse
        decode = await nodes.decode_of(relay.address)
        await ask(decode, PROMPT, temperature=0.9)
        (at_peer,) = nodes.journal.of(Started, node=prefill.name)
        (here,) = nodes.journal.of(Started, node=decode.name)
        assert here.start.forced_output == answer_to(PROMPT, 1)
        assert here.request.prompt == tuple(PROMPT)
        assert here.request.sampling == at_peer.request.sampling
        await decode.stop()


async def test_policy_fail_ends_a_stream_that_has_begun_with_unavailable(nodes: Cluster) -> None:
    prefill = await nodes.start_prefill()
    async with relay_to(prefill, nodes.journal) as relay:
        relay.change = refuse
        decode = await nodes.decode_of(relay.address, decode_fallback=DecodeFallback.FAIL)
        async with decode.client.stream(token_ids=PROMPT, max_new_tokens=8) as stream:
            assert (await anext(stream)).token_ids == answer_to(PROMPT, 1)
            with pytest.raises(PeerError, match="no longer vouches") as caught:
                await anext(stream)
        assert caught.value.status == "UNAVAILABLE"
        await settle(prefill, decode)
        await until_ready(decode)
        relay.change = lambda said: [said]
        await ask(decode, PROMPT)
        await decode.stop()


async def test_an_answer_that_the_decode_node_finds_complete_ends_whatever_its_peer_thinks(nodes: Cluster) -> None:
    """The peer does not know the stop token; the decode node does, and no other token follows."""
    prefill = await nodes.start_prefill()
    async with relay_to(prefill, nodes.journal) as relay:
        decode = await nodes.decode_of(relay.address)
        for refuses in (False, True):
            relay.change = forgets_the_end(refuses)
            answer = await ask(decode, PROMPT, stop_token_ids=answer_to(PROMPT, 1))
            assert (answer.finish, answer.token_ids) == (FinishReason.STOP, answer_to(PROMPT, 1))
            await settle(prefill, decode)
            await until_ready(decode)
        await decode.stop()


def forgets_the_end(refuses: bool) -> ToDecodeChange:
    def change(said: ToDecode) -> list[Passed]:
        if isinstance(said, FirstToken):
            return [replace(said, finish=None, matched_stop_token=None)]
        return refuse(said) if refuses else [said]

    return change


async def error_of(node: Node, prompt: list[int] = PROMPT) -> PdserveError:
    with pytest.raises(PdserveError) as caught:
        await ask(node, prompt)
    return caught.value
