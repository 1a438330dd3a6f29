"""What a prefill node says it has on its hands."""

from __future__ import annotations

from pdserve.request import LeaseId
from pdserve.rpc.handoff import PeerLoad
from prefill_node.workload import Workload

A, B = LeaseId("a"), LeaseId("b")


def test_tokens_count_until_they_are_computed_and_blocks_until_the_stream_ends() -> None:
    workload = Workload(num_blocks=20, block_size=16)
    assert workload.load == PeerLoad(0, 20)
    workload.add(A, 100)
    workload.add(B, 32)
    assert workload.load == PeerLoad(132, 20 - 7 - 2)
    workload.compute(A, 64)
    workload.compute(A, 100)
    workload.compute(B, 16)
    assert workload.load == PeerLoad(16, 11)
    workload.remove(A)
    workload.remove(B)
    assert workload.load == PeerLoad(0, 20)


def test_prompts_that_need_more_than_there_is_leave_no_block_and_not_fewer() -> None:
    workload = Workload(num_blocks=2, block_size=16)
    workload.add(A, 100)
    assert workload.load == PeerLoad(100, 0)
