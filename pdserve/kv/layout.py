"""The shape of a KV block: what it holds, how many bytes it takes, and when two nodes' blocks are the same thing.

slab   [num_blocks, block_bytes]          one a rank; registered once for transfer
block  layer 0: plane k | plane v || layer 1: plane k | plane v || ...
plane  [kv_heads, block_size, head_dim]   HND; offsets are multiples of the element size
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Self

from pdserve.errors import StartupError

# One line of history a bump:
# 1  per layer k then v, HND, no padding.
LAYOUT_VERSION = 1

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def can_split_heads(num_kv_heads: int, tensor_parallel_size: int) -> bool:
    """Whether ranks get whole heads: as many each, or, where there are more ranks than heads, one that several hold."""
    if num_kv_heads < 1 or tensor_parallel_size < 1:
        return False
    return num_kv_heads % tensor_parallel_size == 0 or tensor_parallel_size % num_kv_heads == 0


def held_heads(num_kv_heads: int, tensor_parallel_size: int, rank: int) -> range:
    """The heads that a rank holds, where they can be split."""
    if tensor_parallel_size > num_kv_heads:
        head = rank // (tensor_parallel_size // num_kv_heads)
        return range(head, head + 1)
    per_rank = num_kv_heads // tensor_parallel_size
    return range(rank * per_rank, (rank + 1) * per_rank)


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
    """Dense attention's layout: planes k and v in each of num_layers layers. The whole model's, or one rank's shard."""

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

    def shard(self, tensor_parallel_size: int) -> Self:
        """The layout of each rank when this one's heads are split. Raises StartupError when they cannot be."""
        if not can_split_heads(self.num_kv_heads, tensor_parallel_size):
            raise StartupError(
                f"tensor_parallel_size is {tensor_parallel_size}, the model has {self.num_kv_heads} KV heads: "
                f"choose a divisor or a multiple of {self.num_kv_heads}"
            )
        return replace(self, num_kv_heads=len(held_heads(self.num_kv_heads, tensor_parallel_size, 0)))


# For nodes whose fingerprints differ.
PAIRING_REMEDY = "start both nodes with the same model, --quantization, --kv-cache-dtype and --block-size"


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What decides whether one node may read the other's blocks: all of it must be equal, but for how heads are split.

    model_revision: a digest of the weights, so that two versions of one model are never paired.
    num_kv_heads: the model's, not a rank's.
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

    @property
    def layout(self) -> KVLayout:
        """Of the whole model's blocks."""
        return KVLayout(self.num_layers, self.num_kv_heads, self.head_dim, self.block_size, self.dtype)

    def differences(self, other: Fingerprint) -> tuple[str, ...]:
        """One text a field that keeps the two apart, naming the field and both values (ours first)."""
        names = [f.name for f in fields(self) if f.name != "tensor_parallel_size"]
        named = [self._difference(name, other) for name in names if getattr(self, name) != getattr(other, name)]
        return (*named, *self._split_difference(other))

    def _split_difference(self, other: Fingerprint) -> tuple[str, ...]:
        """Unequal splits are read by head ranges, unless one of them is none."""
        sizes = (self.tensor_parallel_size, other.tensor_parallel_size)
        if sizes[0] == sizes[1] or all(can_split_heads(self.num_kv_heads, size) for size in sizes):
            return ()
        return (f"{self._difference('tensor_parallel_size', other)}: {self.num_kv_heads} KV heads are not split so",)

    def _difference(self, name: str, other: Fingerprint) -> str:
        return f"{name}: {getattr(self, name)!r} here, {getattr(other, name)!r} there"
