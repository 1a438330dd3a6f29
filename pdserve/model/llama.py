"""The decoder of the Llama family: Llama, Mistral, SmolLM2, Qwen2 (q/k/v biases), Qwen3 (q/k norm)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from pdserve.model.attention.base import Attention
from pdserve.model.collectives import Alone, Collectives
from pdserve.model.layers import RotaryTable, rms_norm, rotate
from pdserve.model.model_config import ModelConfig
from pdserve.model.weights import LayerWeights, ModelWeights


class Llama:
    """A forward over a flat batch; KV lives in the attention's storage. Call `attention.plan` for the batch first."""

    def __init__(
        self, config: ModelConfig, weights: ModelWeights, attention: Attention, collectives: Collectives | None = None
    ) -> None:
        self._config = config
        self._weights = weights
        self._attention = attention
        self._collectives: Collectives = collectives or Alone()
        self._rotary = RotaryTable(config.rope, config.head_dim)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """tokens, positions [num_tokens] int64 -> normed hidden states [num_tokens, hidden]."""
        cos, sin = self._rotary.at(positions)
        x = F.embedding(tokens, self._weights.embedding)
        for index, layer in enumerate(self._weights.layers):
            x = x + self._attend(index, layer, x, cos, sin)
            x = x + layer.mlp(rms_norm(x, layer.mlp_norm, self._config.rms_norm_eps), self._collectives)
        return rms_norm(x, self._weights.final_norm, self._config.rms_norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [rows, hidden] -> [rows, vocab]."""
        return self._weights.lm_head(hidden)

    def _attend(self, index: int, layer: LayerWeights, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        config = self._config
        qkv = layer.qkv(rms_norm(x, layer.input_norm, config.rms_norm_eps))
        heads = qkv.view(len(qkv), -1, config.head_dim)  # [num_tokens, q heads then k heads then v heads, head_dim]
        qk, v = heads.tensor_split((config.num_heads + config.num_kv_heads,), dim=1)
        if layer.qk_norm is not None:
            qk = rms_norm(qk, layer.qk_norm, config.rms_norm_eps)
        q, k = rotate(qk, cos, sin).tensor_split((config.num_heads,), dim=1)
        return layer.attention_output(self._attention.run(index, q, k, v))
