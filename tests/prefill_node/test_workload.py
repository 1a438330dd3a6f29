"""What a prefill node says it has on its hands."""

from __future__ import annotations

from pdserve.request import LeaseId
from pdserve.rpc.handoff import PeerLoad
from prefill_node.workload import Workload, load_of

A, B = LeaseId("a"), LeaseId("b")


def test_tokens_count_until_they_are_computed_and_blocks_until_the_stream_ends() -> None:
    workload = Workload(num_blocks=20, block_size=16)
    assert load_of([workload]) == PeerLoad(0, 20)
    workload.add(A, 100)
    workload.add(B, 32)
    assert load_of([workload]) == PeerLoad(132, 20 - 7 - 2)
    workload.compute(A, 64)
    workload.compute(A, 100)
    workload.compute(B, 16)
    assert load_of([workload]) == PeerLoad(16, 11)
    workload.remove(A)
    workload.remove(B)
    assert load_of([workload]) == PeerLoad(0, 20)


def test_prompts_that_need_more_than_there_is_leave_no_block_and_not_fewer() -> None:
    workload = Workload(num_blocks=2, block_size=16)
    workload.add(A, 100)
    assert load_of([workload]) == PeerLoad(100, 0)


def test_of_several_ranks_a_prompt_that_comes_finds_their_mean_queue_and_the_largest_room() -> None:
    first, second = Workload(num_blocks=20, block_size=16), Workload(num_blocks=20, block_size=16)
    first.add(A, 100)
    second.add(B, 32)
    assert load_of([first, second]) == PeerLoad(66, 20 - 2)


def test_a_prompt_is_behind_those_that_came_before_it_and_are_not_accepted_either() -> None:
    workload = Workload(num_blocks=20, block_size=16)
    workload.add(A, 100)
    workload.add(B, 32)
    assert (workload.num_ahead(A), workload.num_ahead(B)) == (0, 1)
    workload.accept(A)
    assert workload.num_ahead(B) == 0
    workload.remove(A)
    workload.remove(B)
    workload.add(A, 16)
    assert workload.num_ahead(A) == 0
