"""The shape of a KV block: what it holds, how many bytes it takes, and when two nodes' blocks are the same thing.

slab   [num_blocks, block_bytes]          one a rank; registered once for transfer
block  layer 0: plane k | plane v || layer 1: plane k | plane v || ...
plane  [kv_heads, block_size, head_dim]   HND; offsets are multiples of the element size
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

# One line of history a bump:
# 1  per layer k then v, HND, no padding.
LAYOUT_VERSION = 1

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class Plane:
    """One named tensor of a layer's part of a block. head_axis: the axis that tensor parallelism splits, if any."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    head_axis: int | None

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Dense attention's layout: planes k and v in each of num_layers layers."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 64
    dtype: str = "float32"

    @property
    def planes(self) -> tuple[Plane, ...]:
        shape = (self.num_kv_heads, self.block_size, self.head_dim)
        return (Plane("k", shape, self.dtype, 0), Plane("v", shape, self.dtype, 0))

    @property
    def layer_bytes(self) -> int:
        return sum(plane.num_bytes for plane in self.planes)

    @property
    def block_bytes(self) -> int:
        return self.num_layers * self.layer_bytes

    def plane_offset(self, layer: int, name: str) -> int:
        """Bytes from the start of a block to the plane `name` of `layer`."""
        offset = layer * self.layer_bytes
        for plane in self.planes:
            if plane.name == name:
                return offset
            offset += plane.num_bytes
        raise KeyError(name)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Everything that must be equal on both ends before one node may read the other's blocks.

    model_revision: a digest of the weights, so that two versions of one model are never paired.
    """

    layout_version: int
    architecture: str
    model_revision: str
    dtype: str
    block_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tensor_parallel_size: int = 1

    def differences(self, other: Fingerprint) -> tuple[str, ...]:
        """One text a field that differs, naming the field and both values (ours first)."""
        return tuple(
            f"{f.name}: {getattr(self, f.name)!r} here, {getattr(other, f.name)!r} there"
            for f in fields(self)
            if getattr(self, f.name) != getattr(other, f.name)
        )
