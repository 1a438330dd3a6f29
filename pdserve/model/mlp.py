"""The second half of a decoder layer: what each token's hidden state goes through by itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from pdserve.model.collectives import Collectives
from pdserve.model.linear import Linear


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

    gate_up: Linear  # hidden -> 2 * intermediate
    down: Linear  # intermediate -> hidden

    @property
    def is_shared(self) -> bool:
        return False

    def __call__(self, x: Tensor, collectives: Collectives) -> Tensor:
        return collectives.add_up(gated(x, self.gate_up, self.down))


@dataclass(frozen=True, slots=True)
class SplitMlp:
    """A DenseMlp of which every process of the group holds a slice: each computes its slice for everybody's rows.

    A row's answer is a sum over the slices in the order of the ranks, whoever's rows are computed beside it.
    """

    gate_up: Linear  # hidden -> 2 * the slice of intermediate
    down: Linear  # the slice of intermediate -> hidden

    @property
    def is_shared(self) -> bool:
        return True

    def __call__(self, x: Tensor, collectives: Collectives) -> Tensor:
        parts = gated(collectives.gather_rows(x), self.gate_up, self.down)
        return collectives.add_up(collectives.sum_rows(parts))


def gated(x: Tensor, gate_up: Linear, down: Linear) -> Tensor:
    """A gated MLP, or a tensor-parallel rank's part of its sum."""
    gate, up = gate_up(x).chunk(2, dim=-1)
    return down(F.silu(gate).mul_(up))
