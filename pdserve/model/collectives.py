"""What the ranks that compute one model together tell each other within a forward.

Every rank of a group makes the same calls in the same order, in every round: a rank without rows of its own takes part
in the exchanges of experts, and of dense MLPs that are split over all, with none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from pdserve.model.rank_group import RankGroup
from pdserve.model.shard import WHOLE, Shard


class Collectives(Protocol):
    """Owned by the loop thread."""

    @property
    def shard(self) -> Shard:
        """This rank's place."""

    def add_up(self, x: Tensor) -> Tensor:
        """The sum over the tensor-parallel ranks, the same bits on each; x may be overwritten."""

    def join_columns(self, x: Tensor) -> Tensor:
        """[rows, columns] of each tensor-parallel rank, side by side in rank order: [rows, columns * tp_size]."""

    def exchange_counts(self, counts: Tensor) -> Tensor:
        """counts [ep_size, k] int64: row i goes to expert-parallel rank i; the rows that came, in rank order."""

    def exchange(self, rows: Tensor, num_sent: Sequence[int], num_received: Sequence[int]) -> Tensor:
        """rows [sum(num_sent), width]: the first num_sent[0] go to rank 0, and so on; [sum(num_received), width]."""

    def begin_forward(self, x: Tensor) -> None:
        """x [rows, ...]: this rank has so many rows in the forward, which gather_rows and sum_rows go by."""

    def gather_rows(self, x: Tensor) -> Tensor:
        """x [rows, width] of this rank, as in begin_forward -> those of all data-parallel ranks, in rank order."""

    def sum_rows(self, parts: Tensor) -> Tensor:
        """parts: a summand for each row of gather_rows -> [rows, width], the data-parallel ranks' sums for its own."""


class Alone:
    """One rank with the whole model: nobody to talk to."""

    shard = WHOLE

    def add_up(self, x: Tensor) -> Tensor:
        return x

    def join_columns(self, x: Tensor) -> Tensor:
        return x

    def exchange_counts(self, counts: Tensor) -> Tensor:
        return counts

    def exchange(self, rows: Tensor, num_sent: Sequence[int], num_received: Sequence[int]) -> Tensor:
        return rows

    def begin_forward(self, x: Tensor) -> None:
        pass

    def gather_rows(self, x: Tensor) -> Tensor:
        return x

    def sum_rows(self, parts: Tensor) -> Tensor:
        return parts


class Grid:
    """Several ranks. tp, ep: this rank's row and column of the grid, None where it is alone there."""

    def __init__(self, shard: Shard, tp: RankGroup | None, ep: RankGroup | None) -> None:
        assert (tp.size if tp else 1, ep.size if ep else 1) == (shard.tp_size, shard.ep_size), shard
        self.shard = shard
        self._tp = tp
        self._ep = ep
        self._num_rows: list[int] = []  # each data-parallel rank's in this forward

    def add_up(self, x: Tensor) -> Tensor:
        return x if self._tp is None else self._tp.sum(x)

    def join_columns(self, x: Tensor) -> Tensor:
        return x if self._tp is None else torch.cat(self._tp.gather(x), dim=1)

    def exchange_counts(self, counts: Tensor) -> Tensor:
        one_each = [1] * self.shard.ep_size
        return counts if self._ep is None else self._ep.exchange(counts, one_each, one_each)

    def exchange(self, rows: Tensor, num_sent: Sequence[int], num_received: Sequence[int]) -> Tensor:
        return rows if self._ep is None else self._ep.exchange(rows, num_sent, num_received)

    def begin_forward(self, x: Tensor) -> None:
        if self.shard.splits_dense_mlp:
            mine = torch.full((self.shard.ep_size, 1), len(x), device=x.device)
            self._num_rows = self.exchange_counts(mine).flatten().tolist()

    def gather_rows(self, x: Tensor) -> Tensor:
        if self._ep is None:
            return x
        num_ranks = self.shard.ep_size
        return self.exchange(x.repeat(num_ranks, 1), [len(x)] * num_ranks, self._num_rows)

    def sum_rows(self, parts: Tensor) -> Tensor:
        if self._ep is None:
            return parts
        num_own = self._num_rows[self.shard.ep_rank]
        came = self.exchange(parts, self._num_rows, [num_own] * self.shard.ep_size)
        total, *others = came.view(self.shard.ep_size, num_own, parts.shape[1]).unbind()
        for other in others:  # one after the other: a reduction's order may vary
            total = total + other
        return total
