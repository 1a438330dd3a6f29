"""The memory behind a layout: one slab of blocks a rank, and the tensors kernels see inside it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pdserve.kv.layout import KVLayout


def num_blocks_in(memory_bytes: int, layout: KVLayout) -> int:
    """How many whole blocks fit in `memory_bytes`."""
    return memory_bytes // layout.block_bytes


class KVStorage:
    """The slab, uint8 [num_blocks, block_bytes], contiguous.

    It is left uninitialised, so that the system gives its memory out as blocks are first written; what was never
    written must never be read. It lives as long as this object, which transports and runners share; who may write
    which block when is decided elsewhere.
    """

    def __init__(self, layout: KVLayout, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}, a slab needs at least 1")
        self.layout = layout
        self.num_blocks = num_blocks
        self.slab: Tensor = torch.empty((num_blocks, layout.block_bytes), dtype=torch.uint8)
        self._bytes = self.slab.numpy()  # the same memory

    @property
    def data_ptr(self) -> int:
        return self.slab.data_ptr()

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.layout.block_bytes

    def copy_block(self, block: int, source: KVStorage, source_block: int) -> None:
        """Copy one block of another slab of the same layout here, in the calling thread and without its lock.

        Not by torch, which would start a team of compute threads for each thread that copies.
        """
        np.copyto(self._bytes[block], source._bytes[source_block])

    def view(self, layer: int, plane: str) -> Tensor:
        """The plane in every block: [num_blocks, *plane.shape] of the layout's dtype, strided over the slab.

        Raises KeyError for a plane the layout hasn't.
        """
        offset = self.layout.plane_offset(layer, plane)
        shape = next(p for p in self.layout.planes if p.name == plane)
        part = self.slab[:, offset : offset + shape.num_bytes]
        return part.view(torch_dtype(self.layout.dtype)).view(self.num_blocks, *shape.shape)


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a layout's dtype name."""
    return {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}[name]
