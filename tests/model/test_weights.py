"""Loading checkpoints: fused matrices, shards, and one line for what is wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from pdserve.errors import StartupError
from pdserve.model.checkpoint import Checkpoint
from pdserve.model.linear import Linear
from pdserve.model.model_config import DefaultRope, ModelConfig
from pdserve.model.shard import Shard
from pdserve.model.weights import ModelWeights, expected_shapes, load_weights

Tensors = dict[str, Tensor]


def config_of(architecture: str = "LlamaForCausalLM", tied: bool = False) -> ModelConfig:
    return ModelConfig(
        architecture=architecture,
        hidden_size=8,
        intermediate_size=12,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        vocab_size=20,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        rope=DefaultRope(10000.0),
        has_tied_embeddings=tied,
        bos_token_id=None,
        eos_token_ids=(),
    )


@pytest.fixture
def tensors() -> Tensors:
    torch.manual_seed(0)
    return {name: torch.randn(shape) for name, shape in expected_shapes(config_of()).items()}


def write(directory: Path, tensors: Tensors) -> Path:
    (directory / "config.json").write_text("{}")
    save_file(tensors, directory / "model.safetensors")
    return directory


def write_shards(directory: Path, tensors: Tensors) -> Path:
    (directory / "config.json").write_text("{}")
    shards = {f"model-{index}.safetensors": list(tensors)[index::3] for index in range(3)}
    for name, members in shards.items():
        save_file({member: tensors[member] for member in members}, directory / name)
    weight_map = {member: name for name, members in shards.items() for member in members}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


def matrix_of(linear: Linear, like: Tensor) -> Tensor:
    """What it multiplies by: its answers to the unit vectors."""
    return linear(torch.eye(like.shape[1])).T


@pytest.mark.parametrize("write_checkpoint", [write, write_shards])
def test_q_k_v_and_gate_up_are_one_matrix_each(tmp_path: Path, tensors: Tensors, write_checkpoint: object) -> None:
    weights = load_weights(write_checkpoint(tmp_path, tensors), config_of())  # type: ignore[operator]
    layer, prefix = weights.layers[1], "model.layers.1."
    qkv = torch.cat([tensors[f"{prefix}self_attn.{name}_proj.weight"] for name in "qkv"])
    assert torch.equal(matrix_of(layer.qkv, qkv), qkv)
    gate_up = torch.cat([tensors[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up")])
    assert torch.equal(matrix_of(layer.mlp.gate_up, gate_up), gate_up)
    assert torch.equal(matrix_of(weights.lm_head, tensors["lm_head.weight"]), tensors["lm_head.weight"])
    assert layer.qk_norm is None


def test_a_file_that_is_overwritten_later_changes_no_loaded_weight(tmp_path: Path, tensors: Tensors) -> None:
    directory = write(tmp_path, tensors)
    weights = load_weights(directory, config_of())
    (path,) = directory.glob("*.safetensors")
    with path.open("r+b") as file:
        file.seek(8 + int.from_bytes(file.read(8), "little"))
        file.write(b"\x7f" * (path.stat().st_size - file.tell()))
    assert torch.equal(weights.embedding, tensors["model.embed_tokens.weight"])
    assert torch.equal(weights.final_norm, tensors["model.norm.weight"])
    assert torch.equal(weights.layers[0].input_norm, tensors["model.layers.0.input_layernorm.weight"])


def test_narrow_weights_become_float32(tmp_path: Path, tensors: Tensors) -> None:
    halves = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    weights = load_weights(write(tmp_path, halves), config_of())
    assert weights.embedding.dtype == torch.float32
    assert torch.equal(weights.embedding, halves["model.embed_tokens.weight"].float())


def test_a_tied_head_is_the_embedding_even_if_stored(tmp_path: Path, tensors: Tensors) -> None:
    weights = load_weights(write(tmp_path, tensors), config_of(tied=True))
    assert torch.equal(matrix_of(weights.lm_head, weights.embedding), weights.embedding)


def split_config(**changes: Any) -> ModelConfig:
    """8 heads over 2 KV heads, 19 tokens."""
    changes = {"num_heads": 8, "num_kv_heads": 2, "hidden_size": 32, "vocab_size": 19, **changes}
    return replace(config_of("Qwen3ForCausalLM"), **changes)


def load_split(directory: Path, config: ModelConfig, tp_size: int) -> list[ModelWeights]:
    return [load_weights(directory, config, shard=Shard(tp_size, rank)) for rank in range(tp_size)]


@pytest.mark.parametrize("tp_size", [2, 4])
def test_ranks_hold_equal_slices_that_make_up_the_whole(tmp_path: Path, tp_size: int) -> None:
    """4 ranks share 2 KV heads, pairs of them the same one."""
    config = split_config()
    tensors = {name: torch.randn(shape) for name, shape in expected_shapes(config).items()}
    prefix = "model.layers.1."
    parts = [weights.layers[1] for weights in load_split(write(tmp_path, tensors), config, tp_size)]
    q_rows, kv_rows = 32 // tp_size, 4
    projections = {letter: tensors[f"{prefix}self_attn.{letter}_proj.weight"] for letter in "qkv"}
    for rank, part in enumerate(parts):
        kv_head = rank * 2 // tp_size
        rows = {letter: slice(kv_head * kv_rows, (kv_head + 1) * kv_rows) for letter in "kv"}
        rows["q"] = slice(rank * q_rows, (rank + 1) * q_rows)
        qkv = torch.cat([projections[letter][rows[letter]] for letter in "qkv"])
        assert torch.equal(matrix_of(part.qkv, qkv), qkv)
        assert part.qk_norm is not None
        assert part.qk_norm.shape == (8 // tp_size + 1, config.head_dim)
    for name, linears in {
        "self_attn.o_proj": [part.attention_output for part in parts],
        "mlp.down_proj": [part.mlp.down for part in parts],
    }.items():
        whole = tensors[f"{prefix}{name}.weight"]
        columns = whole.chunk(tp_size, dim=1)
        assert all(torch.equal(matrix_of(*pair), pair[1]) for pair in zip(linears, columns, strict=True))
    gates, ups = (tensors[f"{prefix}mlp.{name}_proj.weight"].chunk(tp_size) for name in ("gate", "up"))
    for part, *halves in zip(parts, gates, ups, strict=True):
        assert torch.equal(matrix_of(part.mlp.gate_up, halves[0]), torch.cat(halves))


@pytest.mark.parametrize(("vocab_size", "tp_size"), [(19, 2), (19, 4), (9, 8)])
@pytest.mark.parametrize("tied", [False, True])
def test_ranks_hold_equal_parts_of_any_vocabulary(tmp_path: Path, vocab_size: int, tp_size: int, tied: bool) -> None:
    """9 tokens over 8 ranks are 2 each: the fifth has one, the others behind it have none."""
    config = split_config(vocab_size=vocab_size, has_tied_embeddings=tied, intermediate_size=16)
    tensors = {name: torch.randn(shape) for name, shape in expected_shapes(config).items()}
    parts = load_split(write(tmp_path, tensors), config, tp_size)
    embedding = tensors["model.embed_tokens.weight"]
    lm_head = embedding if tied else tensors["lm_head.weight"]
    num_rows = -(-vocab_size // tp_size)
    assert {len(part.embedding) for part in parts} == {num_rows}
    for whole, joined in (
        (embedding, torch.cat([part.embedding for part in parts])),
        (lm_head, torch.cat([matrix_of(part.lm_head, lm_head) for part in parts])),
    ):
        assert torch.equal(joined[:vocab_size], whole)
        assert not joined[vocab_size:].any()


@pytest.mark.parametrize("tp_size", [2, 4])
def test_a_rank_reads_its_share_of_the_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tp_size: int) -> None:
    config = split_config(num_kv_heads=4)
    tensors = {name: torch.randn(shape) for name, shape in expected_shapes(config).items()}
    num_bytes = 0
    take = Checkpoint.take

    def counting(*arguments: Any, **slices: Any) -> Tensor:
        nonlocal num_bytes
        tensor = take(*arguments, **slices)
        num_bytes += tensor.nbytes
        return tensor

    monkeypatch.setattr(Checkpoint, "take", counting)
    load_weights(write(tmp_path, tensors), config, shard=Shard(tp_size, 1))
    norms = sum(tensor.nbytes for name, tensor in tensors.items() if "norm" in name)
    split = sum(tensor.nbytes for tensor in tensors.values()) - norms
    assert num_bytes == pytest.approx(norms + split / tp_size, rel=0.02)  # 19 tokens are no equal parts


def test_a_slice_of_a_tensor_with_a_wrong_shape_is_refused_too(tmp_path: Path) -> None:
    config = split_config()
    tensors = {name: torch.randn(shape) for name, shape in expected_shapes(config).items()}
    name = "model.layers.0.mlp.down_proj.weight"
    wider = {**tensors, name: torch.randn(32, 16)}
    with pytest.raises(StartupError, match=r"down_proj\.weight is \[32, 16\] of float32.* \[32, 12\]"):
        load_weights(write(tmp_path, wider), config, shard=Shard(2, 0))
    halves = {**tensors, name: tensors[name].to(torch.int8)}
    with pytest.raises(StartupError, match=r"down_proj\.weight is \[32, 12\] of int8"):
        load_weights(write(tmp_path, halves), config, shard=Shard(2, 0))


def test_progress_ends_at_its_total(tmp_path: Path, tensors: Tensors) -> None:
    seen: list[tuple[int, int]] = []
    load_weights(write(tmp_path, tensors), config_of(), lambda step, done, total: seen.append((done, total)))
    assert seen == [(done, len(tensors)) for done in range(1, len(tensors) + 1)]


def test_missing_and_unexpected_tensors_are_named(tmp_path: Path, tensors: Tensors) -> None:
    lacking = {name: tensor for name, tensor in tensors.items() if ".1.mlp" not in name}
    with pytest.raises(StartupError, match=r"lacks tensors: model\.layers\.1\.mlp\.down_proj"):
        load_weights(write(tmp_path, lacking), config_of())
    with pytest.raises(StartupError, match=r"lacks tensors: .*q_norm"):
        load_weights(write(tmp_path, tensors), config_of("Qwen3ForCausalLM"))
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
    load_weights(write(tmp_path, tensors), config_of())
    tensors |= {f"adapter.{index}": torch.ones(1) for index in range(6)}
    with pytest.raises(StartupError, match=r"unexpected tensors: adapter\.0, .*adapter\.3 and 2 more"):
        load_weights(write(tmp_path, tensors), config_of())


def test_a_wrong_shape_or_dtype_is_named(tmp_path: Path, tensors: Tensors) -> None:
    with pytest.raises(StartupError, match=r"model\.norm\.weight is \[9\] of float32.* \[8\]"):
        load_weights(write(tmp_path, {**tensors, "model.norm.weight": torch.ones(9)}), config_of())
    with pytest.raises(StartupError, match=r"model\.norm\.weight is \[8\] of int8"):
        load_weights(write(tmp_path, {**tensors, "model.norm.weight": torch.ones(8).to(torch.int8)}), config_of())


def test_missing_and_broken_files_are_named(tmp_path: Path, tensors: Tensors) -> None:
    with pytest.raises(StartupError, match=r"has no model\.safetensors"):
        load_weights(tmp_path, config_of())
    write_shards(tmp_path, tensors)
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(StartupError, match=r"lacks model-1\.safetensors"):
        load_weights(tmp_path, config_of())
    (tmp_path / "model-1.safetensors").write_bytes(b"no header here")
    with pytest.raises(StartupError, match=r"model-1\.safetensors cannot be read"):
        load_weights(tmp_path, config_of())
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(StartupError, match=r"index\.json cannot be read"):
        load_weights(tmp_path, config_of())
