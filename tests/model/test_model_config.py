"""Reading config.json, in both spellings, and refusing what cannot be served in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pdserve.errors import StartupError
from pdserve.kv.layout import KVLayout
from pdserve.model import experts_config as names
from pdserve.model.experts_config import ExpertsConfig
from pdserve.model.model_config import DefaultRope, LinearRope, Llama3Rope, YarnRope, read_config

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "vocab_size": 100,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_theta": 10000.0,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}


def write(directory: Path, changes: dict[str, Any], generation: dict[str, Any] | None = None) -> Path:
    (directory / "config.json").write_text(json.dumps({**BASE, **changes}))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


def test_the_fields_and_the_layout(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, {"tie_word_embeddings": True}))
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (6, 3, 16)
    assert config.rope == DefaultRope(10000.0)
    assert config.has_tied_embeddings
    assert config.bos_token_id == 1
    assert config.kv_layout(32) == KVLayout(2, 3, 16, 32, "float32")


@pytest.mark.parametrize("kind", ["rope_type", "type"])
@pytest.mark.parametrize(
    ("scaling", "rope"),
    [
        ({"linear": {"factor": 2.0}}, LinearRope(5e5, 2.0)),
        ({"llama3": LLAMA3}, Llama3Rope(5e5, 8.0, 1.0, 4.0, 256)),
        (
            {"yarn": {"original_max_position_embeddings": 256}},
            YarnRope(5e5, 4.0, 256, None, None, None, 32.0, 1.0, True),
        ),
        (
            {"yarn": {"factor": 2, "attention_factor": 1.5, "beta_fast": 16, "beta_slow": 2, "truncate": False}},
            YarnRope(5e5, 2.0, 1024, 1.5, None, None, 16.0, 2.0, False),
        ),
    ],
    ids=["linear", "llama3", "yarn", "yarn-all"],
)
def test_both_spellings_of_rope_scaling_are_read(
    tmp_path: Path, kind: str, scaling: dict[str, dict[str, Any]], rope: object
) -> None:
    ((name, values),) = scaling.items()
    old = {"rope_theta": 5e5, "rope_scaling": {kind: name, **values}}
    new = {"rope_theta": None, "rope_parameters": {kind: name, "rope_theta": 5e5, **values}}
    assert read_config(write(tmp_path, old)).rope == rope
    assert read_config(write(tmp_path, new)).rope == rope


def test_every_end_of_text_id_counts_once(tmp_path: Path) -> None:
    directory = write(tmp_path, {"eos_token_id": 2}, {"eos_token_id": [7, 2]})
    assert read_config(directory).eos_token_ids == (7, 2)
    assert read_config(write(tmp_path, {"eos_token_id": None}, {})).eos_token_ids == ()


def test_an_inert_sliding_window_is_served(tmp_path: Path) -> None:
    read_config(write(tmp_path, {"sliding_window": None}))
    read_config(write(tmp_path, {"sliding_window": 512, "use_sliding_window": False}))
    read_config(write(tmp_path, {"sliding_window": 1024}))


MIXTRAL = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2}
QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
}


def test_a_dense_model_has_no_experts(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, {}))
    assert config.experts is None
    assert config.intermediate_sizes == {256}


def test_the_experts_of_mixtral(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, MIXTRAL))
    assert config.experts == ExpertsConfig(names.MIXTRAL, 8, 2, 256, True, frozenset({0, 1}))
    assert config.intermediate_sizes == {256}


@pytest.mark.parametrize(
    ("changes", "layers", "sizes"),
    [
        ({}, {0, 1, 2, 3, 4}, {32}),
        ({"mlp_only_layers": None, "decoder_sparse_step": 1}, {0, 1, 2, 3, 4}, {32}),
        ({"decoder_sparse_step": 2}, {1, 3}, {32, 256}),
        ({"mlp_only_layers": [0, 4, 9]}, {1, 2, 3}, {32, 256}),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, {1}, {32, 256}),
    ],
)
def test_the_layers_of_qwen3_that_have_experts(
    tmp_path: Path, changes: dict[str, Any], layers: set[int], sizes: set[int]
) -> None:
    config = read_config(write(tmp_path, {**QWEN3_MOE, "num_hidden_layers": 5, **changes}))
    assert config.experts == ExpertsConfig(names.QWEN3, 16, 4, 32, False, frozenset(layers))
    assert config.intermediate_sizes == sizes
    assert {layer for layer in range(5) if config.experts_of(layer)} == layers
    assert config.family.has_qk_norm


def test_qwen3_s_experts_as_transformers_writes_them(tmp_path: Path) -> None:
    later = {**QWEN3_MOE, "num_experts": None, "num_local_experts": 16, "norm_topk_prob": True}
    config = read_config(write(tmp_path, later))
    assert config.experts == ExpertsConfig(names.QWEN3, 16, 4, 32, True, frozenset({0, 1}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, ["architectures", "GPT2LMHeadModel", "Qwen3ForCausalLM"]),
        ({"architectures": None}, ["architectures", "null"]),
        ({"sliding_window": 512}, ["sliding_window is 512", "full attention"]),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ["layer_types", "sliding_attention"]),
        ({"rope_scaling": {"rope_type": "longrope"}}, ['rope_scaling.rope_type is "longrope"', "yarn"]),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2}}, ["rope_scaling.low_freq_factor is null"]),
        ({"rope_parameters": {"rope_type": "linear", "factor": -1}}, ["rope_parameters.factor is -1"]),
        ({"quantization_config": {"quant_method": "awq"}}, ["quant_method is 'awq'", "unquantized"]),
        ({"hidden_act": "gelu"}, ['hidden_act is "gelu"']),
        ({"attention_bias": True}, ["attention_bias is true"]),
        ({"mlp_bias": True}, ["mlp_bias is true"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor is 0.5"]),
        ({"vocab_size": None}, ["vocab_size is null"]),
        ({"vocab_size": "many"}, ['vocab_size is "many"']),
        ({"num_hidden_layers": 2.5}, ["num_hidden_layers is 2.5", "whole number"]),
        ({"num_key_value_heads": 4}, ["num_key_value_heads is 4", "num_attention_heads (6)"]),
        ({"head_dim": 15}, ["head_dim is 15", "even"]),
        ({**MIXTRAL, "num_local_experts": 0}, ["num_local_experts is 0", "positive"]),
        ({**MIXTRAL, "num_local_experts": None}, ["num_local_experts is null", "positive"]),
        ({**MIXTRAL, "num_experts_per_tok": 9}, ["num_experts_per_tok is 9", "8 experts", "damaged"]),
        ({**QWEN3_MOE, "num_experts": None}, ["num_experts is null", "positive"]),
        ({**QWEN3_MOE, "num_experts": 2.5}, ["num_experts is 2.5", "whole number"]),
        ({**QWEN3_MOE, "num_experts_per_tok": 17}, ["num_experts_per_tok is 17", "16 experts"]),
        ({**QWEN3_MOE, "moe_intermediate_size": -1}, ["moe_intermediate_size is -1", "positive"]),
        ({**QWEN3_MOE, "decoder_sparse_step": 0}, ["decoder_sparse_step is 0", "positive"]),
        ({**QWEN3_MOE, "norm_topk_prob": "yes"}, ['norm_topk_prob is "yes"', "true or false"]),
        ({**QWEN3_MOE, "mlp_only_layers": 1}, ["mlp_only_layers is 1", "list"]),
        ({**QWEN3_MOE, "mlp_only_layers": [-1]}, ["mlp_only_layers is [-1]", "list"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_served_is_refused_in_one_line(
    tmp_path: Path, changes: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(StartupError) as refusal:
        read_config(write(tmp_path, changes))
    assert "\n" not in refusal.value.message
    for word in ["config.json", *words]:
        assert word in refusal.value.message


def test_a_missing_or_broken_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"config\.json does not exist"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(StartupError, match="cannot be read"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(StartupError, match="holds a list"):
        read_config(tmp_path)
