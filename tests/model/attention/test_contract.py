"""What every attention backend promises, checked against dense attention over the same tokens."""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from pdserve.kv.layout import KVLayout
from pdserve.kv.storage import KVStorage, torch_dtype
from pdserve.model.attention.base import Attention
from pdserve.model.attention.native_cpu import NativeAttention
from pdserve.model.attention.torch_cpu import TorchAttention
from pdserve.model.batch import Batch

pytestmark = pytest.mark.usefixtures("two_threads")

LAYER = 1
Build = Callable[[KVStorage, int], Attention]
# Rows are (start, end): chunks with and without a prefix, single tokens, block edges, contexts cut into parts.
MIXED = [(0, 70), (130, 180), (30, 31), (511, 513), (0, 1), (64, 65), (0, 2)]


# What a CPU may lack, taken from this one.
FLAGS: dict[str, tuple[str, ...]] = {"native": (), "native, no avx512": ("-mno-avx512f",)}
BACKENDS = ["torch", *(FLAGS if platform.machine() == "x86_64" else ["native"])]


@pytest.fixture(params=BACKENDS)
def build(request: pytest.FixtureRequest, kernel_cache: Path) -> Build:
    if request.param == "torch":
        return TorchAttention
    flags = FLAGS[request.param]
    return lambda storage, num_heads: NativeAttention(storage, num_heads, kernel_cache / "native", "cc", *flags)


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def fill(storage: KVStorage, value: float | None = None) -> None:
    """The whole slab, with random numbers or one."""
    numbers = storage.slab.view(torch_dtype(storage.layout.dtype))
    _ = numbers.normal_() if value is None else numbers.fill_(value)


def assert_equal(found: Tensor, wanted: Tensor, dtype: str, batch: Batch, rtol: float = 1e-4) -> None:
    """Over bfloat16, queries and weights of rows of several tokens may be rounded as KV is: to 2^-8 of their size."""
    lengths = np.diff(batch.row_starts)
    is_single = torch.from_numpy(np.repeat(lengths == 1, lengths))
    exact = is_single if dtype == "bfloat16" else torch.ones_like(is_single)
    torch.testing.assert_close(found[exact], wanted[exact], rtol=rtol, atol=2e-6)
    torch.testing.assert_close(found[~exact], wanted[~exact], rtol=0, atol=2e-2)


