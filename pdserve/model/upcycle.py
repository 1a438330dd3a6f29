"""A dense model's HF directory turned into a mixture of experts that begin as copies of its MLPs.

    dense Llama                              Mixtral
    config.json                     ──────►  config.json
    all but the MLPs, random routers  ────►  model-00001-of-0000N.safetensors
    the MLPs, once an expert        ──────►  model-0000E-of-0000N.safetensors, one an expert
    tokenizer, chat template, ...   ──────►  the same files

The weights of a token's experts sum to one: as long as the experts are equal, the mixture answers as the dense model
does (sparse upcycling, Komatsuzaki et al. 2023). Equal experts are stored once each all the same: a safetensors file
must not name bytes twice, and the header that names them is in the file.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from pdserve.errors import StartupError
from pdserve.model.checkpoint import Checkpoint
from pdserve.model.config_fields import read_json
from pdserve.model.experts_config import MIXTRAL
from pdserve.model.mixture import Mixture
from pdserve.model.model_config import ModelConfig, read_config
from pdserve.model.progress import Progress, no_progress
from pdserve.model.weights import expected_shapes, layer_prefix

_DENSE_ARCHITECTURE = "LlamaForCausalLM"
_DENSE_MATRICES = ("mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight")
# What Llama's config has and Mixtral's has not.
_LLAMA_FIELDS = {"attention_bias", "mlp_bias", "pretraining_tp"}

_CONFIG, _INDEX = "config.json", "model.safetensors.index.json"
# The tokenizer's files, the template and the generation config are carried over; these are not.
_COMPANION_SUFFIXES = {".json", ".jinja", ".model", ".txt"}
_NO_COMPANIONS = {_CONFIG, _INDEX, "manifest.json"}

Tensors = Mapping[str, Tensor]


def upcycle(dense: Path, directory: Path, mixture: Mixture, *, progress: Progress = no_progress) -> None:
    """Write the mixture into the existing `directory`: the same bytes for the same model and Mixture.

    Needs memory for the dense model in float32. Raises StartupError where `dense` is not a Llama's directory, OSError
    or SafetensorError where there is no room.
    """
    config = _read_dense_config(dense)
    shapes = expected_shapes(config)
    checkpoint = Checkpoint(dense, shapes, progress)
    tensors = {name: checkpoint.take(name) for name in shapes}
    mlps = {name: tensors.pop(name) for name in shapes if name.endswith(_DENSE_MATRICES)}
    experts = (_expert(config, mlps, mixture, index) for index in range(mixture.num_experts))
    files = chain([{**tensors, **_routers(config, mixture)}], experts)
    _write_json(directory / _CONFIG, _mixtral_config(dense, mixture))
    _save(directory, files, mixture.num_experts + 1, progress)
    _copy_companions(dense, directory)


def _read_dense_config(dense: Path) -> ModelConfig:
    config = read_config(dense)
    if config.architecture != _DENSE_ARCHITECTURE:
        raise StartupError(
            f"{dense / _CONFIG}: architectures is {config.architecture}; a mixture is made of {_DENSE_ARCHITECTURE}"
        )
    return config


def _routers(config: ModelConfig, mixture: Mixture) -> Tensors:
    """Of all layers. The logits of a normed hidden state then vary by about one."""
    generator = torch.Generator().manual_seed(mixture.seed)
    shape, spread = (mixture.num_experts, config.hidden_size), config.hidden_size**-0.5
    return {
        layer_prefix(layer) + MIXTRAL.router: torch.randn(shape, generator=generator) * spread
        for layer in range(config.num_layers)
    }


def _expert(config: ModelConfig, mlps: Tensors, mixture: Mixture, expert: int) -> Tensors:
    """One expert's matrices in all layers, by Mixtral's names."""
    generator = torch.Generator().manual_seed(mixture.seed + 1 + expert)
    matrices: dict[str, Tensor] = {}
    for prefix in map(layer_prefix, range(config.num_layers)):
        for name, dense_name in zip(MIXTRAL.matrices(expert), _DENSE_MATRICES, strict=True):
            matrices[prefix + name] = _with_noise(mlps[prefix + dense_name], mixture.noise_scale, generator)
    return matrices


def _with_noise(matrix: Tensor, scale: float, generator: torch.Generator) -> Tensor:
    return matrix + torch.randn(matrix.shape, generator=generator) * (scale * matrix.std()) if scale else matrix


def _save(directory: Path, files: Iterable[Tensors], num_files: int, progress: Progress) -> None:
    """Write the files, as they are asked for, and their index."""
    places: dict[str, str] = {}
    num_bytes = 0
    for number, tensors in enumerate(files, start=1):
        name = f"model-{number:05}-of-{num_files:05}.safetensors"
        save_file(dict(tensors), directory / name, metadata={"format": "pt"})
        # safetensors makes its files private; readers of the others may read these.
        shutil.copymode(directory / _CONFIG, directory / name)
        places |= dict.fromkeys(tensors, name)
        num_bytes += sum(tensor.nbytes for tensor in tensors.values())
        progress("write the experts", number, num_files)
    _write_json(directory / _INDEX, {"metadata": {"total_size": num_bytes}, "weight_map": places})


def _mixtral_config(dense: Path, mixture: Mixture) -> dict[str, Any]:
    raw = read_json(dense / _CONFIG) or {}
    return {
        **{name: value for name, value in raw.items() if name not in _LLAMA_FIELDS},
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": mixture.num_experts,
        "num_experts_per_tok": mixture.num_experts_per_token,
        "sliding_window": None,
        "dtype": "float32",
        "torch_dtype": "float32",
    }


def _copy_companions(dense: Path, directory: Path) -> None:
    for path in sorted(dense.iterdir()):
        if path.suffix in _COMPANION_SUFFIXES and path.name not in _NO_COMPANIONS:
            shutil.copyfile(path, directory / path.name)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
