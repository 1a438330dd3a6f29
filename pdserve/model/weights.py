"""A rank's part of a checkpoint as the decoder wants it: q/k/v in one matrix, gate and up in one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.model.checkpoint import Checkpoint
from pdserve.model.experts import load_experts
from pdserve.model.matrices import UNQUANTISED, Matrices, Matrix
from pdserve.model.mlp import DenseMlp, Mlp, SplitMlp
from pdserve.model.model_config import ModelConfig
from pdserve.model.progress import Progress, no_progress
from pdserve.model.shard import WHOLE, Shard
from pdserve.model.slices import Slices, slices_of


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """num_heads, num_kv_heads: those of the rank. heads: its query heads, then its key heads."""

    input_norm: Tensor  # [hidden]
    qkv: Matrix  # hidden -> (heads + num_kv_heads) * head_dim
    qk_norm: Tensor | None  # [heads, head_dim]
    attention_output: Matrix  # num_heads * head_dim -> hidden, one of tp_size summands
    mlp_norm: Tensor  # [hidden]
    mlp: Mlp


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """The rank's part; float32 but for what is a Matrix. lm_head multiplies by the embedding where the two are tied.

    rows: the rank's part of the vocabulary; the last ranks' ends with zeros where it cannot be split evenly.
    """

    embedding: Tensor  # [rows, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [hidden]
    lm_head: Matrix  # hidden -> rows


def load_weights(
    directory: Path,
    config: ModelConfig,
    progress: Progress = no_progress,
    shard: Shard = WHOLE,
    matrices: Matrices = UNQUANTISED,
) -> ModelWeights:
    """Read from the directory's safetensors what `shard` holds, and no more. Progress counts tensors.

    Raises StartupError, naming what is wrong with the files, or the sizes that tensor parallelism can have.
    """
    slices = slices_of(config, shard)
    checkpoint = Checkpoint(directory, expected_shapes(config), progress)
    embedding = _vocabulary_rows(checkpoint, "model.embed_tokens.weight", slices)
    layers = tuple(_layer(checkpoint, config, index, shard, matrices) for index in range(config.num_layers))
    final_norm = checkpoint.take("model.norm.weight")
    lm_head = embedding if config.has_tied_embeddings else _vocabulary_rows(checkpoint, "lm_head.weight", slices)
    return ModelWeights(embedding, layers, final_norm, matrices.of_head(lm_head))


def _vocabulary_rows(checkpoint: Checkpoint, name: str, slices: Slices) -> Tensor:
    """[slices.num_vocabulary_rows, hidden]: the rank's tokens, then zeros."""
    rows = checkpoint.take(name, rows=slices.vocabulary)
    num_padded = slices.num_vocabulary_rows - len(rows)
    return F.pad(rows, (0, 0, 0, num_padded)) if num_padded else rows


def _layer(checkpoint: Checkpoint, config: ModelConfig, index: int, shard: Shard, matrices: Matrices) -> LayerWeights:
    prefix, slices = layer_prefix(index), slices_of(config, shard)
    heads, kv_heads = _rows_of(slices.heads, config.head_dim), _rows_of(slices.kv_heads, config.head_dim)
    qkv = {"self_attn.q_proj": heads, "self_attn.k_proj": kv_heads, "self_attn.v_proj": kv_heads}
    return LayerWeights(
        input_norm=checkpoint.take(f"{prefix}input_layernorm.weight"),
        qkv=matrices.of_layer(
            _stack(checkpoint, {f"{prefix}{name}.weight": rows for name, rows in qkv.items()}),
            _stack(checkpoint, {f"{prefix}{name}.bias": rows for name, rows in qkv.items()})
            if config.family.has_qkv_bias
            else None,
        ),
        qk_norm=_qk_norm(checkpoint, prefix, slices) if config.family.has_qk_norm else None,
        attention_output=matrices.of_layer(checkpoint.take(f"{prefix}self_attn.o_proj.weight", columns=heads)),
        mlp_norm=checkpoint.take(f"{prefix}post_attention_layernorm.weight"),
        mlp=_mlp(checkpoint, config, index, shard, matrices),
    )


def _mlp(checkpoint: Checkpoint, config: ModelConfig, index: int, shard: Shard, matrices: Matrices) -> Mlp:
    """The rank's part of the layer's."""
    prefix, experts = layer_prefix(index), config.experts_of(index)
    if experts is not None:
        return load_experts(checkpoint, experts, prefix, shard, matrices)
    rows = shard.neurons_of(config.intermediate_size)
    gate_up = _stack(checkpoint, {f"{prefix}mlp.{name}_proj.weight": rows for name in ("gate", "up")})
    down = checkpoint.take(f"{prefix}mlp.down_proj.weight", columns=rows)
    mlp = SplitMlp if shard.splits_dense_mlp else DenseMlp
    return mlp(matrices.of_layer(gate_up), matrices.of_layer(down), matrices.ops)


def _stack(checkpoint: Checkpoint, rows: Mapping[str, range]) -> Tensor:
    """The named tensors' rows in one tensor, in order."""
    return torch.cat([checkpoint.take(name, rows=held) for name, held in rows.items()])


def _qk_norm(checkpoint: Checkpoint, prefix: str, slices: Slices) -> Tensor:
    """[heads, head_dim] of the rank's query heads, then its key heads; every head of a kind has the same."""
    q_norm, k_norm = (checkpoint.take(f"{prefix}self_attn.{letter}_norm.weight") for letter in "qk")
    return torch.stack([q_norm] * len(slices.heads) + [k_norm] * len(slices.kv_heads))


def _rows_of(heads: range, head_dim: int) -> range:
    """The rows of a projection that make up these heads."""
    return range(heads.start * head_dim, heads.stop * head_dim)


def layer_prefix(index: int) -> str:
    """What the names of a layer's tensors begin with."""
    return f"model.layers.{index}."


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor the checkpoint must hold, by its published name."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.has_tied_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    attention = _attention_shapes(config)
    for index in range(config.num_layers):
        experts = config.experts_of(index)
        mlp = _mlp_shapes(config) if experts is None else experts.shapes(hidden)
        shapes |= {layer_prefix(index) + name: shape for name, shape in (attention | mlp).items()}
    return shapes


def _attention_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """A layer's tensors but for its MLP."""
    hidden, dim = config.hidden_size, config.head_dim
    out = {"q": config.num_heads * dim, "k": config.num_kv_heads * dim, "v": config.num_kv_heads * dim}
    shapes: dict[str, tuple[int, ...]] = {f"self_attn.{letter}_proj.weight": (out[letter], hidden) for letter in "qkv"}
    if config.family.has_qkv_bias:
        shapes |= {f"self_attn.{letter}_proj.bias": (out[letter],) for letter in "qkv"}
    if config.family.has_qk_norm:
        shapes |= {f"self_attn.{letter}_norm.weight": (dim,) for letter in "qk"}
    return shapes | {
        "self_attn.o_proj.weight": (hidden, out["q"]),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }


def _mlp_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """A dense layer's MLP."""
    inwards, outwards = (config.intermediate_size, config.hidden_size), (config.hidden_size, config.intermediate_size)
    return {"mlp.gate_proj.weight": inwards, "mlp.up_proj.weight": inwards, "mlp.down_proj.weight": outwards}
