"""A checkpoint's tensors as the decoder wants them: float32, q/k/v in one matrix, gate and up in one."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pdserve.errors import StartupError
from pdserve.model.checkpoint import Checkpoint, checkpoint_files
from pdserve.model.linear import Linear
from pdserve.model.mlp import DenseMlp, Mlp
from pdserve.model.model_config import ModelConfig
from pdserve.model.progress import Progress, no_progress

# A digest reads this many bytes at this many places of a file: a different fine-tune differs nearly everywhere.
SAMPLE_BYTES = 4096
NUM_SAMPLES = 256


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """heads: the num_heads query heads, then the num_kv_heads key heads."""

    input_norm: Tensor  # [hidden]
    qkv: Linear  # hidden -> (heads + num_kv_heads) * head_dim
    qk_norm: Tensor | None  # [heads, head_dim]
    attention_output: Linear  # num_heads * head_dim -> hidden
    mlp_norm: Tensor  # [hidden]
    mlp: Mlp


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All float32. lm_head multiplies by the embedding where the two are tied."""

    embedding: Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [hidden]
    lm_head: Linear  # hidden -> vocab


def load_weights(directory: Path, config: ModelConfig, progress: Progress = no_progress) -> ModelWeights:
    """Read the directory's safetensors. Progress counts tensors. Raises StartupError, naming what is wrong."""
    checkpoint = Checkpoint(directory, expected_shapes(config), progress)
    embedding = checkpoint.take("model.embed_tokens.weight")
    layers = tuple(_layer(checkpoint, config, f"model.layers.{index}.") for index in range(config.num_layers))
    final_norm = checkpoint.take("model.norm.weight")
    lm_head = embedding if config.has_tied_embeddings else checkpoint.take("lm_head.weight")
    return ModelWeights(embedding, layers, final_norm, Linear(lm_head))


def _layer(checkpoint: Checkpoint, config: ModelConfig, prefix: str) -> LayerWeights:
    def take(*names: str) -> Tensor:
        parts = [checkpoint.take(prefix + name) for name in names]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def linear(*names: str, has_bias: bool = False) -> Linear:
        bias = take(*(f"{name}.bias" for name in names)) if has_bias else None
        return Linear(take(*(f"{name}.weight" for name in names)), bias)

    qkv = [f"self_attn.{letter}_proj" for letter in "qkv"]
    qk_norm = None
    if config.family.has_qk_norm:
        q_norm, k_norm = take("self_attn.q_norm.weight"), take("self_attn.k_norm.weight")
        qk_norm = torch.stack([q_norm] * config.num_heads + [k_norm] * config.num_kv_heads)
    return LayerWeights(
        input_norm=take("input_layernorm.weight"),
        qkv=linear(*qkv, has_bias=config.family.has_qkv_bias),
        qk_norm=qk_norm,
        attention_output=linear("self_attn.o_proj"),
        mlp_norm=take("post_attention_layernorm.weight"),
        mlp=DenseMlp(linear("mlp.gate_proj", "mlp.up_proj"), linear("mlp.down_proj")),
    )


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor the checkpoint must hold, by its published name."""
    hidden, intermediate, dim = config.hidden_size, config.intermediate_size, config.head_dim
    out = {"q": config.num_heads * dim, "k": config.num_kv_heads * dim, "v": config.num_kv_heads * dim}
    layer: dict[str, tuple[int, ...]] = {f"self_attn.{letter}_proj.weight": (out[letter], hidden) for letter in "qkv"}
    if config.family.has_qkv_bias:
        layer |= {f"self_attn.{letter}_proj.bias": (out[letter],) for letter in "qkv"}
    if config.family.has_qk_norm:
        layer |= {f"self_attn.{letter}_norm.weight": (dim,) for letter in "qk"}
    layer |= {
        "self_attn.o_proj.weight": (hidden, out["q"]),
        "mlp.gate_proj.weight": (intermediate, hidden),
        "mlp.up_proj.weight": (intermediate, hidden),
        "mlp.down_proj.weight": (hidden, intermediate),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.has_tied_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for index in range(config.num_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def revision(directory: Path) -> str:
    """A digest of the model, for `Fingerprint.model_revision`: equal directories give equal texts.

    It reads the config, and of each weights file the name, the size, the header and samples, so that a large model
    costs milliseconds. Raises StartupError where files are missing.
    """
    digest = hashlib.sha256()
    try:
        digest.update((directory / "config.json").read_bytes())
        for path in checkpoint_files(directory):
            num_bytes = path.stat().st_size
            digest.update(f"\0{path.name}\0{num_bytes}\0".encode())
            stride = max(SAMPLE_BYTES, math.ceil(num_bytes / NUM_SAMPLES))
            with path.open("rb") as file:
                header_bytes = int.from_bytes(file.read(8), "little")
                digest.update(file.read(min(header_bytes, num_bytes)))
                for offset in range(0, num_bytes, stride):
                    file.seek(offset)
                    digest.update(file.read(SAMPLE_BYTES))
    except OSError as error:
        raise StartupError(f"{directory} cannot be read: {error}; fetch the model again") from error
    return digest.hexdigest()[:32]
