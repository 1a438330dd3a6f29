"""Some of the ranks that compute one model, and what they give each other: over torch.distributed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class RankGroup(Protocol):
    """Every rank of the group makes the same calls in the same order. Owned by the loop thread.

    Calls raise ConnectionError where a rank is gone, TimeoutError where one says nothing for long.
    """

    @property
    def size(self) -> int: ...

    def sum(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, the same bits on each; x may be overwritten."""

    def gather(self, x: Tensor) -> list[Tensor]:
        """Each rank's x, of one shape and type, in rank order."""

    def exchange(self, rows: Tensor, num_sent: Sequence[int], num_received: Sequence[int]) -> Tensor:
        """rows [sum(num_sent), width]: the first num_sent[0] go to rank 0, and so on; [sum(num_received), width]."""


class DistributedGroup:
    """A process group of torch.distributed: gloo, or NCCL, whose tensors are on GPUs."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    @property
    def size(self) -> int:
        return self._group.size()

    def sum(self, x: Tensor) -> Tensor:
        x = x.contiguous()  # gloo takes a strided tensor's memory as it lies
        with _losses():
            dist.all_reduce(x, group=self._group)
        return x

    def gather(self, x: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(x) for _ in range(self.size)]
        with _losses():
            dist.all_gather(parts, x.contiguous(), group=self._group)
        return parts

    def exchange(self, rows: Tensor, num_sent: Sequence[int], num_received: Sequence[int]) -> Tensor:
        came = rows.new_empty((sum(num_received), *rows.shape[1:]))
        with _losses():
            dist.all_to_all_single(came, rows.contiguous(), list(num_received), list(num_sent), group=self._group)
        return came


@contextmanager
def _losses() -> Iterator[None]:
    """torch.distributed has one error for all that can happen to a connection, with many lines."""
    try:
        yield
    except RuntimeError as error:
        raise ConnectionError(str(error).strip().partition("\n")[0]) from error
