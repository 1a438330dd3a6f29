"""A rank process finds the others of its group: in a directory of its machine, else through torch.distributed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from pdserve.engine.group import NUM_INTEGERS, Gather
from pdserve.engine.launch import GridSpec
from pdserve.errors import StartupError
from pdserve.model.collectives import Alone, Collectives, Grid
from pdserve.model.local_group import meet
from pdserve.model.rank_group import DistributedGroup, RankGroup
from pdserve.model.shard import Shard

# The front ends a group that has lost a rank or stands still long before this: it is for a front that is gone too.
LOST_S = 1800.0


@dataclass(frozen=True, slots=True)
class Joined:
    """collectives: of the model. tp, ep: this rank's row and column of the grid, None where it is alone there."""

    collectives: Collectives
    tp: RankGroup | None
    ep: RankGroup | None

    def least(self, number: int) -> int:
        """The smallest `number` of all ranks; each of them asks."""
        for group in filter(None, (self.tp, self.ep)):
            number = min(int(one) for one in group.gather(torch.tensor([number])))
        return number

    @property
    def gather(self) -> Gather:
        """Of the rounds."""
        group = self.ep
        assert group is not None
        mine = torch.zeros(NUM_INTEGERS, dtype=torch.int64)  # made once, as a round pays for each allocation
        mine_ints = mine.numpy()

        def gather(integers: Sequence[int]) -> Sequence[Sequence[int]]:
            mine_ints[:] = integers
            return [one.tolist() for one in group.gather(mine)]

        return gather


def join(spec: GridSpec, *, timeout_s: float) -> Joined:
    """Blocks until every rank of the grid is here. Raises StartupError after timeout_s."""
    if spec.num_ranks == 1:
        return Joined(Alone(), None, None)
    try:
        tp, ep = _row(spec, timeout_s), _column(spec, timeout_s)
    except (RuntimeError, ValueError, OSError) as error:
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
    return Joined(Grid(shard, tp, ep), tp, ep)


def _row(spec: GridSpec, timeout_s: float) -> RankGroup | None:
    """Of one data-parallel rank, whose processes are on one machine, as they follow its leader."""
    if spec.tensor_parallel_size == 1:
        return None
    return _meet(spec, f"row{spec.dp_rank}", spec.tp_rank, spec.tensor_parallel_size, timeout_s)


def _column(spec: GridSpec, timeout_s: float) -> RankGroup | None:
    if spec.data_parallel_size == 1:
        return None
    if spec.meeting.init_method is not None:
        return _column_of_machines(spec, spec.meeting.init_method, timeout_s)
    return _meet(spec, f"column{spec.tp_rank}", spec.dp_rank, spec.data_parallel_size, timeout_s)


def _meet(spec: GridSpec, name: str, rank: int, size: int, timeout_s: float) -> RankGroup:
    return meet(Path(spec.meeting.directory), name, rank, size, timeout_s=timeout_s, silence_s=LOST_S)


def _column_of_machines(spec: GridSpec, init_method: str, timeout_s: float) -> RankGroup:
    """Every rank makes every group, in the same order."""
    dist.init_process_group(
        "gloo",
        init_method=init_method,
        rank=spec.rank,
        world_size=spec.num_ranks,
        timeout=timedelta(seconds=timeout_s),
    )
    columns = [range(spec.num_ranks)[first :: spec.tensor_parallel_size] for first in range(spec.tensor_parallel_size)]
    groups = [dist.new_group(list(column), timeout=timedelta(seconds=LOST_S)) for column in columns]
    return DistributedGroup(groups[spec.tp_rank])
