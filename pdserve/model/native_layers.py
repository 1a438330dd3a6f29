"""All layers of a dense decoder in one call of a C kernel (kernels/decoder.c): what Llama's loop computes, to the bit.

It takes quantised matrices and the native attention: a round of few rows spends as long between such kernels, one by
one from Python, as in them.
"""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from pdserve.model.attention.base import Attention
from pdserve.model.attention.native_cpu import Call, NativeAttention
from pdserve.model.layer_ops import LayerOps, NativeOps
from pdserve.model.mlp import DenseMlp
from pdserve.model.model_config import ModelConfig
from pdserve.model.native_build import KERNELS, NativeUnavailable, load_library
from pdserve.model.quantized_linear import PackedMatrix, QuantizedLinear
from pdserve.model.shard import Shard
from pdserve.model.team import Team
from pdserve.model.weights import LayerWeights, ModelWeights

log = logging.getLogger(__name__)

# As decoder.c has it: of so many rows a thread, threads meet twice a layer, and not after each step.
SLICE_ROWS = 64
# Of a round's time, as decoder.c counts it.
PARTS = ("matrices", "attention", "small steps")

_pointer, _count = ctypes.c_void_p, ctypes.c_int64


class _Layer(ctypes.Structure):
    """layer_t of decoder.c, field by field."""

    _fields_ = [
        ("input_norm", _pointer),
        ("mlp_norm", _pointer),
        ("qk_norm", _pointer),
        ("qkv", ctypes.POINTER(PackedMatrix)),
        ("attention_output", ctypes.POINTER(PackedMatrix)),
        ("gate_up", ctypes.POINTER(PackedMatrix)),
        ("down", ctypes.POINTER(PackedMatrix)),
        ("k_offset", _count),
        ("v_offset", _count),
    ]


class _Round(ctypes.Structure):
    """round_t of decoder.c, field by field."""

    _fields_ = [
        ("layers", ctypes.POINTER(_Layer)),
        ("num_layers", _count),
        ("final_norm", _pointer),
        ("hidden", _count),
        ("intermediate", _count),
        ("qk_heads", _count),
        ("eps", ctypes.c_float),
        ("attention", ctypes.POINTER(Call)),
        ("num_rows", _count),
        ("cosines", _pointer),
        ("sines", _pointer),
        ("x", _pointer),
        ("normed", _pointer),
        ("delta", _pointer),
        ("qkv", _pointer),
        ("attended", _pointer),
        ("gate_up", _pointer),
        ("gated", _pointer),
        ("scratch", _pointer),
        ("scratch_groups", _count),
        ("seconds", ctypes.c_double * len(PARTS)),
        ("seconds_away", ctypes.c_double),
    ]


class LayerMatrices(NamedTuple):
    """A layer's, all of which the kernel can multiply by."""

    qkv: QuantizedLinear
    attention_output: QuantizedLinear
    gate_up: QuantizedLinear
    down: QuantizedLinear


