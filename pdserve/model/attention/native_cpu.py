"""Paged attention in a C kernel (kernels/paged_attention.h), built on first use with the machine's own compiler."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pdserve.kv.storage import KVStorage
from pdserve.model.batch import Batch, Ints
from pdserve.model.native_build import KERNELS, NativeUnavailable, load_library

SOURCE = KERNELS / "paged_attention.c"
# Limits of the kernel's scratch.
MAX_LINES = 64
MAX_HEAD_DIM = 256
# Keys of one item where a tile's context is cut, to keep every thread busy: always at the same places, so that a row's
# result does not depend on what else is in the batch.
SPLIT_KEYS = 512
# A row of this many tiles is work enough for all threads without cutting its context.
MANY_TILES = 4


# ---------------------------------------------------------------- calling


class Call(ctypes.Structure):
    """call_t of paged_attention.h, field by field."""

    _fields_ = [
        ("slab", ctypes.c_void_p),
        ("block_bytes", ctypes.c_int64),
        ("k_offset", ctypes.c_int64),
        ("v_offset", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("group", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("is_half", ctypes.c_int64),
        ("q", ctypes.c_void_p),
        ("k", ctypes.c_void_p),
        ("v", ctypes.c_void_p),
        ("q_stride", ctypes.c_int64),
        ("k_stride", ctypes.c_int64),
        ("v_stride", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("slot_mapping", ctypes.c_void_p),
        ("num_tokens", ctypes.c_int64),
        ("block_tables", ctypes.c_void_p),
        ("block_table_stride", ctypes.c_int64),
        ("items", ctypes.c_void_p),
        ("num_items", ctypes.c_int64),
        ("merges", ctypes.c_void_p),
        ("num_merges", ctypes.c_int64),
        ("partials", ctypes.c_void_p),
        ("num_partials", ctypes.c_int64),
        ("num_threads", ctypes.c_int64),
        ("scale", ctypes.c_float),
    ]


class NativeAttention:
    """Attention over a `storage` of float32 or bfloat16 by the C kernel, without the GIL. Implements `Attention`.

    Raises NativeUnavailable when it can't be built or the heads are of a shape the kernel has no scratch for.
    """

    def __init__(
        self, storage: KVStorage, num_heads: int, cache_dir: Path, compiler: str = "cc", *extra_flags: str
    ) -> None:
        layout = storage.layout
        self._storage = storage
        self._group = num_heads // layout.num_kv_heads
        if layout.dtype not in ("float32", "bfloat16") or layout.head_dim > MAX_HEAD_DIM or self._group > MAX_LINES:
            raise NativeUnavailable(
                f"the kernel takes float32 or bfloat16 KV, head_dim up to {MAX_HEAD_DIM} and {MAX_LINES} query "
                f"heads a kv head; the model has {layout.dtype}, {layout.head_dim} and {self._group}"
            )
        library = load_library(SOURCE, "pdserve_paged_attention", cache_dir, compiler, *extra_flags)
        self._run = library.pdserve_paged_attention
        self._run.argtypes, self._run.restype = [ctypes.POINTER(Call)], None
        # As the last plan has it; what differs by layer is filled in by `run`.
        self.call = Call(
            slab=storage.data_ptr,
            block_bytes=layout.block_bytes,
            block_size=layout.block_size,
            num_kv_heads=layout.num_kv_heads,
            group=self._group,
            head_dim=layout.head_dim,
            is_half=layout.dtype == "bfloat16",
            scale=layout.head_dim**-0.5,
        )
        # What the call points into, kept alive between plan and run.
        self._kept: tuple[object, ...] = ()

    def plan(self, batch: Batch) -> None:
        layout, call = self._storage.layout, self.call
        items, merges, num_partials = plan_items(batch, self._group)
        partials = torch.empty(layout.num_kv_heads * num_partials * (layout.head_dim + 2), dtype=torch.float32)
        self._kept = (items, merges, partials, batch)
        call.slot_mapping, call.num_tokens = batch.slot_mapping.ctypes.data, batch.num_tokens
        call.block_tables, call.block_table_stride = batch.block_tables.ctypes.data, batch.block_tables.shape[1]
        call.items, call.num_items = items.ctypes.data, len(items)
        call.merges, call.num_merges = merges.ctypes.data, len(merges)
        call.partials, call.num_partials = partials.data_ptr(), num_partials
        call.num_threads = torch.get_num_threads()

    def plane_offsets(self, layer: int) -> tuple[int, int]:
        """Bytes from a block's start to the layer's keys and to its values."""
        layout = self._storage.layout
        return layout.plane_offset(layer, "k"), layout.plane_offset(layer, "v")

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        call = self.call
        out = torch.empty((q.shape[0], q.shape[1] * q.shape[2]), dtype=torch.float32)
        call.k_offset, call.v_offset = self.plane_offsets(layer)
        call.q, call.q_stride = q.data_ptr(), q.stride(0)
        call.k, call.k_stride = k.data_ptr(), k.stride(0)
        call.v, call.v_stride = v.data_ptr(), v.stride(0)
        call.out = out.data_ptr()
        self._run(ctypes.byref(call))
        return out


# ---------------------------------------------------------------- planning


def plan_items(batch: Batch, group: int) -> tuple[Ints, Ints, int]:
    """The kernel's work for one round: items [n, 7] and merges [m, 4] (item_t, merge_t), and partial lines a kv head.

        row      a chunk of 50 tokens after a prefix of 1000, group 3
        tiles    [1000, 1021) [1021, 1042) [1042, 1050)      21 tokens = 63 lines each
        items    a tile x [0, 512) [512, 1021)               the last part takes the rest, so that none is tiny

    Items that cost most come first, as threads take them in order.
    """
    tile_tokens = max(1, MAX_LINES // group)
    lengths = np.diff(batch.row_starts)
    # tiles: rows cut along their tokens
    tiles_of_row = -(-lengths // tile_tokens)
    row = np.repeat(np.arange(batch.num_rows), tiles_of_row)
    offset = _index_in_run(tiles_of_row) * tile_tokens
    num_tokens = np.minimum(tile_tokens, lengths[row] - offset)
    first_token = batch.row_starts[row] + offset
    first_position = batch.context_lens[row] - lengths[row] + offset
    context = first_position + num_tokens
    # items: tiles cut along their keys
    parts = np.where(tiles_of_row[row] < MANY_TILES, np.maximum(1, context // SPLIT_KEYS), 1)
    lines = np.where(parts > 1, parts * num_tokens * group, 0)
    first_line = np.cumsum(lines) - lines
    tile, part = np.repeat(np.arange(len(row)), parts), _index_in_run(parts)
    key_begin = part * SPLIT_KEYS
    key_end = np.where(part == parts[tile] - 1, context[tile], key_begin + SPLIT_KEYS)
    partial = np.where(parts[tile] > 1, first_line[tile] + part * num_tokens[tile] * group, -1)
    columns = (first_token[tile], num_tokens[tile], first_position[tile], key_begin, key_end)
    items = np.stack((*columns, batch.slots[row[tile]], partial), axis=1)
    split = np.flatnonzero(parts > 1)
    merges = np.stack((first_token[split], num_tokens[split], first_line[split], parts[split]), axis=1)
    order = np.argsort(-(items[:, 1] * (key_end - key_begin)), kind="stable")
    return np.ascontiguousarray(items[order]), np.ascontiguousarray(merges), int(lines.sum())


def _index_in_run(counts: Ints) -> Ints:
    """[2, 3] -> [0, 1, 0, 1, 2]"""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
