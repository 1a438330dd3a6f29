"""Tensor-parallel ranks as real processes over gloo, run by test_tensor_parallel.py; prints what came of it as JSON.

A case is a model directory and the ranks that serve it. Each rank goes through the cases that name it, in order; a
case's first rank leads, the others follow it.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pdserve.kv.storage import KVStorage
from pdserve.model.collectives import Grid
from pdserve.model.forward import load_forward
from pdserve.model.model_config import read_config
from pdserve.model.rank_group import DistributedGroup
from pdserve.model.runner import Follower, ModelRunner, RoundResult
from pdserve.model.shard import Shard
from pdserve.model.torch_runner import TorchFollower, load
from pdserve.request import TokenRequest
from pdserve.scheduler.plan import RoundPlan, SlotStart
from tests.model.conftest import Answer, Server, make_request

NUM_RANKS = 4
LIMIT_S = 100  # to start, and for each exchange
# Longer than the part of a prompt whose log probabilities are computed at a time.
CHUNK = 70


@dataclass(frozen=True, slots=True)
class Case:
    """served_by: the first leads."""

    directory: str
    served_by: tuple[int, ...]


class Link:
    """What the leader tells its followers: the requests that start and the plan, then the tokens it drew."""

    def __init__(self, group: dist.ProcessGroup, leader: int) -> None:
        self._group = group
        self._leader = leader

    def say(self, what: object) -> Any:
        """On the leader; followers say None and hear what the leader says."""
        said = [what]
        dist.broadcast_object_list(said, src=self._leader, group=self._group)
        return said[0]


class Leader:
    """Implements ModelRunner: tells the followers, and runs its own part."""

    def __init__(self, runner: ModelRunner, link: Link) -> None:
        self._runner = runner
        self._link = link
        self._starts: list[tuple[SlotStart, TokenRequest]] = []

    def start(self, start: SlotStart, request: TokenRequest) -> None:
        self._starts.append((start, request))
        self._runner.start(start, request)

    def execute(self, plan: RoundPlan) -> RoundResult:
        self._link.say((self._starts, plan))
        self._starts = []
        result = self._runner.execute(plan)
        self._link.say(result.tokens)
        return result

    def idle(self) -> None:
        raise AssertionError("every round here has rows")


def follow(follower: Follower, link: Link) -> None:
    while (said := link.say(None)) is not None:
        starts, plan = said
        for start, request in starts:
            follower.start(start, request)
        follower.compute(plan)
        follower.append(link.say(None))


def requests() -> list[TokenRequest]:
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(6, 211, (count,), generator=generator).tolist() for count in (1, 23, 150)]
    wants = {"num_logprobs": 0, "prompt_logprobs": 0}
    greedy = [make_request(str(number), prompt, 8, **wants) for number, prompt in enumerate(prompts)]
    return [*greedy, make_request("drawn", prompts[1], 8, temperature=1.0, seed=4, **wants)]


def options(cache_dir: Path) -> dict[str, Any]:
    return {"max_slots": 4, "max_model_len": 256, "cache_dir": cache_dir, "num_threads": 1}


def storage_of(directory: Path, tp_size: int) -> KVStorage:
    storage = KVStorage(read_config(directory).kv_layout(16).shard(tp_size), 64)
    storage.slab.view(torch.float32).fill_(torch.nan)
    return storage


def serve(runner: ModelRunner, storage: KVStorage) -> list[dict[str, Any]]:
    """What each of the requests got."""
    return [told(answer) for answer in Server(runner, storage, CHUNK).serve(requests())]


def told(answer: Answer) -> dict[str, Any]:
    return {
        "output": answer.output,
        "logprobs": [entry.logprob for entry in answer.logprobs],
        "prompt_logprobs": [asdict(entry) for entry in answer.prompt_logprobs],
    }


def run(case: Case, rank: int, group: dist.ProcessGroup, cache_dir: Path) -> list[dict[str, Any]] | None:
    """None on a follower."""
    directory, tp_size = Path(case.directory), len(case.served_by)
    config, storage = read_config(directory), storage_of(directory, tp_size)
    shard = Shard(tp_size, case.served_by.index(rank))
    collectives, link = (
        Grid(shard, DistributedGroup(group) if tp_size > 1 else None, None),
        Link(group, case.served_by[0]),
    )
    if shard.tp_rank:
        forward = load_forward(directory, config, storage, collectives=collectives, **options(cache_dir))
        follow(TorchFollower(forward), link)
        return None
    runner = load(directory, config, storage, collectives=collectives, **options(cache_dir))
    answers = serve(Leader(runner, link), storage)
    link.say(None)
    return answers


def run_rank(rank: int, rendezvous: str, cache_dir: Path, cases: Sequence[Case]) -> dict[int, list[dict[str, Any]]]:
    """Answers by the number of the case, for the cases that this rank leads."""
    torch.set_num_threads(1)
    limit = timedelta(seconds=LIMIT_S)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=NUM_RANKS, timeout=limit)
    # Every process has to make every group, in the same order.
    groups = {ranks: dist.new_group(list(ranks)) for ranks in dict.fromkeys(case.served_by for case in cases)}
    answers: dict[int, list[dict[str, Any]]] = {}
    for number, case in enumerate(cases):
        if rank in case.served_by:
            found = run(case, rank, groups[case.served_by], cache_dir)
            answers |= {number: found} if found is not None else {}
    dist.destroy_process_group()
    return answers


def run_all(directory: Path, cache_dir: Path, cases: Sequence[Case]) -> dict[int, list[dict[str, Any]]]:
    """Forks, so that torch, which has no threads yet, is imported once. directory: an empty one, for the rendezvous."""
    answers: dict[int, list[dict[str, Any]]] = {}
    with ProcessPoolExecutor(NUM_RANKS, multiprocessing.get_context("fork")) as pool:
        rendezvous = str(directory / "rendezvous")
        ranks = [pool.submit(run_rank, rank, rendezvous, cache_dir, cases) for rank in range(NUM_RANKS)]
        for rank in as_completed(ranks):
            answers |= rank.result()
    return answers


if __name__ == "__main__":
    told_directory, told_cache_dir, told_cases = sys.argv[1:]
    all_cases = [Case(directory, tuple(ranks)) for directory, ranks in json.loads(told_cases)]
    print(json.dumps(run_all(Path(told_directory), Path(told_cache_dir), all_cases)))
