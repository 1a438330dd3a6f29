"""The same greedy tokens from transformers, from a fused node, and from a prefill with a decode node."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from pdserve.config import Role
from tests.system.conftest import NUM_BYTES, Greedy, Pair
from tests.system.nodes import BLOCK_SIZE, CHUNK, Node, Nodes

pytestmark = pytest.mark.system

NUM_NEW = 12
# One token, a part of a block, whole blocks, one chunk and a token more, and several chunks.
LENGTHS = (1, BLOCK_SIZE - 1, 2 * BLOCK_SIZE, CHUNK + 1, 5 * CHUNK + 3)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [Random(f"{seed} {length}").randrange(NUM_BYTES) for _ in range(length)]


@pytest.mark.parametrize("length", LENGTHS)
def test_a_fused_node_answers_as_transformers_does(fused: Node, tiny_greedy: Greedy, length: int) -> None:
    prompt = prompt_of(length)
    assert fused.ask(prompt, NUM_NEW).token_ids == tiny_greedy(prompt, NUM_NEW)


@pytest.mark.parametrize("length", LENGTHS)
def test_a_pair_answers_as_transformers_does_and_every_byte_of_kv_crosses_once(
    pair: Pair, tiny_greedy: Greedy, length: int
) -> None:
    prefill, decode = pair
    prompt = prompt_of(length)
    before = decode.load().counters
    answer = decode.ask(prompt, NUM_NEW)
    assert answer.token_ids == tiny_greedy(prompt, NUM_NEW)
    assert answer.placement == f"remote;peer={prefill.address}"
    decode.wait_until_quiet()
    prefill.wait_until_quiet()
    after = decode.load().counters
    moved = {name: after[name] - before.get(name, 0) for name in after}
    num_blocks = -(-length // BLOCK_SIZE)
    assert moved["remote_prefills_total"] == 1
    assert moved["decode_fallback_total"] == 0
    assert moved["prompt_tokens_computed"] == 0
    assert moved["kv_descriptors_total"] == num_blocks
    assert moved["kv_bytes_total"] == num_blocks * block_bytes()


def block_bytes() -> int:
    """Keys and values of 3 layers, 2 heads, 16 numbers of 4 bytes, a token."""
    return 2 * 3 * 2 * 16 * 4 * BLOCK_SIZE


def test_a_second_prompt_with_the_same_beginning_moves_only_what_the_decode_node_lacks(
    pair: Pair, tiny_greedy: Greedy
) -> None:
    _, decode = pair
    first = prompt_of(3 * CHUNK, seed=1)
    second = first[: 2 * CHUNK] + prompt_of(CHUNK + 5, seed=2)
    assert decode.ask(first, NUM_NEW).token_ids == tiny_greedy(first, NUM_NEW)
    decode.wait_until_quiet()
    before = decode.load().counters
    answer = decode.ask(second, NUM_NEW)
    assert answer.token_ids == tiny_greedy(second, NUM_NEW)
    assert answer.usage.num_cached_tokens == 2 * CHUNK
    decode.wait_until_quiet()
    moved = decode.load().counters["kv_descriptors_total"] - before["kv_descriptors_total"]
    assert moved == -(-(CHUNK + 5) // BLOCK_SIZE)


def test_a_quantised_pair_answers_as_a_quantised_fused_node_does(nodes: Nodes) -> None:
    settings: dict[str, Any] = {"quantization": "int4"}
    prefill, decode = nodes.start_pair(**settings)
    whole = nodes.start(Role.FUSED, **settings)
    for length in (1, CHUNK + 5, 3 * CHUNK):
        prompt = prompt_of(length)
        answer = decode.ask(prompt, NUM_NEW)
        assert answer.token_ids == whole.ask(prompt, NUM_NEW).token_ids
        assert answer.placement == f"remote;peer={prefill.address}"
