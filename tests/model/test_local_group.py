"""Ranks on one machine give each other tensors: each as it was, whatever its size, and nobody waits for a dead one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from pdserve.model.local_group import LocalGroup, meet

LIMIT_S = 30.0


class Ranks:
    """A group whose ranks are threads: what a program gives on each of them, in rank order."""

    def __init__(self, directory: Path, size: int, silence_s: float = LIMIT_S) -> None:
        self._pool = ThreadPoolExecutor(size)
        starts = [self._pool.submit(meet, directory, "row", rank, size, LIMIT_S, silence_s) for rank in range(size)]
        self.groups = [start.result() for start in starts]

    def run(self, program: Callable[[LocalGroup, int], Any]) -> list[Any]:
        runs = [self._pool.submit(program, group, rank) for rank, group in enumerate(self.groups)]
        return [run.result() for run in runs]

    def close(self) -> None:
        for group in self.groups:
            group.close()
        self._pool.shutdown()


@pytest.fixture(params=[2, 3, 4])
def ranks(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ranks]:
    ranks = Ranks(tmp_path, request.param)
    yield ranks
    ranks.close()


def tensor_of(seed: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(Random(seed).getrandbits(32))
    return torch.randn(shape, generator=generator).mul(100).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_sums_are_the_same_bits_on_every_rank_and_gathered_tensors_are_whole(ranks: Ranks, dtype: torch.dtype) -> None:
    size = len(ranks.groups)
    # Small and large by turns: slabs grow in the middle, and both halves are used before and after.
    shapes = [(1, 3), (7, 64), (0, 64), (900, 700), (5, 64), (2_000, 700), (1, 1), (300, 700)]

    def program(group: LocalGroup, rank: int) -> list[tuple[Tensor, list[Tensor]]]:
        return [
            (
                group.sum(tensor_of(f"{number} {rank}", shape, dtype)),
                group.gather(tensor_of(f"{number} {rank}", shape, dtype)),
            )
            for number, shape in enumerate(shapes)
        ]

    told = ranks.run(program)
    for number, shape in enumerate(shapes):
        parts = [tensor_of(f"{number} {rank}", shape, dtype) for rank in range(size)]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        for answers in told:
            summed, gathered = answers[number]
            assert torch.equal(summed, total)
            assert all(map(torch.equal, gathered, parts))


def test_rows_go_where_they_should_while_ranks_run_ahead_of_each_other(ranks: Ranks) -> None:
    size, num_rounds = len(ranks.groups), 200

    def count(number: int, sender: int, receiver: int) -> int:
        return Random(f"{number} {sender} {receiver}").choice([0, 0, 1, 3, 40])

    def rows(number: int, sender: int, receiver: int) -> Tensor:
        return tensor_of(f"{number} {sender} {receiver}", (count(number, sender, receiver), 9))

    def program(group: LocalGroup, rank: int) -> int:
        late, num_equal = Random(f"late {rank}"), 0
        for number in range(num_rounds):
            if late.random() < 0.05:
                threading.Event().wait(0.005)
            sent = [rows(number, rank, other) for other in range(size)]
            came = group.exchange(
                torch.cat(sent), [len(one) for one in sent], [count(number, other, rank) for other in range(size)]
            )
            num_equal += torch.equal(came, torch.cat([rows(number, other, rank) for other in range(size)]))
        return num_equal

    assert ranks.run(program) == [num_rounds] * size


def test_what_was_gathered_stays_as_it_is(ranks: Ranks) -> None:
    def program(group: LocalGroup, rank: int) -> list[list[int]]:
        kept = [group.gather(torch.tensor([number, rank])) for number in range(5)]
        return [[int(one[0]) for one in parts] for parts in kept]

    assert ranks.run(program) == [[[number] * len(ranks.groups) for number in range(5)]] * len(ranks.groups)


def test_a_strided_tensor_is_given_by_its_rows(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 2)
    told = ranks.run(lambda group, rank: group.gather(torch.arange(6).view(2, 3).T + rank)[1].tolist())
    assert told == [[[1, 4], [2, 5], [3, 6]]] * 2
    ranks.close()


def test_a_rank_that_ends_is_missed_at_once_and_one_that_is_silent_in_time(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 2, silence_s=1.0)
    with pytest.raises(TimeoutError, match="rank 1 of the group says nothing"):
        ranks.groups[0].gather(torch.tensor([1]))
    ranks.groups[1].close()
    with pytest.raises(ConnectionError):
        ranks.groups[0].gather(torch.tensor([1]))
    ranks.close()


@pytest.mark.parametrize(("rank", "missing"), [(0, 1), (2, 0)])
def test_a_rank_that_does_not_come_is_named(tmp_path: Path, rank: int, missing: int) -> None:
    with pytest.raises(TimeoutError, match=f"rank {missing} of row is missing"):
        meet(tmp_path, "row", rank, 3, 0.1, LIMIT_S)
