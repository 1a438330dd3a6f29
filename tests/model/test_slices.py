"""Over how many ranks a model can be split, and what each gets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pdserve.errors import StartupError
from pdserve.model.experts_config import MIXTRAL, ExpertsConfig
from pdserve.model.model_config import DefaultRope, ModelConfig
from pdserve.model.shard import WHOLE, Shard
from pdserve.model.slices import check_dense_split, check_split, slices_of

SMOLLM2 = ModelConfig(
    architecture="LlamaForCausalLM",
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    vocab_size=49152,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    rope=DefaultRope(10000.0),
    has_tied_embeddings=True,
    bos_token_id=None,
    eos_token_ids=(),
)


@pytest.mark.parametrize(
    ("changes", "tp_size", "words"),
    [
        ({}, 2, ["9 attention heads", "choose 1 or 3"]),
        ({}, 9, ["MLPs of 1536", "choose 1 or 3"]),
        ({"num_heads": 12, "num_kv_heads": 4}, 3, ["4 KV heads", "choose 1 or 2 or 4 or 12"]),
        ({"intermediate_size": 1}, 3, ["MLPs of 1", "choose 1"]),
    ],
)
def test_a_size_that_cannot_be_split_is_refused_with_those_that_can(
    changes: dict[str, int], tp_size: int, words: list[str]
) -> None:
    config = replace(SMOLLM2, **changes)
    for refused in (lambda: check_split(config, tp_size), lambda: slices_of(config, Shard(tp_size, 0))):
        with pytest.raises(StartupError) as refusal:
            refused()
        for word in [f"--tensor-parallel-size is {tp_size}", *words]:
            assert word in refusal.value.message
        assert refusal.value.message.endswith(words[-1])


EVERY_LAYER_SPARSE = ExpertsConfig(MIXTRAL, 4, 2, 1536, True, frozenset(range(30)))


@pytest.mark.parametrize(
    ("changes", "tp_size", "dp_size", "words"),
    [
        (
            {"intermediate_size": 36},
            1,
            5,
            ["36 neurons", "all 5 processes", "choose --data-parallel-size 2 or 3 or 4 or 6 or 9 or 12 or 18 or 36,"],
        ),
        ({"intermediate_size": 36}, 3, 5, ["all 15 processes", "choose --data-parallel-size 2 or 3 or 4 or 6 or 12,"]),
        ({"intermediate_size": 3}, 3, 2, ["all 6 processes", "3): leave"]),
        ({"experts": EVERY_LAYER_SPARSE}, 1, 2, ["every layer of the model is a mixture of experts", "leave it out"]),
    ],
)
def test_dense_mlps_that_cannot_be_split_over_the_group_are_refused_with_what_works(
    changes: dict[str, Any], tp_size: int, dp_size: int, words: list[str]
) -> None:
    config, shard = replace(SMOLLM2, **changes), Shard(tp_size, 0, dp_size, 0, splits_dense_mlp=True)
    for refused in (lambda: check_dense_split(config, tp_size, dp_size), lambda: slices_of(config, shard)):
        with pytest.raises(StartupError) as refusal:
            refused()
        for word in ["--dense-mlp-split", *words]:
            assert word in refusal.value.message
    slices_of(config, replace(shard, splits_dense_mlp=False))


@pytest.mark.parametrize("grid", [(1, 1), (1, 4), (3, 2), (6, 1)])
def test_every_neuron_of_a_split_dense_mlp_is_held_once(grid: tuple[int, int]) -> None:
    tp_size, ep_size = grid
    places = [(tp_rank, ep_rank) for tp_rank in range(tp_size) for ep_rank in range(ep_size)]
    parts = [Shard(tp_size, tp_rank, ep_size, ep_rank, True).neurons_of(1536) for tp_rank, ep_rank in places]
    assert [neuron for part in parts for neuron in part] == list(range(1536))
    assert {len(part) for part in parts} == {1536 // len(places)}


@pytest.mark.parametrize("tp_size", [1, 2, 4, 8, 16])
def test_every_head_and_token_is_held_and_queries_lie_beside_their_keys(tp_size: int) -> None:
    """16 query heads over 4 KV heads: where more ranks than those share them, each rank's queries still find theirs."""
    config = replace(SMOLLM2, num_heads=16, num_kv_heads=4, vocab_size=53)
    parts = [slices_of(config, Shard(tp_size, rank)) for rank in range(tp_size)]
    assert [head for part in parts for head in part.heads] == list(range(16))
    assert [token for part in parts for token in part.vocabulary] == list(range(53))
    for part in parts:
        assert sorted({head // 4 for head in part.heads}) == list(part.kv_heads)
        assert len(part.vocabulary) <= part.num_vocabulary_rows == -(-53 // tp_size)


def test_one_rank_holds_all() -> None:
    slices = slices_of(SMOLLM2, WHOLE)
    assert (slices.heads, slices.kv_heads, slices.vocabulary) == (range(9), range(3), range(49152))
    assert slices.num_vocabulary_rows == 49152
