"""The pieces of a decoder layer, each a function of tensors. Everything is float32."""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.model.model_config import DefaultRope, LinearRope, Llama3Rope, Rope, YarnRope


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x over the root of its mean square along the last axis, times weight (which may have more axes of x)."""
    if weight.dim() == 1:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x, weight.shape[-1:], None, eps) * weight


# ---------------------------------------------------------------- rotary embeddings


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + head_dim / 2). x [num_tokens, heads, head_dim]; cos, sin [num_tokens, 1, head_dim / 2]."""
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out[..., half:]).addcmul_(first, sin)
    return out


class RotaryTable:
    """cos and sin of a rope for any position, computed for the positions of a round."""

    def __init__(self, rope: Rope, head_dim: int) -> None:
        self._frequencies = inverse_frequencies(rope, head_dim)
        self._scale = attention_scale(rope)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [num_tokens] -> cos, sin [num_tokens, 1, head_dim / 2]."""
        angles = positions.to(torch.float32)[:, None, None] * self._frequencies
        return angles.cos() * self._scale, angles.sin() * self._scale


@functools.singledispatch
def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Radians a position, [head_dim / 2], in float32 all along: at far positions the rounding shows."""
    raise TypeError(f"no such rope: {rope!r}")


@inverse_frequencies.register
def _(rope: DefaultRope, head_dim: int) -> Tensor:
    return _unscaled(rope.theta, head_dim)


@inverse_frequencies.register
def _(rope: LinearRope, head_dim: int) -> Tensor:
    return _unscaled(rope.theta, head_dim) / rope.factor


@inverse_frequencies.register
def _(rope: Llama3Rope, head_dim: int) -> Tensor:
    unscaled = _unscaled(rope.theta, head_dim)
    wavelengths = 2 * math.pi / unscaled
    turns = rope.original_max_position_embeddings / wavelengths
    kept = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return (1 - kept) * unscaled / rope.factor + kept * unscaled


@inverse_frequencies.register
def _(rope: YarnRope, head_dim: int) -> Tensor:
    unscaled = _unscaled(rope.theta, head_dim)

    def dimension_of(turns: float) -> float:
        """Which dimension makes `turns` turns over the original context."""
        per_turn = rope.original_max_position_embeddings / (turns * 2 * math.pi)
        return head_dim * math.log(per_turn) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    # A ramp of no width would divide by zero; this one is a step.
    width = (high - low) or 0.001
    scaled = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return scaled * unscaled / rope.factor + (1 - scaled) * unscaled


def _unscaled(theta: float, head_dim: int) -> Tensor:
    return 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)


def attention_scale(rope: Rope) -> float:
    """What cos and sin are multiplied by: 1, but for YaRN."""
    if not isinstance(rope, YarnRope):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _yarn_scale(rope.factor, rope.mscale) / _yarn_scale(rope.factor, rope.mscale_all_dim)
    return _yarn_scale(rope.factor, 1.0)


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
