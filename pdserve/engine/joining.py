"""A rank process finds the others of its group, through torch.distributed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from pdserve.engine.group import NUM_INTEGERS, Gather
from pdserve.engine.launch import GridSpec
from pdserve.errors import StartupError
from pdserve.model.collectives import Alone, Collectives, Grid
from pdserve.model.shard import Shard

# The front ends a group that has lost a rank or stands still long before this: it is for a front that is gone too.
LOST_S = 1800.0


@dataclass(frozen=True, slots=True)
class Joined:
    """collectives: of the model. gather: of the rounds, where there is more than one data-parallel rank."""

    collectives: Collectives
    gather: Gather | None

    def least(self, number: int) -> int:
        """The smallest `number` of all ranks; each of them asks."""
        if not dist.is_initialized():
            return number
        found = torch.tensor([number])
        dist.all_reduce(found, dist.ReduceOp.MIN)
        return int(found)


def join(spec: GridSpec, *, timeout_s: float) -> Joined:
    """Blocks until every rank of the grid is here. Raises StartupError after timeout_s."""
    if spec.num_ranks == 1:
        return Joined(Alone(), None)
    try:
        dist.init_process_group(
            "gloo",
            init_method=spec.init_method,
            rank=spec.rank,
            world_size=spec.num_ranks,
            timeout=timedelta(seconds=timeout_s),
        )
        tp, ep = _groups_of(spec)
    except (RuntimeError, ValueError) as error:
        raise StartupError(
            f"rank {spec.rank} of {spec.num_ranks} did not find the others within {timeout_s:.0f} s: {error}; look at "
            "their logs, or raise --startup-timeout-s"
        ) from error
    shard = Shard(
        tp_size=spec.tensor_parallel_size,
        tp_rank=spec.tp_rank,
        ep_size=spec.data_parallel_size,
        ep_rank=spec.dp_rank,
        splits_dense_mlp=spec.splits_dense_mlp,
    )
    return Joined(Grid(shard, tp, ep), _gather(ep, spec.data_parallel_size) if ep is not None else None)


def _groups_of(spec: GridSpec) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """This rank's row and column of the grid. Every rank makes every group, in the same order."""
    tp_size, lost = spec.tensor_parallel_size, timedelta(seconds=LOST_S)
    ranks = range(spec.num_ranks)
    rows = [ranks[first : first + tp_size] for first in ranks[::tp_size]]
    columns = [ranks[first::tp_size] for first in range(tp_size)]
    tp = [dist.new_group(list(row), timeout=lost) if tp_size > 1 else None for row in rows]
    ep = [dist.new_group(list(column), timeout=lost) if len(rows) > 1 else None for column in columns]
    return tp[spec.dp_rank], ep[spec.tp_rank]


def _gather(group: dist.ProcessGroup, num_ranks: int) -> Gather:
    """Over memory that is made once, as a round pays for each allocation."""
    mine = torch.zeros(NUM_INTEGERS, dtype=torch.int64)
    all_ranks = torch.zeros(num_ranks * NUM_INTEGERS, dtype=torch.int64)
    lines = all_ranks.view(num_ranks, NUM_INTEGERS)
    mine_ints = mine.numpy()

    def gather(integers: Sequence[int]) -> Sequence[Sequence[int]]:
        mine_ints[:] = integers
        dist.all_gather_single(all_ranks, mine, group=group)
        said: list[list[int]] = lines.tolist()
        return said

    return gather
