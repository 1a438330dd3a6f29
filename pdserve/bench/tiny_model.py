"""Llama models with random weights, made in a moment: right in every respect but sense, and as slow as they are big."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers import decoders, models, pre_tokenizers

from pdserve.model.model_config import read_config
from pdserve.model.weights import expected_shapes

NUM_BYTES = 256
EOS, VOCAB_SIZE = NUM_BYTES, 288
HEAD_DIM = 32
MAX_POSITIONS = 16384


@dataclass(frozen=True, slots=True)
class ModelSize:
    """KV of a token is 2 * num_layers * num_kv_heads * 32 float32."""

    hidden: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate: int


# On one core: a chunk of 128 tokens in some 20 ms, and one of 512 in about two seconds.
QUICK = ModelSize(hidden=192, num_layers=4, num_heads=6, num_kv_heads=6, intermediate=512)
SLOW = ModelSize(hidden=768, num_layers=10, num_heads=12, num_kv_heads=12, intermediate=2048)


def make_model(directory: Path, size: ModelSize = QUICK, seed: int = 1) -> Path:
    """A model directory; the same for the same size and seed. One token a byte, and an end."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(_config(size)))
    _tokenizer().save(str(directory / "tokenizer.json"))
    save_file(_weights(directory, size, seed), str(directory / "model.safetensors"))
    return directory


def _config(size: ModelSize) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "num_hidden_layers": size.num_layers,
        "num_attention_heads": size.num_heads,
        "num_key_value_heads": size.num_kv_heads,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "torch_dtype": "float32",
    }


def _weights(directory: Path, size: ModelSize, seed: int) -> dict[str, np.ndarray]:
    """By published name. Wide enough that the best token leads clearly: rounding must not decide."""
    random = np.random.default_rng(seed)
    spread = np.float32(1.0 / np.sqrt(size.hidden))
    return {
        name: np.ones(shape, np.float32)
        if name.endswith("norm.weight")
        else random.standard_normal(shape, np.float32) * spread
        for name, shape in expected_shapes(read_config(directory)).items()
    }


def _tokenizer() -> tokenizers.Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={text: at for at, text in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer
