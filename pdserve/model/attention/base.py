"""What a decoder asks of an attention backend."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from pdserve.model.batch import Batch


class Attention(Protocol):
    """Causal attention over paged KV. Bound to one storage and one head geometry; used by the loop thread only."""

    def plan(self, batch: Batch) -> None:
        """Prepare for the layers of one round, once a round."""

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write the batch's K and V into their blocks, then attend: [num_tokens, num_heads * head_dim] float32.

        q: [num_tokens, num_heads, head_dim] float32, rotated; k, v: [num_tokens, num_kv_heads, head_dim]. Each is
        contiguous in its last two axes. A token at position p of its request sees positions [0, p].
        """
