"""Forms of a model's matrices: what each rounds, what a head keeps, and that a model computes with them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from pdserve.config import Quantization
from pdserve.model.linear import Linear
from pdserve.model.matrices import UNQUANTISED, Matrices
from pdserve.model.quantized_linear import QuantizedLinear


def weight_of(num_out: int = 96, num_in: int = 128) -> Tensor:
    return torch.randn(num_out, num_in, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("quantization", "within"), [("fp32", 1e-5), ("int8", 0.01), ("int4", 0.08)])
def test_products_are_rounded_as_far_as_the_form_says(
    kernel_cache: Path, quantization: Quantization, within: float
) -> None:
    weight, x = weight_of(), torch.randn(5, 128, generator=torch.Generator().manual_seed(2))
    exact = x.double() @ weight.double().T
    found = Matrices(quantization, kernel_cache).of_layer(weight)(x)
    error = ((found - exact).norm() / exact.norm()).item()
    assert error < within
    if quantization != "fp32":  # it is quantised: the error is not float32's
        assert error > within / 10


def test_a_head_keeps_8_bits_beside_layers_of_4(kernel_cache: Path) -> None:
    matrices, weight = Matrices("int4", kernel_cache), weight_of()
    layer, head = matrices.of_layer(weight), matrices.of_head(weight)
    assert isinstance(layer, QuantizedLinear)
    assert isinstance(head, QuantizedLinear)
    # Codes of so many bits, and a scale and a minimum of 16 bits each for 32 of them.
    assert (layer.num_bytes, head.num_bytes) == (weight.numel() * 5 // 8, weight.numel() * 9 // 8)


def test_unquantised_matrices_are_float32() -> None:
    assert isinstance(UNQUANTISED.of_layer(weight_of()), Linear)
    assert isinstance(UNQUANTISED.of_head(weight_of()), Linear)
