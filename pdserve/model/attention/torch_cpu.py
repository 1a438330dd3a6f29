"""Paged attention in torch alone: the specification of the native kernel, and what runs where no compiler is.

It walks the context block by block with a running maximum and sum (online softmax, Milakov and Gimelshein 2018), so
that at most one block a row is copied at a time, never a context.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pdserve.kv.storage import KVStorage
from pdserve.model.batch import Batch


class TorchAttention:
    """Attention over `storage` of any dtype, computed in float32. Implements `Attention`."""

    def __init__(self, storage: KVStorage, num_heads: int) -> None:
        self._storage = storage
        self._group = num_heads // storage.layout.num_kv_heads
        self._scale = storage.layout.head_dim**-0.5
        self._batch: Batch | None = None

    def plan(self, batch: Batch) -> None:
        self._batch = batch

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batch, size = self._batch, self._storage.layout.block_size
        assert batch is not None, "plan comes before run"
        keys, values = self._storage.view(layer, "k"), self._storage.view(layer, "v")
        slots = torch.from_numpy(batch.slot_mapping)
        keys[slots // size, :, slots % size] = k.to(keys.dtype)
        values[slots // size, :, slots % size] = v.to(values.dtype)
        # [num_tokens, kv_heads, group, head_dim]
        grouped = q.view(len(q), -1, self._group, q.shape[-1]) * self._scale
        out = torch.empty_like(grouped, memory_format=torch.contiguous_format)
        # Rows of one token are stacked and walk their blocks together; a chunk is a walk of its own.
        lengths = batch.row_starts[1:] - batch.row_starts[:-1]
        single = [row for row in range(batch.num_rows) if lengths[row] == 1]
        if single:
            at = torch.from_numpy(batch.row_starts[single])
            out[at] = self._walk(batch, single, grouped[at].unsqueeze(3), keys, values).squeeze(3)
        for row in range(batch.num_rows):
            if lengths[row] > 1:
                span = slice(int(batch.row_starts[row]), int(batch.row_starts[row + 1]))
                chunk = grouped[span].permute(1, 2, 0, 3).unsqueeze(0)
                out[span] = self._walk(batch, [row], chunk, keys, values).squeeze(0).permute(2, 0, 1, 3)
        return out.flatten(1)

    def _walk(self, batch: Batch, rows: list[int], q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """q [rows, kv_heads, group, row_tokens, head_dim] against the rows' blocks; the same shape."""
        size, num_tokens = self._storage.layout.block_size, q.shape[3]
        ends = torch.from_numpy(batch.context_lens[rows])
        positions = ends[:, None] - num_tokens + torch.arange(num_tokens)  # [rows, row_tokens]
        tables = torch.from_numpy(batch.block_tables[batch.slots[rows]]).long()
        maximum = torch.full((*q.shape[:4], 1), -torch.inf)
        total = torch.zeros_like(maximum)
        out = torch.zeros_like(q)
        for block in range(-(-int(ends.max()) // size)):
            at = block * size + torch.arange(size)  # [block_size] positions of this block's keys
            live = torch.nonzero(ends > block * size).squeeze(1)
            ids = tables[live, block]
            k, v = keys[ids].float(), values[ids].float()  # [live, kv_heads, block_size, head_dim]
            written = (at < ends[live, None])[:, None, :, None]
            v = v.masked_fill(~written, 0.0)  # what was never written may be NaN, and 0 * NaN is NaN
            hidden = at > positions[live, :, None]  # [live, row_tokens, block_size]
            scores = torch.einsum("rhgtd,rhkd->rhgtk", q[live], k)
            scores = scores.masked_fill(hidden[:, None, None], -torch.inf)
            # Key 0 is in the first block and visible to all, so from there on every maximum is finite.
            peak = torch.maximum(maximum[live], scores.amax(-1, keepdim=True))
            kept = torch.exp(maximum[live] - peak)
            weights = torch.exp(scores - peak)
            total[live] = total[live] * kept + weights.sum(-1, keepdim=True)
            out[live] = out[live] * kept + torch.einsum("rhgtk,rhkd->rhgtd", weights, v)
            maximum[live] = peak
        return out / total
