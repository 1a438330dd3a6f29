"""A model's KV as bytes, and what each tensor-parallel rank holds of it: an oracle that knows no byte ranges."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pdserve.kv.layout import KVLayout

Bytes = npt.NDArray[np.uint8]


def model_kv(layout: KVLayout, num_blocks: int, seed: int = 1) -> Bytes:
    """[num_blocks, num_layers, planes, num_kv_heads, bytes of a head] of noise: every head differs from every other."""
    planes = layout.planes
    head_bytes = planes[0].num_bytes // layout.num_kv_heads
    shape = (num_blocks, layout.num_layers, len(planes), layout.num_kv_heads, head_bytes)
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def shard_of(kv: Bytes, tensor_parallel_size: int, rank: int) -> Bytes:
    """[num_blocks, block_bytes]: the slab of one rank."""
    copies = max(1, tensor_parallel_size // kv.shape[3])
    held = np.split(np.repeat(kv, copies, axis=3), tensor_parallel_size, axis=3)[rank]
    return held.reshape(len(kv), -1).copy()
