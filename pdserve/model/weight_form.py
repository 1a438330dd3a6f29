"""Which form a model's weights and KV are kept in, where the command line leaves that open."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from pdserve.config import KvCacheDtype, Quantization, QuantizationSetting
from pdserve.model.checkpoint import Checkpoint
from pdserve.model.model_config import ModelConfig
from pdserve.model.progress import no_progress
from pdserve.model.quantized_linear import load_kernel, quantize
from pdserve.model.weights import expected_shapes, layer_prefix

log = logging.getLogger(__name__)

ROUNDED = "products round activations to 8 bits, --quantization fp32 rounds nothing"
# Looked at in the first and the last layer; models of every family have them.
SAMPLED = ("q_proj", "k_proj", "v_proj", "o_proj")


def choose_form(setting: QuantizationSetting, directory: Path, config: ModelConfig, cache_dir: Path) -> Quantization:
    """The form, which is logged with its reason. Raises StartupError for unreadable weights.

    Of what is open, quality comes first: 8 bits cost less than half a percent of perplexity (docs/benchmarks.md), and 4
    bits do where the weights were published so. Processors without vector instructions for bytes gain nothing.
    """
    if setting != "auto":
        return _chosen(setting, "as --quantization says")
    kernel = load_kernel(cache_dir)
    if kernel is None or not kernel.is_fast:
        return _chosen("fp32", "this machine has no fast kernel for fewer bits")
    if _are_of_4_bits(directory, config):
        return _chosen("int4", f"they were published in 4 bits; {ROUNDED}")
    return _chosen("int8", f"it is fast and close to exact; {ROUNDED}")


def choose_kv_dtype(setting: KvCacheDtype, form: Quantization) -> str:
    """Of a KV layout: bfloat16 halves the bytes, and rounds less than quantised weights have done already."""
    if setting != "auto":
        return setting
    return "float32" if form == "fp32" else "bfloat16"


def _chosen(form: Quantization, reason: str) -> Quantization:
    log.info("weights are kept in %s: %s", form, reason)
    return form


def _are_of_4_bits(directory: Path, config: ModelConfig) -> bool:
    """Whether their groups have sixteen evenly spaced values at most, which float32 only spells out."""
    checkpoint = Checkpoint(directory, expected_shapes(config), no_progress)
    for index in {0, config.num_layers - 1}:
        for name in SAMPLED:
            weight = checkpoint.take(f"{layer_prefix(index)}self_attn.{name}.weight")
            if not torch.equal(quantize(weight, 4).weight()[:, : weight.shape[1]], weight):
                return False
    return True