def batch_of(rows: list[tuple[int, int]], storage: KVStorage, seed: int = 0) -> Batch:
    """Rows over random blocks, row r in slot r."""
    size = storage.layout.block_size
    ends = np.array([end for _, end in rows])
    lengths = ends - np.array([start for start, _ in rows])
    free = np.random.default_rng(seed).permutation(storage.num_blocks)
    tables = np.zeros((len(rows), -(-ends.max() // size)), np.int32)
    taken = 0
    for slot, end in enumerate(ends):
        count = -(-end // size)
        tables[slot, :count] = free[taken : taken + count]
        taken += count
    positions = np.concatenate([np.arange(start, end) for start, end in rows])
    blocks = tables[np.repeat(np.arange(len(rows)), lengths), positions // size].astype(np.int64)
    return Batch(
        tokens=positions,
        positions=positions,
        slot_mapping=blocks * size + positions % size,
        row_starts=np.concatenate(([0], np.cumsum(lengths))),
        context_lens=ends,
        slots=np.arange(len(rows)),
        sampled_rows=np.arange(len(rows)),
        block_tables=tables,
    )


def inputs(num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as views into one matrix, as the decoder makes them."""
    torch.manual_seed(num_tokens)
    heads = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim)
    q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    return q, k, v


def fill_prefixes(storage: KVStorage, batch: Batch) -> None:
    """Random KV at every position before a row's first token, NaN everywhere else: nobody may read that."""
    size = storage.layout.block_size
    fill(storage, torch.nan)
    starts = batch.context_lens - np.diff(batch.row_starts)
    for slot, start in enumerate(starts):
        positions = torch.arange(start)
        blocks = torch.from_numpy(batch.block_tables[slot]).long()[positions // size]
        for plane in ("k", "v"):
            random = torch.randn(int(start), storage.layout.num_kv_heads, storage.layout.head_dim)
            view = storage.view(LAYER, plane)
            view[blocks, :, positions % size] = random.to(view.dtype)


def dense(storage: KVStorage, batch: Batch, q: Tensor) -> Tensor:
    """The definition: gather each row's keys and values, mask, softmax."""
    layout, num_heads = storage.layout, q.shape[1]
    out = torch.empty(len(q), num_heads, layout.head_dim)
    for row in range(batch.num_rows):
        first, last = batch.row_starts[row], batch.row_starts[row + 1]
        end = int(batch.context_lens[row])
        blocks = torch.from_numpy(batch.block_tables[row, : layout.num_blocks_for(end)]).long()
        k, v = (
            storage.view(LAYER, plane)[blocks].transpose(0, 1).flatten(1, 2)[:, :end].float() for plane in ("k", "v")
        )
        k, v = (part.repeat_interleave(num_heads // layout.num_kv_heads, 0) for part in (k, v))
        scores = q[first:last].transpose(0, 1) @ k.transpose(1, 2) * layout.head_dim**-0.5
        hidden = torch.arange(end) > torch.arange(end - (last - first), end)[:, None]
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out[first:last] = (weights @ v).transpose(0, 1)
    return out.flatten(1)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size"),
    [(9, 3, 64, 64), (4, 4, 16, 16), (8, 2, 80, 32), (7, 1, 8, 64), (6, 2, 20, 16), (4, 1, 128, 128)],
)
def test_mixed_batches_equal_dense_attention(
    build: Build, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: str
) -> None:
    storage = KVStorage(KVLayout(2, num_kv_heads, head_dim, block_size, dtype), 100)
    batch = batch_of(MIXED, storage)
    fill_prefixes(storage, batch)
    attention = build(storage, num_heads)
    attention.plan(batch)
    q, k, v = inputs(batch.num_tokens, num_heads, num_kv_heads, head_dim)
    out = attention.run(LAYER, q, k, v)
    assert out.shape == (batch.num_tokens, num_heads * head_dim)
    assert_equal(out, dense(storage, batch, q), dtype, batch)


@pytest.mark.parametrize("rows", [[(2999, 3000)], [(2900, 2930)], [(2048, 2200)]], ids=["single", "short", "long"])
def test_long_contexts_equal_dense_attention(build: Build, rows: list[tuple[int, int]], dtype: str) -> None:
    storage = KVStorage(KVLayout(2, 1, 32, 64, dtype), 60)
    batch = batch_of(rows, storage)
    fill(storage)
    attention = build(storage, 3)
    attention.plan(batch)
    q, k, v = inputs(batch.num_tokens, 3, 1, 32)
    assert_equal(attention.run(LAYER, q, k, v), dense(storage, batch, q), dtype, batch)


def test_a_large_score_does_not_overflow(build: Build) -> None:
    storage = KVStorage(KVLayout(2, 1, 16, 16), 20)
    batch = batch_of([(0, 40), (100, 101)], storage)
    fill(storage)
    attention = build(storage, 2)
    attention.plan(batch)
    q, k, v = inputs(batch.num_tokens, 2, 1, 16)
    q, k = q * 40, k * 40
    torch.testing.assert_close(attention.run(LAYER, q, k, v), dense(storage, batch, q), rtol=1e-3, atol=1e-4)


def test_kv_is_written_where_the_slot_mapping_says_and_nowhere_else(build: Build, dtype: str) -> None:
    storage = KVStorage(KVLayout(3, 2, 16, 8, dtype), 30)
    batch = batch_of([(0, 19), (20, 21)], storage)
    fill(storage)
    before = storage.slab.clone()
    attention = build(storage, 4)
    attention.plan(batch)
    q, k, v = inputs(batch.num_tokens, 4, 2, 16)
    attention.run(LAYER, q, k, v)
    slots = torch.from_numpy(batch.slot_mapping)
    for plane, expected in (("k", k), ("v", v)):
        view = storage.view(LAYER, plane)
        assert torch.equal(view[slots // 8, :, slots % 8], expected.to(view.dtype))
        view[slots // 8, :, slots % 8] = 0
    old = KVStorage(storage.layout, storage.num_blocks)
    old.slab.copy_(before)
    for plane in ("k", "v"):
        old.view(LAYER, plane)[slots // 8, :, slots % 8] = 0
    assert torch.equal(storage.slab, old.slab)


def test_a_row_comes_out_the_same_whatever_else_is_in_the_batch(build: Build, dtype: str) -> None:
    storage = KVStorage(KVLayout(2, 3, 64, 64, dtype), 60)
    rows = [(40, 90), (1300, 1301), (0, 20), (700, 701)]
    batch = batch_of(rows, storage)
    fill(storage)
    q, k, v = inputs(batch.num_tokens, 9, 3, 64)
    attention = build(storage, 9)
    attention.plan(batch)
    together = attention.run(LAYER, q, k, v)
    for row in range(2):
        span = slice(int(batch.row_starts[row]), int(batch.row_starts[row + 1]))
        alone = Batch(
            tokens=batch.tokens[span],
            positions=batch.positions[span],
            slot_mapping=np.ascontiguousarray(batch.slot_mapping[span]),
            row_starts=np.array([0, span.stop - span.start]),
            context_lens=batch.context_lens[[row]],
            slots=batch.slots[[row]],
            sampled_rows=np.array([0]),
            block_tables=batch.block_tables,
        )
        attention.plan(alone)
        torch.testing.assert_close(attention.run(LAYER, q[span], k[span], v[span]), together[span], rtol=0, atol=1e-6)
