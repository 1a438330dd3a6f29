"""A GGUF file of the llama architecture, turned into an HF directory in float32.

    GGUF                                     HF directory
    llama.* metadata                         config.json, generation_config.json
    token_embd, blk.N.*, output_norm  ─────► model.safetensors   float32, q and k rows back in HF's order
    tokenizer.ggml.* (byte-level BPE)        tokenizer.json, tokenizer_config.json (chat template included)

Source: the GGUF specification (ggml) and the llama part of its Hugging Face converter, whose permutation of the q and
k rows is undone here.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from pdserve.errors import StartupError
from pdserve.model.progress import Progress, no_progress

Float32Array = NDArray[np.float32]

_WHOLE_MODEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_OF_A_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}

# tokenizer.ggml.token_type
_CONTROL = 3
_USER_DEFINED = 4

_SPECIAL_TOKEN_IDS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}

Metadata = Mapping[str, Any]


def convert(gguf_path: Path, directory: Path, *, progress: Progress = no_progress) -> None:
    """Write the HF directory of `gguf_path` into the existing `directory`.

    Needs memory for the whole model in float32. Raises StartupError where the file is not one this can convert.
    """
    progress("read the model file", 0, 1)
    reader = _open(gguf_path)
    progress("read the model file", 1, 1)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    _refuse_unsupported(metadata)
    weights = read_weights(
        reader, num_heads=_num_heads(metadata), num_kv_heads=_num_kv_heads(metadata), progress=progress
    )
    config = model_config(metadata, tie_word_embeddings="lm_head.weight" not in weights)
    _write_json(directory / "config.json", config)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    # safetensors makes its file private; readers of the others may read this one.
    shutil.copymode(directory / "config.json", directory / "model.safetensors")
    _write_json(
        directory / "generation_config.json", {k: config[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id")}
    )
    build_tokenizer(metadata).save(str(directory / "tokenizer.json"))
    _write_json(directory / "tokenizer_config.json", tokenizer_config(metadata))


def _open(path: Path) -> Any:
    try:
        return gguf.GGUFReader(path)
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise StartupError(f"{path} is not a readable GGUF file ({error}); fetch it again") from error


def _refuse_unsupported(metadata: Metadata) -> None:
    """StartupError for what would convert into a model that answers wrongly."""
    for name, supported in (
        ("general.architecture", ("llama",)),
        ("llama.rope.scaling.type", (None, "none")),
        ("llama.expert_count", (None, 0)),
        ("tokenizer.ggml.model", ("gpt2",)),
        ("tokenizer.ggml.pre", ("smollm",)),
    ):
        if metadata.get(name) not in supported:
            known = " or ".join("unset" if value is None else repr(value) for value in supported)
            raise StartupError(
                f"GGUF field {name} is {metadata.get(name)!r}, this converter knows {known}; "
                "use the model's HF directory"
            )


# ---------------------------------------------------------------- weights


def read_weights(
    reader: Any, *, num_heads: int, num_kv_heads: int, progress: Progress = no_progress
) -> dict[str, Float32Array]:
    """Every tensor by its HF name, float32, in HF's [out_features, in_features] shape and row order."""
    heads = {"self_attn.q_proj.weight": num_heads, "self_attn.k_proj.weight": num_kv_heads}
    weights: dict[str, Float32Array] = {}
    for done, tensor in enumerate(reader.tensors, start=1):
        name = hf_name(tensor.name)
        weight = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        permuted_heads = heads.get(name.split(".", 3)[-1])
        if permuted_heads is not None:
            weight = unpermute_rope_rows(weight, permuted_heads)
        # safetensors writes the buffer as it lies in memory.
        weights[name] = np.ascontiguousarray(weight, dtype=np.float32)
        progress("convert the weights", done, len(reader.tensors))
    return weights


def hf_name(gguf_name: str) -> str:
    """`blk.3.attn_q.weight` → `model.layers.3.self_attn.q_proj.weight`."""
    if gguf_name in _WHOLE_MODEL:
        return _WHOLE_MODEL[gguf_name]
    block, _, rest = gguf_name.removeprefix("blk.").partition(".")
    if not gguf_name.startswith("blk.") or rest not in _OF_A_LAYER:
        raise StartupError(f"GGUF tensor {gguf_name!r} has no place in a Llama model; use the model's HF directory")
    return f"model.layers.{block}.{_OF_A_LAYER[rest]}"


def unpermute_rope_rows(weight: Float32Array, num_heads: int) -> Float32Array:
    """Rows of a q or k projection, from GGUF's order back to HF's. weight: [num_heads * head_dim, in_features].

    ggml rotates neighbours (0, 1), (2, 3) ..., HF rotates halves (0, d/2), (1, d/2 + 1) ..., so within a head
    GGUF's row 2i + j is HF's row j * d/2 + i.
    """
    num_rows, num_columns = weight.shape
    pairs = weight.reshape(num_heads, num_rows // num_heads // 2, 2, num_columns)
    return pairs.swapaxes(1, 2).reshape(num_rows, num_columns)


# ---------------------------------------------------------------- config.json


def model_config(metadata: Metadata, *, tie_word_embeddings: bool) -> dict[str, Any]:
    """config.json of a LlamaForCausalLM; rope_theta in the old place and in the new one, for readers of either."""
    head_dim = metadata["llama.rope.dimension_count"]
    # GGUF keeps float32; the shortest decimal that rounds to it is the number its author wrote.
    rope_theta = float(str(np.float32(metadata["llama.rope.freq_base"])))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": metadata["llama.embedding_length"],
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": _num_heads(metadata),
        "num_key_value_heads": _num_kv_heads(metadata),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": float(str(np.float32(metadata["llama.attention.layer_norm_rms_epsilon"]))),
        "max_position_embeddings": metadata["llama.context_length"],
        "rope_theta": rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": rope_theta},
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": tie_word_embeddings,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
        "dtype": "float32",
        "torch_dtype": "float32",
    }


def _num_heads(metadata: Metadata) -> int:
    return int(metadata["llama.attention.head_count"])


def _num_kv_heads(metadata: Metadata) -> int:
    return int(metadata.get("llama.attention.head_count_kv", _num_heads(metadata)))


# ---------------------------------------------------------------- tokenizer


def build_tokenizer(metadata: Metadata) -> Tokenizer:
    """Byte-level BPE whose pre-tokenizer sets every digit apart (GGUF's pre-tokenizer `smollm`)."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=metadata.get("tokenizer.ggml.add_space_prefix", False)),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata["tokenizer.ggml.token_type"]
    for kind, add in ((_CONTROL, tokenizer.add_special_tokens), (_USER_DEFINED, tokenizer.add_tokens)):
        add(
            [
                AddedToken(token, normalized=False)
                for token, of_kind in zip(tokens, types, strict=True)
                if of_kind == kind
            ]
        )
    return tokenizer


def tokenizer_config(metadata: Metadata) -> dict[str, Any]:
    """tokenizer_config.json: the special tokens by name and the chat template."""
    tokens = metadata["tokenizer.ggml.tokens"]
    special = {name: tokens[metadata[field]] for name, field in _SPECIAL_TOKEN_IDS.items() if field in metadata}
    return {
        # The class that takes tokenizer.json as it is; the model's own would rebuild its pre-tokenizer.
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special,
        "model_max_length": metadata["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": metadata.get("tokenizer.chat_template"),
    }


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
