"""Shards of a layout, and what keeps two nodes from being paired."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from pdserve.errors import StartupError
from pdserve.kv.layout import Fingerprint, KVLayout

LAYOUT = KVLayout(num_layers=3, num_kv_heads=4, head_dim=8, block_size=16)
MINE = Fingerprint(1, "LlamaForCausalLM", "r0", "float32", 16, 3, 4, 8, 288, tensor_parallel_size=2)


@pytest.mark.parametrize(("size", "heads"), [(1, 4), (2, 2), (4, 1), (8, 1)])
def test_heads_are_split_over_ranks_and_never_below_one(size: int, heads: int) -> None:
    shard = LAYOUT.shard(size)
    assert shard == replace(LAYOUT, num_kv_heads=heads)
    assert shard.block_bytes * 4 == LAYOUT.block_bytes * heads


@pytest.mark.parametrize("size", [0, -2, 3, 6])
def test_a_size_that_does_not_divide_the_heads_is_refused_with_a_remedy(size: int) -> None:
    with pytest.raises(StartupError) as raised:
        LAYOUT.shard(size)
    assert raised.value.message == (
        f"tensor_parallel_size is {size}, the model has 4 KV heads: choose a divisor or a multiple of 4"
    )


OTHERS: dict[str, object] = {
    "layout_version": 2,
    "architecture": "Qwen3ForCausalLM",
    "model_revision": "r1",
    "dtype": "bfloat16",
    "block_size": 32,
    "num_layers": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "vocab_size": 290,
}


@pytest.mark.parametrize("name", [f.name for f in fields(Fingerprint) if f.name != "tensor_parallel_size"])
@pytest.mark.parametrize("size", [2, 4])
def test_every_field_that_differs_is_named_with_both_values_whatever_the_split(name: str, size: int) -> None:
    other = replace(MINE, **{name: OTHERS[name], "tensor_parallel_size": size})
    assert MINE.differences(other) == (f"{name}: {getattr(MINE, name)!r} here, {OTHERS[name]!r} there",)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_another_split_of_the_same_heads_is_no_difference(size: int) -> None:
    other = replace(MINE, tensor_parallel_size=size)
    assert MINE.differences(other) == other.differences(MINE) == ()


@pytest.mark.parametrize("size", [0, -1, 3])
def test_a_split_that_cannot_be_is_a_difference_from_either_side(size: int) -> None:
    other = replace(MINE, tensor_parallel_size=size)
    why = "4 KV heads are not split so"
    assert MINE.differences(other) == (f"tensor_parallel_size: 2 here, {size} there: {why}",)
    assert other.differences(MINE) == (f"tensor_parallel_size: {size} here, 2 there: {why}",)
