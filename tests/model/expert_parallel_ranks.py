"""Ranks that split experts or dense MLPs as real processes over gloo, each started by test_experts.py with its rank.

A case is a model directory over a grid of ranks, from rank 0 on; the others sit it out. All ranks with the same ep_rank
serve the same requests, and draw the same tokens. They go round together until nobody has anything left: a rank that
has nothing is idle in the round.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pdserve.model.collectives import Grid
from pdserve.model.model_config import read_config
from pdserve.model.rank_group import DistributedGroup
from pdserve.model.shard import Shard
from pdserve.model.torch_runner import load
from pdserve.request import TokenRequest
from tests.model.conftest import Answer, Server, make_request
from tests.model.tensor_parallel_ranks import LIMIT_S, NUM_RANKS, options, storage_of, told

CHUNK = 13


@dataclass(frozen=True, slots=True)
class Case:
    directory: str
    tp_size: int
    ep_size: int
    splits_dense_mlp: bool = False
    served: tuple[int, ...] = (0, 1, 2)  # which of the requests

    @property
    def num_ranks(self) -> int:
        return self.tp_size * self.ep_size


@dataclass(frozen=True, slots=True)
class Groups:
    """Of the ranks of one grid; of all of them, and of this rank's row and column."""

    everyone: dist.ProcessGroup
    tp: dist.ProcessGroup | None
    ep: dist.ProcessGroup | None


def requests() -> list[TokenRequest]:
    """Of one more round or chunk each: the ranks that serve them have nothing left one after the other."""
    generator = torch.Generator().manual_seed(3)
    lengths = ((1, 2), (23, 5), (70, 7))
    prompts = [(torch.randint(6, 211, (count,), generator=generator).tolist(), num_new) for count, num_new in lengths]
    return [make_request(str(i), prompt, num_new, num_logprobs=0) for i, (prompt, num_new) in enumerate(prompts)]


def serve_together(case: Case, rank: int, groups: Groups, cache_dir: Path) -> dict[str, Any]:
    """What this rank's requests got, by their ids, and in how many rounds it was idle."""
    ep_rank, tp_rank = divmod(rank, case.tp_size)
    shard = Shard(case.tp_size, tp_rank, case.ep_size, ep_rank, case.splits_dense_mlp)
    directory = Path(case.directory)
    storage = storage_of(directory, case.tp_size)
    collectives = Grid(shard, *(DistributedGroup(one) if one else None for one in (groups.tp, groups.ep)))
    runner = load(directory, read_config(directory), storage, collectives=collectives, **options(cache_dir))
    server, num_idle = Server(runner, storage, CHUNK), 0
    own = [requests()[number] for number in case.served[ep_rank :: case.ep_size]]
    answers = [Answer(request, slot) for slot, request in enumerate(own)]
    while True:
        waiting = [answer for answer in answers if not answer.is_finished]
        if not _is_anyone(bool(waiting), groups.everyone):
            break
        if waiting:
            server.run_round(waiting)
        else:
            runner.idle()
            num_idle += 1
    return {"num_idle": num_idle, "answers": {answer.request.request_id: told(answer) for answer in answers}}


def _is_anyone(is_true: bool, group: dist.ProcessGroup) -> bool:
    count = torch.tensor(int(is_true))
    dist.all_reduce(count, group=group)
    return bool(count)


def make_groups(tp_size: int, ep_size: int, rank: int) -> Groups | None:
    """None on a rank that sits out. Every process has to make every group, in the same order."""
    grid = torch.arange(tp_size * ep_size).view(ep_size, tp_size)
    everyone = dist.new_group(grid.flatten().tolist())
    tp = [dist.new_group(row) if tp_size > 1 else None for row in grid.tolist()]
    ep = [dist.new_group(column) if ep_size > 1 else None for column in grid.T.tolist()]
    return Groups(everyone, tp[rank // tp_size], ep[rank % tp_size]) if rank < tp_size * ep_size else None


def run_all(rank: int, rendezvous: str, cache_dir: Path, cases: Sequence[Case]) -> list[dict[str, Any] | None]:
    """By case; None where this rank sits out."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=NUM_RANKS,
        timeout=timedelta(seconds=LIMIT_S),
    )
    found: list[dict[str, Any] | None] = []
    for case in cases:
        groups = make_groups(case.tp_size, case.ep_size, rank)
        found.append(serve_together(case, rank, groups, cache_dir) if groups is not None else None)
    dist.destroy_process_group()
    return found


if __name__ == "__main__":
    told_rank, told_rendezvous, told_cache_dir, told_cases = sys.argv[1:]
    all_cases = [Case(*case) for case in json.loads(told_cases)]
    print(json.dumps(run_all(int(told_rank), told_rendezvous, Path(told_cache_dir), all_cases)))
