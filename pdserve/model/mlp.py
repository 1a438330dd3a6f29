"""The second half of a decoder layer: what each token's hidden state goes through by itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from pdserve.model.collectives import Collectives
from pdserve.model.layer_ops import TORCH_OPS, LayerOps
from pdserve.model.matrices import Matrix


class Mlp(Protocol):
    """One layer's. Ranks that hold parts of it call it in the same round, whether they have rows or not."""

    @property
    def is_shared(self) -> bool:
        """Whether it takes part in exchanges between data-parallel ranks, so that a rank without rows calls it too."""

    def __call__(self, x: Tensor, collectives: Collectives) -> Tensor:
        """x [rows, hidden], normed -> what is added to the residual, [rows, hidden]."""


@dataclass(frozen=True, slots=True)
class DenseMlp:
    """down(silu(gate x) * up x), with gate and up stacked in one matrix."""

    gate_up: Matrix  # hidden -> 2 * intermediate
    down: Matrix  # intermediate -> hidden
    ops: LayerOps = TORCH_OPS

    @property
    def is_shared(self) -> bool:
        return False

    def __call__(self, x: Tensor, collectives: Collectives) -> Tensor:
        return collectives.add_up(gated(x, self.gate_up, self.down, self.ops))


@dataclass(frozen=True, slots=True)
class SplitMlp:
    """A DenseMlp of which every process of the group holds a slice: each computes its slice for everybody's rows.

    A row's answer is a sum over the slices in the order of the ranks, whoever's rows are computed beside it.
    """

    gate_up: Matrix  # hidden -> 2 * the slice of intermediate
    down: Matrix  # the slice of intermediate -> hidden
    ops: LayerOps = TORCH_OPS

    @property
    def is_shared(self) -> bool:
        return True

    def __call__(self, x: Tensor, collectives: Collectives) -> Tensor:
        parts = gated(collectives.gather_rows(x), self.gate_up, self.down, self.ops)
        return collectives.add_up(collectives.sum_rows(parts))


def gated(x: Tensor, gate_up: Matrix, down: Matrix, ops: LayerOps) -> Tensor:
    """A gated MLP, or a tensor-parallel rank's part of its sum."""
    return down(ops.silu_and_multiply(gate_up(x)))
