"""The slab and its views."""

from __future__ import annotations

import pytest
import torch

from pdserve.kv.layout import KVLayout
from pdserve.kv.storage import KVStorage, num_blocks_in

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=4, block_size=8)


def test_views_tile_every_block_without_gap_or_overlap() -> None:
    storage = KVStorage(LAYOUT, 5)
    storage.slab.zero_()
    for layer in range(LAYOUT.num_layers):
        for plane in ("k", "v"):
            view = storage.view(layer, plane)
            assert view.shape == (5, 2, 8, 4)
            assert view.dtype == torch.float32
            view += 1
    assert torch.equal(storage.slab.view(torch.float32), torch.ones(5, LAYOUT.block_bytes // 4))


def test_a_block_is_one_contiguous_piece_of_the_slab() -> None:
    storage = KVStorage(LAYOUT, 5)
    storage.slab.zero_()
    for layer in range(LAYOUT.num_layers):
        storage.view(layer, "k")[3] = 1.0
        storage.view(layer, "v")[3] = 1.0
    written = storage.slab.view(torch.float32).abs().sum(1)
    assert written.tolist() == [0, 0, 0, LAYOUT.block_bytes / 4, 0]


def test_views_lie_at_the_layouts_offsets() -> None:
    storage = KVStorage(LAYOUT, 2)
    view = storage.view(2, "v")
    assert view[1].data_ptr() == storage.data_ptr + LAYOUT.block_bytes + LAYOUT.plane_offset(2, "v")
    assert view[0].is_contiguous()


@pytest.mark.parametrize(("dtype", "torch_dtype"), [("float16", torch.float16), ("bfloat16", torch.bfloat16)])
def test_narrow_dtypes_take_half_the_bytes(dtype: str, torch_dtype: torch.dtype) -> None:
    layout = KVLayout(3, 2, 4, 8, dtype)
    assert layout.block_bytes * 2 == LAYOUT.block_bytes
    assert KVStorage(layout, 1).view(0, "k").dtype == torch_dtype


def test_only_whole_blocks_are_counted() -> None:
    assert num_blocks_in(LAYOUT.block_bytes * 3 - 1, LAYOUT) == 2
    assert KVStorage(LAYOUT, 2).num_bytes == 2 * LAYOUT.block_bytes


def test_a_slab_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="num_blocks is 0"):
        KVStorage(LAYOUT, 0)


def test_an_unknown_plane_is_refused() -> None:
    with pytest.raises(KeyError, match="scales"):
        KVStorage(LAYOUT, 1).view(0, "scales")
