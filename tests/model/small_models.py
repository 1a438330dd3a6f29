"""Small models of each family that transformers has too, with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "eos_token_id": 5,
    "bos_token_id": 1,
    # Wide enough that the best token leads clearly: rounding must not decide.
    "initializer_range": 0.15,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
YARN_MSCALE = {**YARN, "mscale": 0.8, "mscale_all_dim": 0.5, "beta_fast": 16.0, "truncate": False}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e4, "factor": 3.0}}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2-bias": ("Qwen2", {}),
    "qwen2-yarn-mscale": ("Qwen2", {"rope_parameters": YARN_MSCALE}),
    "qwen3-norm": ("Qwen3", {"tie_word_embeddings": True}),
    "qwen3-yarn": ("Qwen3", {"rope_parameters": YARN}),
}


def save(variant: str, directory: Path) -> Any:
    """The transformers model, which is written to `directory`. Its biases and norms are random as well."""
    family, changes = VARIANTS[variant]
    torch.manual_seed(7)
    config = getattr(transformers, f"{family}Config")(**{**SMALL, **changes})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(directory)
    return model
