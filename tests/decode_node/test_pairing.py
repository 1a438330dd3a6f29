"""Which ranks of a peer are read from by which of ours."""

from __future__ import annotations

from dataclasses import replace

import pytest

from decode_node.coverage import Coverage
from decode_node.pairing import Pairing, pair
from pdserve.errors import PeerMismatch, ProtocolError
from pdserve.kv.layout import Fingerprint
from pdserve.request import BlockId
from pdserve.rpc.handoff import ChunkReady, Description

MINE = Fingerprint(1, "LlamaForCausalLM", "r0", "float32", 16, 2, 4, 16, 288)


def described(tp: int, num_ranks: int) -> Description:
    theirs = replace(MINE, tensor_parallel_size=tp)
    metadata = tuple(b"%d" % rank for rank in range(num_ranks))
    return Description("life", "0", theirs, 0, 8, 1024, metadata, 512, 4, 30.0)


def paired(mine_tp: int, peer_tp: int, num_ranks: int) -> Pairing:
    return pair(replace(MINE, tensor_parallel_size=mine_tp), described(peer_tp, num_ranks))


def links(pairing: Pairing) -> list[list[int]]:
    return [[rank for rank, _ in pairing.links_of(part)] for part in range(len(pairing.maps))]


def chunk(rank: int, seq: int = 0) -> ChunkReady:
    return ChunkReady(rank, seq, 0, 16, (BlockId(0),))


def test_equal_splits_read_the_same_part_of_every_data_parallel_rank() -> None:
    pairing = paired(2, 2, 4)
    assert links(pairing) == [[0, 2], [1, 3]]
    assert pairing.num_data_parallel_ranks == 2
    assert pairing.sources_of(1, 3) == ((3, "life/3"),)
    assert pairing.sources_of(0, 3) == ()


def test_one_process_reads_all_parts_of_the_rank_that_prefilled_and_of_no_other() -> None:
    pairing = paired(1, 2, 4)
    assert links(pairing) == [[0, 1, 2, 3]]
    for rank in (2, 3):
        assert pairing.sources_of(0, rank) == ((2, "life/2"), (3, "life/3"))


def test_many_processes_share_what_one_holds() -> None:
    pairing = paired(4, 2, 2)
    assert links(pairing) == [[0], [0], [1], [1]]
    assert [pairing.sources_of(part, 0) != () for part in range(4)] == [True, True, False, False]


def test_of_more_ranks_than_heads_some_are_read_by_nobody() -> None:
    pairing = paired(1, 8, 8)
    assert links(pairing) == [[0, 2, 4, 6]]
    assert [pairing.is_read(rank) for rank in range(8)] == [True, False] * 4


def test_a_peer_whose_ranks_are_not_what_it_says_is_refused() -> None:
    with pytest.raises(PeerMismatch, match="rank_metadata: of 3 ranks, tensor_parallel_size is 2 there"):
        paired(1, 2, 3)


# ---------------------------------------------------------------- what has come


def test_a_prompt_is_here_when_every_process_has_every_byte_of_every_rank() -> None:
    coverage = Coverage(paired(2, 4, 4), 2)
    for rank in range(4):
        coverage.announce(chunk(rank))
    coverage.pull(1)
    assert not coverage.is_pulled
    coverage.pull(0)
    assert coverage.is_pulled
    assert coverage.is_announced(1)
    coverage.commit(0)
    assert not coverage.is_committed
    coverage.commit(1)
    assert coverage.is_committed


@pytest.mark.parametrize(
    ("before", "wrong"),
    [
        ([], chunk(0, seq=1)),
        ([chunk(0)], chunk(0)),
        ([], chunk(4)),
        ([chunk(0), chunk(1)], chunk(2)),  # of another data-parallel rank
    ],
)
def test_a_chunk_out_of_order_or_of_a_rank_that_holds_no_part_is_refused(
    before: list[ChunkReady], wrong: ChunkReady
) -> None:
    coverage = Coverage(paired(1, 2, 4), 1)
    for one in before:
        coverage.announce(one)
    with pytest.raises(ProtocolError, match=f"chunk {wrong.seq} of rank {wrong.rank} out of order"):
        coverage.announce(wrong)


def test_fewer_chunks_than_promised_or_more_are_refused() -> None:
    coverage = Coverage(paired(1, 2, 2), 1)
    coverage.announce(chunk(0))
    coverage.announce(chunk(1))
    for promised in (0, 2):
        with pytest.raises(ProtocolError, match=f"covers the prompt by 1 chunks, {promised} were promised"):
            coverage.is_announced(promised)


def test_a_rank_that_nobody_reads_from_is_waited_for() -> None:
    coverage = Coverage(paired(1, 8, 8), 1)
    for rank in range(7):
        coverage.announce(chunk(rank))
    assert not coverage.is_announced(1)
    coverage.announce(chunk(7))
    assert coverage.is_announced(1)
