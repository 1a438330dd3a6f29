"""The decoder of the Llama family: Llama, Mistral, SmolLM2, Qwen2 (q/k/v biases), Qwen3 (q/k norm)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from pdserve.model.attention.base import Attention
from pdserve.model.collectives import Alone, Collectives
from pdserve.model.layer_ops import TORCH_OPS, LayerOps
from pdserve.model.layers import RotaryTable
from pdserve.model.model_config import ModelConfig
from pdserve.model.native_layers import NativeLayers
from pdserve.model.slices import slices_of
from pdserve.model.weights import LayerWeights, ModelWeights


class Llama:
    """A forward over a flat batch; KV lives in the attention's storage. Call `attention.plan` for the batch first."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        attention: Attention,
        collectives: Collectives | None = None,
        ops: LayerOps = TORCH_OPS,
        native: NativeLayers | None = None,
    ) -> None:
        """weights: what `collectives.shard` holds of them; attention: over that rank's heads. native: its layers in one
        call; None computes them step by step."""
        self._config = config
        self._weights = weights
        self._attention = attention
        self._ops = ops
        self._native = native
        self._collectives: Collectives = collectives or Alone()
        self._slices = slices_of(config, self._collectives.shard)
        self._rotary = RotaryTable(config.rope, config.head_dim)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """tokens, positions [num_tokens] int64 -> normed hidden states [num_tokens, hidden], the same on every rank."""
        cos, sin = self._rotary.at(positions)
        x = self._embed(tokens)
        self._collectives.begin_forward(x)
        return self._step_by_step(x, cos, sin) if self._native is None else self._native.run(x, cos, sin)

    def _step_by_step(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The layers and the last norm. x is overwritten."""
        delta = None
        for index, layer in enumerate(self._weights.layers):
            delta = self._attend(index, layer, self._add_and_norm(x, delta, layer.input_norm), cos, sin)
            delta = layer.mlp(self._add_and_norm(x, delta, layer.mlp_norm), self._collectives)
        return self._add_and_norm(x, delta, self._weights.final_norm)

    def idle_forward(self) -> None:
        """A forward without rows, in a round in which other data-parallel ranks have some: its exchanges."""
        nothing = self._weights.final_norm.new_empty((0, self._config.hidden_size))
        self._collectives.begin_forward(nothing)
        for layer in self._weights.layers:
            if layer.mlp.is_shared:
                layer.mlp(nothing, self._collectives)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [rows, hidden] -> [rows, vocab], on every rank; each of them must call it."""
        logits = self._collectives.join_columns(self._weights.lm_head(hidden))
        return logits[:, : self._config.vocab_size]

    def _add_and_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor) -> Tensor:
        """x += delta, then its norm."""
        return self._ops.add_and_norm(x, delta, weight, self._config.rms_norm_eps)

    def _embed(self, tokens: Tensor) -> Tensor:
        table = self._weights.embedding
        if self._collectives.shard.tp_size == 1:
            return F.embedding(tokens, table)
        held = self._slices.vocabulary
        is_absent = (tokens < held.start) | (tokens >= held.stop)
        x = F.embedding((tokens - held.start).masked_fill_(is_absent, 0), table)
        return self._collectives.add_up(x.masked_fill_(is_absent[:, None], 0.0))

    def _attend(self, index: int, layer: LayerWeights, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        config, num_heads, num_kv_heads = self._config, len(self._slices.heads), len(self._slices.kv_heads)
        qkv = layer.qkv(x)
        heads = qkv.view(len(qkv), -1, config.head_dim)  # [num_tokens, q heads then k heads then v heads, head_dim]
        qk, v = heads.tensor_split((num_heads + num_kv_heads,), dim=1)
        if layer.qk_norm is not None:
            qk = self._ops.norm_heads(qk, layer.qk_norm, config.rms_norm_eps)
        q, k = self._ops.rotate(qk, cos, sin).tensor_split((num_heads,), dim=1)
        return self._collectives.add_up(layer.attention_output(self._attention.run(index, q, k, v)))