class NativeLayers:
    """The layers of `weights` over what `attention` has planned. Owned by the loop thread; runs without the GIL."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        matrices: Sequence[LayerMatrices],
        attention: NativeAttention,
        cache_dir: Path,
    ) -> None:
        """matrices: of each layer. The kernel is kept in `cache_dir`/native. Raises NativeUnavailable."""
        # Pointed into.
        self._kept = (weights, attention)
        self._matrices = matrices
        self._run = load_library(KERNELS / "decoder.c", "pdserve_decoder", cache_dir / "native", "cc").pdserve_decoder
        self._run.argtypes, self._run.restype = [ctypes.POINTER(_Round), _count], None
        layers = [
            _layer(layer, of_layer, attention.plane_offsets(index))
            for index, (layer, of_layer) in enumerate(zip(weights.layers, matrices, strict=True))
        ]
        self._round = _Round(
            layers=(_Layer * len(layers))(*layers),
            num_layers=len(layers),
            final_norm=weights.final_norm.data_ptr(),
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            qk_heads=config.num_heads + config.num_kv_heads,
            eps=config.rms_norm_eps,
            attention=ctypes.pointer(attention.call),
            scratch_groups=max(matrix.num_groups for of_layer in matrices for matrix in of_layer),
        )
        # Floats of a row in each of the round's buffers.
        self._widths = {
            "delta": config.hidden_size,
            "qkv": (config.num_heads + 2 * config.num_kv_heads) * config.head_dim,
            "attended": config.num_heads * config.head_dim,
            "gate_up": 2 * config.intermediate_size,
            "gated": config.intermediate_size,
        }
        self._team = Team(torch.get_num_threads())
        self._buffers: list[Tensor] = []
        self._num_rows = 0

    def run(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [rows, hidden]: the embeddings, overwritten; cos, sin [rows, 1, head_dim / 2] -> normed [rows, hidden]."""
        self._make_room(len(x))
        round_, normed = self._round, torch.empty_like(x)
        cos, sin = cos.contiguous(), sin.contiguous()
        round_.num_rows, round_.x, round_.normed = len(x), x.data_ptr(), normed.data_ptr()
        round_.cosines, round_.sines = cos.data_ptr(), sin.data_ptr()
        if len(x) >= SLICE_ROWS * self._team.size:
            self._run(round_, self._team.size)
            return normed
        begin_s = time.monotonic()
        self._run(round_, self._team.num_threads)
        self._team.note(time.monotonic() - begin_s, round_.seconds_away)
        if torch.get_num_threads() != self._team.num_threads:
            torch.set_num_threads(self._team.num_threads)
        return normed

    def seconds(self) -> Mapping[str, float]:
        """Spent so far, by part."""
        return dict(zip(PARTS, self._round.seconds, strict=True))

    def _make_room(self, num_rows: int) -> None:
        """Buffers grow to the largest round and stay."""
        if num_rows <= self._num_rows:
            return
        self._num_rows = num_rows
        scratch_bytes = max(matrix.scratch_bytes(num_rows) for matrices in self._matrices for matrix in matrices)
        buffers = {name: torch.empty(num_rows * width) for name, width in self._widths.items()}
        buffers["scratch"] = torch.empty(scratch_bytes, dtype=torch.uint8)
        for name, buffer in buffers.items():
            setattr(self._round, name, buffer.data_ptr())
        self._buffers = list(buffers.values())


def build_layers(
    config: ModelConfig, weights: ModelWeights, attention: Attention, ops: LayerOps, shard: Shard, cache_dir: Path
) -> NativeLayers | None:
    """None where something else than the native kernels computes a layer: then it is computed step by step."""
    matrices = [of_layer for layer in weights.layers if (of_layer := _matrices_of(layer)) is not None]
    is_native = isinstance(ops, NativeOps) and len(matrices) == len(weights.layers) and shard.tp_size == 1
    if not is_native or not isinstance(attention, NativeAttention):
        return None
    try:
        return NativeLayers(config, weights, matrices, attention, cache_dir)
    except NativeUnavailable as reason:
        log.warning("layers are computed step by step, decoding is slower: %s", reason)
        return None


def _matrices_of(layer: LayerWeights) -> LayerMatrices | None:
    """None where one of them is not the kernel's."""
    if not isinstance(layer.mlp, DenseMlp):
        return None
    matrices = (layer.qkv, layer.attention_output, layer.mlp.gate_up, layer.mlp.down)
    packed = [matrix for matrix in matrices if isinstance(matrix, QuantizedLinear) and matrix.packed is not None]
    return LayerMatrices(*packed) if len(packed) == len(matrices) else None


def _layer(layer: LayerWeights, matrices: LayerMatrices, plane_offsets: tuple[int, int]) -> _Layer:
    packed = {name: ctypes.pointer(matrix.packed) for name, matrix in matrices._asdict().items()}
    return _Layer(
        input_norm=layer.input_norm.data_ptr(),
        mlp_norm=layer.mlp_norm.data_ptr(),
        qk_norm=None if layer.qk_norm is None else layer.qk_norm.data_ptr(),
        k_offset=plane_offsets[0],
        v_offset=plane_offsets[1],
        **packed,
    )
