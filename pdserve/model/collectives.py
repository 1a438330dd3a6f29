"""What the ranks that compute one model together tell each other within a forward.

Every rank of a group makes the same calls in the same order, in every round: a rank without rows of its own takes part
in the exchanges of experts, and of dense MLPs that are split over all, with none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

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
    """Ranks joined by torch.distributed. tp, ep: the process groups of this rank's row and column of the grid.

    The backend of the groups decides where tensors may lie: gloo's are on the CPU, NCCL's on GPUs.
    """

    def __init__(self, shard: Shard, tp: dist.ProcessGroup | None, ep: dist.ProcessGroup | None) -> None:
        assert (tp is None) == (shard.tp_size == 1), shard
        assert (ep is None) == (shard.ep_size == 1), shard
        self.shard = shard
        self._tp = tp
        self._ep = ep
        self._num_rows: list[int] = []  # each data-parallel rank's in this forward

    def add_up(self, x: Tensor) -> Tensor:
        if self._tp is None:
            return x
        x = x.contiguous()  # gloo takes a strided tensor's memory as it lies
        dist.all_reduce(x, group=self._tp)
        return x

    def join_columns(self, x: Tensor) -> Tensor:
        if self._tp is None:
            return x
        parts = [torch.empty_like(x) for _ in range(self.shard.tp_size)]
        dist.all_gather(parts, x.contiguous(), group=self._tp)
        return torch.cat(parts, dim=1)

    def exchange_counts(self, counts: Tensor) -> Tensor:
        if self._ep is None:
            return counts
        came = torch.empty_like(counts)
        dist.all_to_all_single(came, counts.contiguous(), group=self._ep)
        return came

    def exchange(self, rows: Tensor, num_sent: Sequence[int], num_received: Sequence[int]) -> Tensor:
        if self._ep is None:
            return rows
        came = rows.new_empty((sum(num_received), rows.shape[1]))
        dist.all_to_all_single(came, rows.contiguous(), list(num_received), list(num_sent), group=self._ep)
        return came

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
