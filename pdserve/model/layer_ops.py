"""The small operations between a layer's products: by torch, which is what they mean, or by a C kernel in one pass.

A decode round of one row makes some 16 of torch's calls a layer for them, which together take longer than its products.
"""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.model.layers import rms_norm, rotate
from pdserve.model.native_build import KERNELS, NativeUnavailable, load_library

log = logging.getLogger(__name__)

SOURCE = KERNELS / "layer_ops.c"


class LayerOps(Protocol):
    """Tensors are float32. A row's result does not depend on the rows beside it."""

    def add_and_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """x [rows, width] += delta, in place; then layers.rms_norm of it."""

    def norm_heads(self, heads: Tensor, weights: Tensor, eps: float) -> Tensor:
        """layers.rms_norm of heads [rows, heads, head_dim], which may be overwritten; weights [heads, head_dim]."""

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """layers.rotate of heads [rows, heads, head_dim], which may be overwritten."""

    def silu_and_multiply(self, gate_up: Tensor) -> Tensor:
        """gate_up [rows, 2 * width] -> silu(the first half) * the second half, [rows, width]."""


class TorchOps:
    """What the operations mean."""

    def add_and_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        if delta is not None:
            x += delta
        return rms_norm(x, weight, eps)

    def norm_heads(self, heads: Tensor, weights: Tensor, eps: float) -> Tensor:
        return rms_norm(heads, weights, eps)

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rotate(heads, cos, sin)

    def silu_and_multiply(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)


class NativeOps:
    """By layer_ops.c, which runs without the GIL."""

    def __init__(self, cache_dir: Path, compiler: str = "cc") -> None:
        """Built under `cache_dir`/native where needed. Raises NativeUnavailable."""
        library = load_library(SOURCE, "pdserve_add_and_norm", cache_dir / "native", compiler)
        pointer, count = ctypes.c_void_p, ctypes.c_int64
        self._add_and_norm = library.pdserve_add_and_norm
        self._add_and_norm.argtypes = [pointer, pointer, pointer, pointer, count, count, ctypes.c_float, count]
        self._norm_heads = library.pdserve_norm_heads
        self._norm_heads.argtypes = [pointer, count, pointer, count, count, count, ctypes.c_float, count]
        self._rotate = library.pdserve_rotate
        self._rotate.argtypes = [pointer, count, pointer, pointer, count, count, count, count]
        self._silu_and_multiply = library.pdserve_silu_and_multiply
        self._silu_and_multiply.argtypes = [pointer, pointer, count, count, count]
        for function in (self._add_and_norm, self._norm_heads, self._rotate, self._silu_and_multiply):
            function.restype = None

    def add_and_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        assert x.is_contiguous(), x.stride()
        assert weight.is_contiguous(), weight.stride()
        delta = None if delta is None else delta.contiguous()
        normed = torch.empty_like(x)
        added = None if delta is None else delta.data_ptr()
        pointers = x.data_ptr(), added, weight.data_ptr(), normed.data_ptr()
        self._add_and_norm(*pointers, len(x), x.shape[1], eps, torch.get_num_threads())
        return normed

    def norm_heads(self, heads: Tensor, weights: Tensor, eps: float) -> Tensor:
        assert heads.stride()[1:] == (heads.shape[2], 1), heads.stride()
        assert weights.is_contiguous(), weights.stride()
        pointers = heads.data_ptr(), heads.stride(0), weights.data_ptr()
        self._norm_heads(*pointers, *heads.shape, eps, torch.get_num_threads())
        return heads

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        num_rows, num_heads, head_dim = heads.shape
        assert heads.stride()[1:] == (head_dim, 1), heads.stride()
        cos, sin = cos.contiguous(), sin.contiguous()
        pointers = heads.data_ptr(), heads.stride(0), cos.data_ptr(), sin.data_ptr()
        self._rotate(*pointers, num_rows, num_heads, head_dim // 2, torch.get_num_threads())
        return heads

    def silu_and_multiply(self, gate_up: Tensor) -> Tensor:
        gate_up = gate_up.contiguous()
        num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(num_rows, width)
        self._silu_and_multiply(gate_up.data_ptr(), out.data_ptr(), num_rows, width, torch.get_num_threads())
        return out


TORCH_OPS: LayerOps = TorchOps()


def build_ops(cache_dir: Path, compiler: str = "cc") -> LayerOps:
    """The kernel's (kept in `cache_dir`/native), or torch's where it can't be had, with one log line that says why."""
    try:
        return NativeOps(cache_dir, compiler)
    except NativeUnavailable as reason:
        log.warning("torch takes a layer's small steps one by one, decoding is slower: %s", reason)
        return TORCH_OPS
