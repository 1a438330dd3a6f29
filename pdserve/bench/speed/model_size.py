"""What of a model decides how long its rounds must take: its weights as they are kept, the KV and work of a token."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pdserve.bench.speed.in_process import BLOCK_SIZE, kv_layout
from pdserve.config import Quantization
from pdserve.model.model_config import ModelConfig
from pdserve.model.quantized_linear import GROUP
from pdserve.model.weights import expected_shapes

# Of a weight, in the layers and in the head; as matrices.py has them.
BITS: dict[Quantization, tuple[int, int]] = {"fp32": (32, 32), "int8": (8, 8), "int4": (4, 8)}
# A group's scale and minimum.
HALVES_BYTES = 4


@dataclass(frozen=True, slots=True)
class Part:
    """Matrices whose weights are kept in so many bits each: floats where it is 32, else in groups with a scale."""

    num_weights: int
    bits: int

    @property
    def num_bytes(self) -> int:
        of_groups = 0 if self.bits == 32 else HALVES_BYTES * self.num_weights // GROUP
        return self.num_weights * self.bits // 8 + of_groups


@dataclass(frozen=True, slots=True)
class ModelSize:
    """kv_bytes: of a token. attention_ops: of a token with one in its sight, a product and its sum being two."""

    layers: Part
    head: Part
    kv_bytes: int
    attention_ops: int
    has_half_kv: bool

    @property
    def parts(self) -> tuple[Part, Part]:
        return self.layers, self.head

    @property
    def num_bytes(self) -> int:
        """Of all weights that a round multiplies by."""
        return sum(part.num_bytes for part in self.parts)


def model_size(config: ModelConfig, quantization: Quantization) -> ModelSize:
    """Of a model without experts."""
    assert config.experts is None, "which experts a round reads is up to its tokens"
    layer_bits, head_bits = BITS[quantization]
    layout = kv_layout(config, quantization)
    shapes = expected_shapes(config).items()
    in_layers = sum(math.prod(shape) for name, shape in shapes if ".layers." in name and len(shape) == 2)
    return ModelSize(
        layers=Part(in_layers, layer_bits),
        head=Part(config.vocab_size * config.hidden_size, head_bits),
        kv_bytes=layout.block_bytes // BLOCK_SIZE,
        attention_ops=4 * config.num_heads * config.head_dim * config.num_layers,
        has_half_kv=layout.dtype == "bfloat16",
    )
