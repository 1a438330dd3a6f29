"""What form a model's matrices are kept in, by the setting that names it, and what is computed between them."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from torch import Tensor

from pdserve.config import Quantization
from pdserve.model.layer_ops import TORCH_OPS, LayerOps
from pdserve.model.linear import Linear
from pdserve.model.quantized_linear import Bits, QuantizedLinear, load_kernel


class Matrix(Protocol):
    """x [rows, in] -> x @ weight.T + bias [rows, out], in float32."""

    def __call__(self, x: Tensor) -> Tensor: ...


class Matrices:
    """Makes a model's matrices in one form. ops: for what is computed between them."""

    def __init__(self, quantization: Quantization, cache_dir: Path, ops: LayerOps = TORCH_OPS) -> None:
        """cache_dir: where the built kernel is kept."""
        self.ops = ops
        self._quantization = quantization
        self._kernel = load_kernel(cache_dir) if quantization != "fp32" else None

    def of_layer(self, weight: Tensor, bias: Tensor | None = None) -> Matrix:
        """Raises StartupError where the weights cannot be quantised."""
        match self._quantization:
            case "fp32":
                return Linear(weight, bias)
            case "int8":
                return self._quantized(weight, 8, bias)
            case "int4":
                return self._quantized(weight, 4, bias)

    def of_head(self, weight: Tensor) -> Matrix:
        """At least 8 bits: rounding here goes into the choice of the token, and published 4-bit files keep more too."""
        return Linear(weight) if self._quantization == "fp32" else self._quantized(weight, 8, None)

    def _quantized(self, weight: Tensor, bits: Bits, bias: Tensor | None) -> Matrix:
        return QuantizedLinear(weight, bits, bias, kernel=self._kernel)


UNQUANTISED = Matrices("fp32", Path())
