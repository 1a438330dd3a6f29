"""Matrices that activations are multiplied by, in the order that oneDNN's kernels read them.

`F.linear` goes through a GEMM that packs the whole matrix anew in each call: for the few rows of a decode round that
takes most of the time, two to three times what the product needs. Packed once, a row's result is also the same bits
whoever shares its round, so that an answer does not depend on the others that are served beside it.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

log = logging.getLogger(__name__)

# Rows that the order is chosen for; it serves every number of them.
TYPICAL_ROWS = 8
# One row alone takes another kernel, which is slower than two rows are, and rounds differently.
FEWEST_ROWS = 2


class Linear:
    """x -> x @ weight.T + bias, in float32. The weight is copied, and not kept."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """weight [out, in], bias [out]."""
        self._bias = bias
        self._packed = _pack(weight) if is_packing_possible() else None
        self._weight = weight if self._packed is None else None

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, in] -> [rows, out]."""
        if self._packed is None:
            assert self._weight is not None
            return F.linear(x, self._weight, self._bias)
        num_rows = len(x)
        if 0 < num_rows < FEWEST_ROWS:
            return _multiply(x.expand(FEWEST_ROWS, -1), self._packed, self._bias)[:num_rows]
        return _multiply(x, self._packed, self._bias)


@functools.cache
def is_packing_possible() -> bool:
    """Whether this torch has oneDNN and the operators that torch.compile uses of it, which are not documented."""
    weight, x = torch.eye(4)[:3] + 1.0, torch.arange(8.0).view(2, 4)
    try:
        found = _multiply(x, _pack(weight), None)
    except (AttributeError, RuntimeError, TypeError) as error:
        log.warning("matrices are not packed, decoding is slower: this torch's oneDNN refuses (%s)", error)
        return False
    return torch.equal(found, F.linear(x, weight))


def _pack(weight: Tensor) -> Any:
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), TYPICAL_ROWS)


def _multiply(x: Tensor, packed: Any, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return product
